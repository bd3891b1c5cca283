"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}, with a status that says the same."""

import json
import math
import re
from dataclasses import fields

from starlette.responses import Response

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.engine.request import QueueFullError, UnavailableError
from specprefill_jax.errors import SpecPrefillError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "client_gone"}
_ARGUMENT = re.compile(r"(\w+)(?:\[\d+\])?=")
_SETTINGS = frozenset(setting.name for setting in fields(SpecPrefillConfig))


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Describe the answer; `retry_after` in seconds becomes the headers that clients know."""
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(math.ceil(retry_after), 1))
            self.headers["retry-after-ms"] = str(max(math.ceil(retry_after * 1000), 1))
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The answer itself; what cannot be encoded (lone surrogates) is escaped."""
        content = json.dumps(self.body).encode()
        return Response(content, self.status, self.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(state: str) -> ApiError:
    """A 503 for an engine in `state`."""
    wait = {"loading": 5.0, "draining": 30.0}.get(state, 60.0)
    return ApiError(503, f"the server takes no requests: it is {state}", code=f"engine_{state}", retry_after=wait)


def internal(request_id: str) -> ApiError:
    """A 500 that tells no more than where to look."""
    return ApiError(500, f"the server failed; its log has the reason under {request_id}", code="internal_error")


def refused(error: SpecPrefillError) -> ApiError:
    """What a client is told of an error raised on its input; a setting is named where a body has it, `specprefill`."""
    message = str(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", retry_after=error.retry_after)
    if isinstance(error, UnavailableError):
        return ApiError(503, message, code="engine_unavailable", retry_after=30.0)
    named = _ARGUMENT.match(message)
    if named is None:
        return invalid(message)
    within = "specprefill." if named[1] in _SETTINGS else ""
    return invalid(within + message, within + named[1])
