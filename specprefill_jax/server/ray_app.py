"""The same app on Ray Serve, with an engine a replica; needs the extras `serve` and `ray`.

Ray's proxy hands each request to a `Front`, which reads the body, so that the request can go where its prompt's
beginning is known (`ray_policies`), and passes on what the app of one `Replica` answers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specprefill_jax.engine.request import EngineConfig
from specprefill_jax.server.app import create_app
from specprefill_jax.server.errors import ApiError, unavailable
from specprefill_jax.server.prefix_key import prefix_key
from specprefill_jax.server.ray_policies import PrefixRouter, QueuedTokens
from specprefill_jax.server.ray_settings import RaySettings
from specprefill_jax.server.service import EngineLike, ServerSettings
from specprefill_jax.server.sse import DONE, frame

log = logging.getLogger("ray.serve")
"""Ray's own, since replicas keep what goes there in their log files."""

PROMPT_WAIT = 30.0
"""Seconds that a prompt may wait for a replica to take it, before its client is told to come again."""

PROBE_WAIT = 5.0
"""The same for everything else, and for the replicas' metrics."""

NAME = "specprefill"
"""Of the application on Ray Serve."""

_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
)


class ReplicaEngine(EngineLike, Protocol):
    """What a replica asks of its engine besides."""

    def close(self) -> None:
        """End everything."""


class Replica:
    """One engine and the app around it, in a process of its own."""

    def __init__(self, load: Callable[[], ReplicaEngine], settings: ServerSettings) -> None:
        """Ray sends requests once this has returned: `load` gives an engine that serves."""
        self._engine = load()
        self._app = create_app(self._engine, settings)

    async def exchange(self, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """What the app answers, as ASGI messages; before them, at once, an empty list: the request has arrived."""
        yield []
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()
        sent: asyncio.Queue[Message] = asyncio.Queue()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.create_task(self._app(scope, receive, sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait({"type": ""}))
        try:
            ended = False
            while not ended:
                batch = [await sent.get()]
                while not sent.empty():  # what a busy replica has to say goes in fewer pieces
                    batch.append(sent.get_nowait())
                ended = not batch[-1]["type"]
                yield batch[:-1] if ended else batch
            await answering
        finally:  # Ray cancels this when the client has gone
            left.set()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def metrics(self) -> tuple[str, str]:
        """This replica's rank, and its metrics as text."""
        service = self._app.state.service
        return str(serve.get_replica_context().rank.rank), (await service.in_thread(service.metrics.text)).decode()

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that says no three times."""
        if self._engine.state in ("stuck", "failed", "closed"):
            raise RuntimeError(f"the engine is {self._engine.state}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Ray for `QueuedTokens`."""
        stats = self._engine.stats()
        busy = (stats.running + stats.prefilling) / self._engine.config.max_running
        return {"waiting_tokens": float(stats.waiting_tokens), "busy": busy}

    def __del__(self) -> None:
        """Called by Ray, after the last request has ended or the time for that is over."""
        if hasattr(self, "_app"):
            self._app.state.service.close()
            self._engine.close()


class Front:
    """Takes requests from Ray's proxy and passes them on, with the beginnings of their prompts for the router."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        """Pass on to `replicas`; of longer bodies only what makes a replica refuse them."""
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes
        self._draining = False
        self._running: set[_Relay] = set()

    async def __call__(self, request: HttpRequest) -> Response:
        """The answer to one request."""
        path = request.url.path
        if request.method in ("GET", "HEAD") and path == "/metrics":
            return await self._metrics()
        try:
            body = await _read(request, self._max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        if self._draining:
            return unavailable("draining").response()
        key = prefix_key(path, body) if len(body) <= self._max_body_bytes else ""
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        handle = self._replicas.options(stream=True, method_name="exchange", session_id=key)
        wait = PROMPT_WAIT if request.method == "POST" else PROBE_WAIT
        return _Relay(handle.remote(scope, body), wait, self._running)

    async def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait so long for those that run; whether all of them ended."""
        self._draining = True
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return not self._running

    async def _metrics(self) -> Response:
        try:
            found = await self._replicas.broadcast("metrics").results_async(timeout_s=PROBE_WAIT)
        except (RayError, DeploymentUnavailableError, TimeoutError):
            return _error(503, "not every replica has told its metrics: try again", "no_metrics").response()
        return Response(merged(found), media_type="text/plain; version=0.0.4")


async def _read(request: HttpRequest, limit: int) -> bytes:
    """The body, or its first `limit + 1` bytes."""
    size, parts = 0, []
    async for part in request.stream():
        if size <= limit:
            parts.append(part)
        size += len(part)
        if size > 4 * limit:  # as `read_body`, which explains it
            break
    return b"".join(parts)[: limit + 1]


def _error(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, code=code, retry_after=1.0)


class _Relay(Response):
    """A replica's answer as it comes. A replica that is lost before it began to answer makes it a 503; after that, an
    event stream ends with an error and [DONE], and anything else breaks off."""

    def __init__(self, answer: Any, wait: float, running: "set[_Relay]") -> None:
        """Pass on `answer`, of `Replica.exchange`; it must begin within `wait` seconds, and is in `running` for its
        duration."""
        self._answer = answer
        self._wait = wait
        self._running = running
        self.status_code = 200
        self.background = None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running.add(self)
        try:
            await self._pass_on(scope, receive, send)
        finally:
            self._running.discard(self)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = events = False
        try:
            await asyncio.wait_for(anext(self._answer), self._wait)
            async for messages in self._answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        started = True
                        events = any(
                            name == b"content-type" and value.startswith(b"text/event-stream")
                            for name, value in message["headers"]
                        )
                    await send(message)
            return
        except TimeoutError:
            self._answer.cancel()
            error = _error(503, f"no replica was free within {self._wait:g} seconds", "no_replica")
        except DeploymentUnavailableError:
            error = _error(503, "there are no replicas", "no_replica")
        except BackPressureError:
            error = _error(429, "too many requests wait for a replica", "queue_full")
        except RayTaskError:
            log.exception("a replica failed outside its app")
            error = ApiError(500, "the server failed; its log has the reason", code="internal_error")
        except RayError:
            self._answer.cancel()  # it may only be out of reach
            error = _error(503, "the replica that worked on this request was lost: try again", "replica_lost")
        except asyncio.CancelledError:  # the client has gone
            self._answer.cancel()
            raise
        if not started:
            await error.response()(scope, receive, send)
        elif events:
            await send({"type": "http.response.body", "body": frame(error.body) + DONE, "more_body": False})
        else:
            raise error


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def merged(texts: Iterable[tuple[str, str]]) -> bytes:
    """Metrics of several replicas, given as (rank, text), in one text: the label `engine` says whose each is."""
    families: dict[str, Metric] = {}
    for rank, text in sorted(texts):
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for name, labels, value, *_ in family.samples:
                whole.add_sample(name, {**labels, "engine": rank}, value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families.values()))
    return generate_latest(registry)


def build(
    load: Callable[[], ReplicaEngine], limits: EngineConfig, server: ServerSettings, settings: RaySettings
) -> serve.Application:
    """What `ray.serve.run` takes.

    Args:
        load: makes an engine that serves; it is pickled, and called in each replica.
        limits: of these engines.
        server: the app's settings.
        settings: the deployment's.
    """
    most = settings.max_replicas or settings.replicas
    scaling: dict[str, Any] = {"num_replicas": settings.replicas}
    if most > settings.replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.replicas,
                max_replicas=most,
                look_back_period_s=10.0,
                upscale_delay_s=10.0,
                policy=AutoscalingPolicy(
                    policy_function=QueuedTokens,
                    policy_kwargs={"tokens_per_replica": settings.queued_tokens_per_replica},
                ),
            )
        }
    manners: dict[str, Any] = {
        "health_check_period_s": settings.health_check_period,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": 3,
    }
    replicas = serve.deployment(
        Replica,
        name="replica",
        # The engine itself says when it is full, and for how long; probes must find room even then.
        max_ongoing_requests=limits.max_running + limits.max_queued_requests + 64,
        max_queued_requests=limits.max_queued_requests,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"slack": settings.prefix_slack}
        ),
        **scaling,
        **manners,
    )
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=settings.fronts,
        max_ongoing_requests=most * (limits.max_running + limits.max_queued_requests) + 256,
        ray_actor_options={"num_cpus": 0},
        **manners,
    )
    return front.bind(replicas.bind(load, server), server.max_body_bytes)


