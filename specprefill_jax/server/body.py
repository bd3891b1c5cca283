"""Request bodies: read within a limit, and parsed without anything that a later stage could trip over."""

import json
import reprlib
from typing import Any

from starlette.requests import Request as HttpRequest

from specprefill_jax.server.errors import ApiError, invalid

MAX_DEPTH = 64
"""Objects and lists within each other; templates and validators recurse, and no schema needs as many."""

_INTEGERS = range(-(2**63), 2**64)


async def read_body(request: HttpRequest, limit: int) -> bytes:
    """The body as JSON text of at most `limit` bytes, counted as they come.

    A longer one is read on for a while without being kept: a client that is cut off while it sends sees a broken
    connection and no error. Raises ApiError 413, or 415 where it is not said to be JSON: a web page of another origin
    can send any other type without asking.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type={reprlib.repr(kind)} is not allowed: it must be application/json")
    length = request.headers.get("content-length", "0")
    size, parts = 0, []
    if not length.isdecimal() or len(length) > 18 or int(length) <= 4 * limit:
        async for part in request.stream():
            size += len(part)
            if size > 4 * limit:
                break
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
        if size <= limit:
            return b"".join(parts)
    message = f"the body is longer than {limit} bytes, the most this server takes"
    raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises ApiError 400 for anything else, and for what JSON leaves open: keys given twice, NaN and infinities, integers
    of more than 64 bits, lone surrogates, and nesting beyond `MAX_DEPTH`.
    """
    try:
        return parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_json") from None
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None


def parse_json(text: str) -> dict[str, Any]:
    """As `parse_object`, of text; raises ValueError."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if not isinstance(value, dict):
        raise ValueError("it must be an object")
    _check(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {reprlib.repr(key)} is given twice")
            seen.add(key)
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any) -> None:
    """Without recursion, since the value may be deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                if not item.isascii():
                    _check_text(item)
            elif isinstance(item, int):
                if item not in _INTEGERS:
                    raise ValueError("an integer has more than 64 bits")
            elif isinstance(item, float) and item - item != 0:
                raise ValueError("a number is too large")
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string holds a lone surrogate, {text[error.start]!a}") from None
