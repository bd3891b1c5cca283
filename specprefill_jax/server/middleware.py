"""What every request passes: its id, the key, the count of statuses, and the net under all handlers.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide that a client has gone.
"""

import hmac
import logging
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specprefill_jax.server.errors import ApiError, internal
from specprefill_jax.server.generation import ClientGone
from specprefill_jax.server.service import Service

log = logging.getLogger("specprefill_jax.server")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Every path but the open ones needs a key where there are keys, unknown ones included."""

    def __init__(self, app: ASGIApp, service: Service, open_paths: Collection[str]) -> None:
        """Stand before `app`."""
        self.app = app
        self.service = service
        self.open_paths = frozenset(open_paths)
        self.keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(raw=message["headers"])["X-Request-Id"] = request_id
                self.service.metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        try:
            if scope["path"] not in self.open_paths and not self._allowed(headers.get("authorization", "")):
                message = "a valid key is needed: Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await self.app(scope, receive, answer)
        except (ClientDisconnect, ClientGone):
            return
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Exception:
            log.exception("request %s failed: %s %r", request_id, scope["method"], scope["path"])
            if not started:
                await internal(request_id).response()(scope, receive, answer)

    def _allowed(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        # Every key is compared, so that the time tells neither which one fits nor how far.
        fits = [hmac.compare_digest(key.strip().encode("latin-1"), known) for known in self.keys]
        return not fits or (scheme.lower() == "bearer" and any(fits))