def deploy(
    application: serve.Application, host: str, port: int, *, every_node: bool = False, log_requests: bool = False
) -> None:
    """Run what `build` made on the Ray cluster that this process is connected to; returns when requests are taken.

    Args:
        application: what to run.
        host, port: where Ray's proxy listens.
        every_node: whether there is a proxy on every node that has replicas, or one alone, on the head node.
        log_requests: whether the replicas' logs have a line for every request.

    Raises:
        RuntimeError: it could not be started; the message has the replicas' reasons.
    """
    # Requests of a stuck engine would never end, so an unhealthy replica is not waited for.
    forced = {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}
    serve.start(
        proxy_location="EveryNode" if every_node else "HeadOnly",
        http_options={"host": host, "port": port},
        controller_options={"runtime_env": {"env_vars": forced}},
    )
    serve.run(application, name=NAME, route_prefix="/", logging_config={"enable_access_log": log_requests})


def shut_down(seconds: float) -> bool:
    """Take no more requests, let those that run finish within so many seconds, and end this application, and Ray Serve
    with it unless it runs others.

    Returns whether all of them did; the others' connections break. (Ray by itself would break all of them, since its
    proxies go first.)
    """
    finished = False
    with contextlib.suppress(RayError, RayServeException, TimeoutError):  # never deployed, or lost
        front = serve.get_app_handle(NAME)
        finished = all(front.broadcast("drain", seconds).results(timeout_s=seconds + PROBE_WAIT))
    if serve.status().applications.keys() <= {NAME}:
        serve.shutdown()
    else:
        serve.delete(NAME)
    return finished
