"""The routes."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from specprefill_jax.server import chat, completions
from specprefill_jax.server.body import parse_object, read_body
from specprefill_jax.server.chat import ChatReply
from specprefill_jax.server.completions import CompletionReply
from specprefill_jax.server.errors import ApiError, unavailable
from specprefill_jax.server.generation import Generation
from specprefill_jax.server.middleware import Gate
from specprefill_jax.server.openapi import describe
from specprefill_jax.server.prepare import Arrival, Prepared, check_ids, need_tokenizer
from specprefill_jax.server.protocol import DetokenizeBody, TokenizeBody, TokenizeChatBody
from specprefill_jax.server.reply import Reply, token_text
from specprefill_jax.server.service import EngineLike, ServerSettings, Service
from specprefill_jax.server.sse import EventStream, encode
from specprefill_jax.timing import PhaseClock

Endpoint = Callable[[HttpRequest], Awaitable[Response]]

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def create_app(engine: EngineLike | None, settings: ServerSettings | None = None) -> Starlette:
    """The ASGI app that serves `engine`.

    With None it answers 503 until `app.state.service.attach(engine)`, so that it can listen while models load. It
    neither starts nor closes the engine.
    """
    service = Service(settings or ServerSettings())
    if engine is not None:
        service.attach(engine)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    pages = _page_routes()
    probes = _probe_routes(service)
    routes = [*_generation_routes(service), *_model_routes(service), *_tokenizer_routes(service), *probes, *pages]
    open_paths = [route.path for route in (*probes, *pages)]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, service=service, open_paths=open_paths)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """The router's own errors in the shape of all others."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"{request.url.path[:200]!r} is no path of this server",
        405: f"{request.method} is not allowed at {request.url.path[:200]!r}",
    }
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


def _generation_routes(service: Service) -> list[Route]:
    def route(
        path: str,
        prefix: str,
        prepare: Callable[[Service, bytes, Arrival], Prepared],
        reply: Callable[[Prepared], Reply],
    ) -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            service.ready()
            data = await read_body(request, service.settings.max_body_bytes)
            arrived = time.perf_counter()
            arrival = Arrival(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), PhaseClock())
            generation = Generation(service.ready(), lambda one: service.metrics.watch(one, arrived))

            def begin() -> Prepared:
                call = prepare(service, data, arrival)
                generation.submit(call.requests)
                return call

            try:
                with service.admission():
                    call = await service.in_thread(begin)
                if call.stream:
                    return EventStream(generation, reply(call), service.settings.keep_alive_seconds)
                async with generation.watching(request.receive):
                    answers = await generation.answers()
                return Response(
                    await service.in_thread(lambda: encode(reply(call).body(answers))), media_type="application/json"
                )
            except BaseException:
                generation.close()
                raise

        return Route(path, endpoint, methods=["POST"])

    return [
        route("/v1/chat/completions", "chatcmpl", chat.prepare, ChatReply),
        route("/v1/completions", "cmpl", completions.prepare, CompletionReply),
    ]


def _model_routes(service: Service) -> list[Route]:
    began = int(time.time())

    def card(engine: EngineLike) -> dict[str, Any]:
        return {
            "id": service.name_of(engine),
            "object": "model",
            "created": began,
            "owned_by": "specprefill-jax",
            "root": engine.model_root,
            "parent": None,
            "max_model_len": engine.max_model_len,
        }

    async def models(_: HttpRequest) -> Response:
        engine = service.engine
        if engine is None:
            raise unavailable(service.state)
        return _json({"object": "list", "data": [card(engine)]})

    async def model(request: HttpRequest) -> Response:
        return _json(card(service.named(request.path_params["name"])))

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", model)]


def _tokenizer_routes(service: Service) -> list[Route]:
    def tokenize(data: bytes) -> bytes:
        value = parse_object(data)
        body = (TokenizeChatBody if "messages" in value else TokenizeBody).read(value)
        engine = service.named(body.model)
        if isinstance(body, TokenizeBody):
            ids = completions.encode_text(engine, body.prompt, body.add_special_tokens)
        else:
            ids = chat.encode_messages(engine, body).ids
        strings = [token_text(engine.tokenizer, index)[0] for index in ids] if body.return_token_strs else None
        return encode({"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings})

    def detokenize(data: bytes) -> bytes:
        body = DetokenizeBody.read(parse_object(data))
        engine = service.named(body.model)
        check_ids(body.tokens, engine.vocab_size, "tokens")
        return encode({"prompt": need_tokenizer(engine, "tokens").decode(body.tokens, skip_special_tokens=False)})

    def route(path: str, work: Callable[[bytes], bytes]) -> Route:
        async def endpoint(request: HttpRequest) -> Response:
            service.ready()
            data = await read_body(request, service.settings.max_body_bytes)
            with service.admission():
                return Response(await service.in_thread(work, data), media_type="application/json")

        return Route(path, endpoint, methods=["POST"])

    async def info(_: HttpRequest) -> Response:
        tokenizer = need_tokenizer(service.ready(), "model")
        fingerprint = await service.in_thread(tokenizer.fingerprint)  # a second's work for a large vocabulary
        return _json(
            {
                "eos_token": None,  # lm-eval takes a server without this key for one without a tokenizer
                **tokenizer.special_tokens,
                "chat_template": tokenizer.chat_template,
                "source": tokenizer.source,
                "vocab_size": tokenizer.vocab_size,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_ids": list(tokenizer.eos_token_ids),
                "special_tokens": dict(tokenizer.special_tokens),
                "has_chat_template": tokenizer.has_chat_template,
                "fingerprint": fingerprint,
            }
        )

    return [route("/tokenize", tokenize), route("/detokenize", detokenize), Route("/tokenizer_info", info)]


def _probe_routes(service: Service) -> list[Route]:
    """What needs no key, so that load balancers and Prometheus need none."""

    async def health(_: HttpRequest) -> Response:
        state = service.state
        if state != "ready":
            raise unavailable(state)
        return _json({"status": "ready"})

    async def metrics(_: HttpRequest) -> Response:
        # Not on the event loop: the engine is asked, and one that is stuck may let one wait.
        return Response(await service.in_thread(service.metrics.text), media_type="text/plain; version=0.0.4")

    try:
        released = version("specprefill-jax")
    except PackageNotFoundError:  # run from a source tree that is not installed
        released = "unknown"
    described = describe(released)

    async def about(_: HttpRequest) -> Response:
        return _json({"version": released})

    async def openapi(_: HttpRequest) -> Response:
        return _json(described)

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", about),
        Route("/openapi.json", openapi),
    ]


def _page_routes() -> list[Route]:
    """The files of the page, read once: a fixed set of paths, so that no path of a client reaches the disk."""

    def page(content: bytes, media_type: str) -> Endpoint:
        async def endpoint(_: HttpRequest) -> Response:
            return Response(content, headers=_PAGE_HEADERS, media_type=media_type)

        return endpoint

    routes = []
    folder = files(__package__).joinpath("static")
    for file in sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []:
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            routes.append(Route(path, page(file.read_bytes(), kind)))
    return routes
