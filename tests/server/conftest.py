"""One server a session over the fake engine, and clients for it."""

import openai
import pytest
from server.fake_engine import FakeEngine, make_tokenizer
from server.running import Server


@pytest.fixture(scope="session")
def session_server():
    server = Server(FakeEngine(make_tokenizer()))
    yield server
    server.stop()


@pytest.fixture
def server(session_server):
    session_server.engine.reset()
    return session_server


@pytest.fixture
def engine(server):
    return server.engine


@pytest.fixture(scope="session")
def client(session_server):
    with openai.OpenAI(api_key="none", base_url=session_server.url + "/v1", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def locked():
    """A server with two keys."""
    server = Server(FakeEngine(make_tokenizer()), api_keys=("key one", "two"))
    yield server
    server.stop()


@pytest.fixture
def another():
    """A function that starts a further server: `another(engine, **settings)`."""
    started = []

    def start(engine, **settings):
        started.append(Server(engine, **settings))
        return started[-1]

    yield start
    for server in started:
        server.stop()
