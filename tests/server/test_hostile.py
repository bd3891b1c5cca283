"""Hostile bodies, generated from the API's own description: an answer every time, and never a 500."""

import asyncio
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.fake_engine import FakeEngine, make_tokenizer

from specprefill_jax.server.app import create_app
from specprefill_jax.server.openapi import describe

DOCUMENT = describe("0")
SCHEMAS = DOCUMENT["components"]["schemas"]
PATHS = sorted(path for path, item in DOCUMENT["paths"].items() if "post" in item)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 400)
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def fitting(schema) -> st.SearchStrategy:
    """Values of a schema, but for its finer points."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return st.one_of([fitting(one) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = schema.get("required", [])
        fields = {name: fitting(one) for name, one in schema["properties"].items()}
        # Mostly right with something wrong here and there, else only the first check would ever be reached.
        return st.fixed_dictionaries(
            {name: fields[name] for name in required},
            optional={name: one for name, one in fields.items() if name not in required},
        )
    if kind == "array":
        least, most = schema.get("minItems", 0), min(schema.get("maxItems", 4), 4)
        return st.lists(fitting(schema["items"]) if "items" in schema else anything, min_size=least, max_size=most)
    if kind == "integer":
        return st.integers(max(schema.get("minimum", -2), -2), 300)
    return {
        "string": st.text(st.characters(exclude_categories=["Cs"]), min_size=schema.get("minLength", 0), max_size=12),
        "number": st.floats(0, 2),
        "boolean": st.booleans(),
        "null": st.none(),
        "object": st.dictionaries(st.text(max_size=5), anything, max_size=3),
    }.get(kind, anything)


@st.composite
def bodies(draw, path):
    """A body of the schema with up to two fields changed to anything."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = draw(fitting(schema))
    names = st.sampled_from([*body, "model", "specprefill", "logit_bias", "response_format", "whatever"])
    for _ in range(draw(st.integers(0, 2))):
        body[draw(names)] = draw(anything)
    if isinstance(body.get("model"), str) and draw(st.booleans()):
        body["model"] = "fake"
    return body


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


def check(status, data):
    """A good answer, or an error in its shape that is the client's."""
    assert status in (200, 400, 404), (status, data)
    if data.startswith((b"data: ", b": keep-alive")):
        assert data.endswith(b"data: [DONE]\n\n")
        assert b'"code":"internal_error"' not in data
    else:
        body = json.loads(data)
        assert (status == 200) != ("error" in body)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_almost_right(ask, path):
    statuses = set()

    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies(path))
    def run(body):
        status, data = ask(path, json.dumps(body).encode("utf-8", "surrogatepass"))
        check(status, data)
        statuses.add(status)

    logging.disable(logging.NOTSET)
    run()
    assert {200, 400} <= statuses  # both sides of the checks were seen


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: json.dumps(text).encode()))
def test_bytes(ask, data):
    for path in PATHS:
        check(*ask(path, data))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(value=anything)
def test_any_json(ask, value):
    data = json.dumps({"prompt": value, "messages": value, "tokens": value, "max_tokens": 1}).encode()
    for path in PATHS:
        check(*ask(path, data))
