"""Hostile bodies, generated from the API's own description: an answer every time, and never a 500."""

import asyncio
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.fake_engine import FakeEngine, make_tokenizer

from specprefill_jax.server.app import create_app
from specprefill_jax.server.openapi import describe

DOCUMENT = describe("0")
SCHEMAS = DOCUMENT["components"]["schemas"]
PATHS = sorted(path for path, item in DOCUMENT["paths"].items() if "post" in item)

ODD = (None, True, False, 0, -1, 3, 10**20, 2**63, 0.5, -0.0, 1e308, math.nan, math.inf, "", "fake", "\ud800", "\0")
ODD += ("🙂" * 3, [], {}, [[]], [None], [1, "a"], {"": None}, {"type": "text"}, {"keep_rate": 0.1})


class Bodies:
    """Bodies that are right, or nearly; from a seed, since hypothesis takes long over schemas as wide as these."""

    def __init__(self, path):
        self.random = random.Random(path)
        self.schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    def draw(self):
        """A value of the schema, with up to two of its fields changed to something odd."""
        body = self.fitting(self.schema)
        for _ in range(self.random.choice((0, 0, 1, 1, 2))):
            names = [*body, "model", "specprefill", "logit_bias", "response_format", "whatever", "\udfff"]
            body[self.random.choice(names)] = self.odd()
        return body

    def odd(self, depth=0):
        kind = self.random.random()
        if depth > 3 or kind < 0.7:
            return self.random.choice(ODD)
        if kind < 0.85:
            return [self.odd(depth + 1) for _ in range(self.random.randrange(4))]
        return {self.text(): self.odd(depth + 1) for _ in range(self.random.randrange(4))}

    def text(self):
        return "".join(self.random.choices("ab \n\0é日🙂<|end|>{}%", k=self.random.randrange(1, 9)))

    def fitting(self, schema):
        """A value of a schema, but for its finer points."""
        if "$ref" in schema:
            schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            return self.fitting(self.random.choice(schema["anyOf"]))
        if "const" in schema or "enum" in schema:
            return self.random.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            required = schema.get("required", ())
            # Few fields at once, or one that is out of range would nearly always be among them.
            names = [name for name in schema["properties"] if name in required or self.random.random() < 0.12]
            return {name: self.fitting(schema["properties"][name]) for name in names}
        if kind == "array":
            length = self.random.randint(schema.get("minItems", 0), 3)
            return [self.fitting(schema["items"]) for _ in range(length)]
        if kind == "integer":
            return self.random.choice((schema.get("minimum", -1), 1, 2, 5, 299, schema.get("maximum", 2**31)))
        if kind == "number":
            return self.random.choice((0, 0.5, 1, 1.5, -1))
        return {"string": self.text(), "boolean": self.random.random() < 0.5, "null": None}.get(kind, self.odd())


@pytest.fixture(scope="module")
def ask():
    """A function that posts bytes to the app, without a socket in between: status and body."""
    app = create_app(FakeEngine(make_tokenizer()))
    loop = asyncio.new_event_loop()

    async def call(path, data):
        sent = []
        incoming = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive():
            return incoming.pop() if incoming else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "server": ("x", 1)}
        await asyncio.wait_for(app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send), 20)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    yield lambda path, data: loop.run_until_complete(call(path, data))
    app.state.service.close()
    loop.close()


def check(status, data, body=None):
    """A good answer, or an error in its shape that is the client's."""
    assert status in (200, 400, 404), (status, data, body)
    if data.startswith((b"data: ", b": keep-alive")):
        assert data.endswith(b"data: [DONE]\n\n")
        assert b'"code":"internal_error"' not in data
    else:
        body = json.loads(data)
        assert (status == 200) != ("error" in body)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_almost_right(ask, path):
    bodies, statuses = Bodies(path), Counter()
    for _ in range(250):
        body = bodies.draw()
        status, data = ask(path, json.dumps(body).encode())
        check(status, data, body)
        statuses[status] += 1
    assert min(statuses[200], statuses[400]) > 25  # both sides of the checks were seen


@settings(max_examples=60, deadline=None, database=None)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: json.dumps(text).encode()))
def test_bytes(ask, data):
    for path in PATHS:
        check(*ask(path, data))


@settings(max_examples=60, deadline=None, database=None)
@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_any_json(ask, value):
    data = json.dumps({"prompt": value, "messages": value, "tokens": value, "max_tokens": 1}).encode()
    for path in PATHS:
        check(*ask(path, data))
