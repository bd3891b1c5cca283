"""A real server on 127.0.0.1 and what tests ask of it."""

import http.client
import json
import socket
import threading
import time
from contextlib import closing, contextmanager

import uvicorn

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.server.app import create_app
from specprefill_jax.server.service import ServerSettings

DEFAULTS = SpecPrefillConfig(keep_rate=0.5, min_prompt_tokens=64, min_predicted_gain=0.0, tail_tokens=32)


class Server:
    """A uvicorn in a thread."""

    def __init__(self, engine, **settings):
        self.app = create_app(engine, ServerSettings(**{"defaults": DEFAULTS, **settings}))
        self.engine = engine
        self.service = self.app.state.service
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.app, log_config=None, access_log=False))
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listening],), daemon=True)
        self.thread.start()
        while not self.uvicorn.started:
            assert self.thread.is_alive()
            time.sleep(0.005)

    def stop(self):
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def open(self, method, path, body=None, headers=None):
        """A connection on which a request was sent, and its response, not yet read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = json.dumps(body) if isinstance(body, dict | list) else body
        headers = {**({"Content-Type": "application/json"} if data is not None else {}), **(headers or {})}
        try:
            connection.request(method, path, data, headers)
            return connection, connection.getresponse()
        except OSError:
            connection.close()
            raise

    def ask(self, method, path, body=None, headers=None):
        """Status, headers and body."""
        connection, response = self.open(method, path, body, headers)
        with closing(connection):
            return response.status, response.headers, response.read()

    def post(self, path, body, headers=None):
        """Status and the JSON of an answer."""
        status, _, data = self.ask("POST", path, body, headers)
        return status, json.loads(data)

    def frames(self, path, body):
        """The frames of a stream, each without the empty line that ends it."""
        status, headers, data = self.ask("POST", path, {**body, "stream": True})
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert data.endswith(b"\n\n")
        assert b"\r" not in data
        return data.decode()[:-2].split("\n\n")

    def chunks(self, path, body):
        """The JSON of a stream's chunks; the stream must end with [DONE]."""
        *frames, last = self.frames(path, body)
        assert last == "data: [DONE]"
        assert all(frame.startswith("data: {") for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@contextmanager
def held(engine, tokens=0):
    """The engine gives so many tokens a request and no more until the block ends."""
    engine.tokens_before_gate = tokens
    engine.gate.clear()
    try:
        yield
    finally:
        engine.gate.set()
