"""Chat templates: Jinja programs that come with a checkpoint, so they are rendered as hostile input.

The environment is jinja2's immutable sandbox with the helpers that Hugging Face templates expect. On top of that,
rendering stops at a deadline (looked at in every loop and macro body), at an output limit, and before operations that
would build a huge value from a small one. That keeps a bad template from hanging or filling a server; it is not a
memory jail for arbitrary code.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from specprefill_jax.errors import TokenizerError

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_CHARACTERS = 1 << 25
MAX_PADDING = 10_000
MAX_INTEGER = 1 << 63
MAX_SECONDS = 10.0

_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))
_WIDE_FORMAT = re.compile(r"\d{5,}|:[^}]*\{")


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, origin: str) -> None:
        """Compile `source`; raises TokenizerError naming `origin` when it is not a template or longer than 1 MiB."""
        self.origin = origin
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TokenizerError(
                f"{origin}: the chat template has {len(source)} characters, "
                f"at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        try:
            self._template = _Environment().from_string(source)
        except Exception as error:  # the compiler also meets deep nesting (RecursionError) and odd numbers (ValueError)
            raise TokenizerError(f"{origin}: the chat template does not compile: {_describe(error)}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Render the template over `variables` (`messages` among them); whatever goes wrong is a TokenizerError."""
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            pieces, length = [], 0
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise SecurityError(f"the output is longer than {MAX_CHARACTERS} characters")
                pieces.append(piece)
            return "".join(pieces)
        except Exception as error:  # templates can raise anything: TypeError, KeyError, RecursionError, MemoryError
            raise TokenizerError(f"{self.origin}: the chat template failed: {_describe(error)}") from error
        finally:
            _deadline.reset(token)


def _describe(error: Exception) -> str:
    text = str(error)[:500]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"


def _check_time() -> str:
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it ran longer than {MAX_SECONDS:g} s")
    return ""


def _bounded[T](value: T) -> T:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARACTERS:
        raise SecurityError(f"it builds a value of more than {MAX_CHARACTERS} items")
    return value


def _check_padding(arguments: Sequence[object]) -> None:
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_PADDING:
            raise SecurityError(f"{value} is too wide, at most {MAX_PADDING} is allowed")


def _check_replace(text: object, old: object = "", new: object = "", *_: object) -> None:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return
    if len(text) + text.count(old) * len(new) > MAX_CHARACTERS:
        raise SecurityError(f"it replaces into more than {MAX_CHARACTERS} characters")


def _check_join(separator: object, items: object = (), *_: object) -> None:
    if isinstance(items, list | tuple):
        size = len(separator) if isinstance(separator, str) else 0
        if sum(size + (len(item) if isinstance(item, str) else 0) for item in items) > MAX_CHARACTERS:
            raise SecurityError(f"it joins more than {MAX_CHARACTERS} characters")


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The jinja2 filter `name` behind its size check; the first argument is jinja2's evaluation context for some."""

    def guarded(*arguments: Any, **named: Any) -> Any:
        values = arguments[1:] if hasattr(function, "jinja_pass_arg") else arguments
        everything = [*values[1:], *named.values()]
        if name == "replace":
            _check_replace(values[0], *everything)
        elif name == "join":
            _check_join(next(iter(everything), ""), values[0])
        else:
            _check_padding(everything)
        return _bounded(function(*arguments, **named))

    guarded.__dict__.update(function.__dict__)
    return guarded


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON, as Hugging Face templates expect: jinja2's own filter would escape HTML and sort keys."""
    _check_padding([indent])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only rendered."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Limits(NodeTransformer):
    """Puts the checks of time and size into a parsed template."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        line = node.lineno
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None, lineno=line)
            node.body.insert(0, nodes.ExprStmt(check, lineno=line))
        elif isinstance(node, nodes.Concat):
            return nodes.Call(nodes.EnvironmentAttribute("bounded"), [node], [], None, None, lineno=line)
        elif isinstance(node, nodes.AssignBlock):
            node.filter = nodes.Filter(node.filter, "bounded", [], [], None, None, lineno=line)
        return node


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.check_time, self.bounded = _check_time, _bounded
        for name in ("batch", "center", "indent", "join", "replace", "slice", "truncate", "wordwrap"):
            self.filters[name] = _guard_filter(name, self.filters[name])
        self.filters["tojson"] = _to_json
        self.filters["bounded"] = _bounded
        del self.filters["format"]  # `"%999999999d"|format(1)`; no chat template needs it
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limits().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would turn small operands into a huge result."""
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed in a chat template")
        if operator in ("*", "**") and all(isinstance(size, int) for size in sizes):
            limit = MAX_INTEGER if sizes == [left, right] else MAX_CHARACTERS
            if operator == "**" and (abs(right) > 64 or abs(left) > MAX_PADDING):
                raise SecurityError(f"{operator} with operands this large is not allowed in a chat template")
            if operator == "*" and sizes[0] * sizes[1] > limit:
                raise SecurityError(f"a product above {limit} is not allowed in a chat template")
        return _bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        """The sandbox's `str.format`, for patterns that do not ask for a huge width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise SecurityError("a format this wide is not allowed in a chat template")
        return wrapped

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call from a template: string methods that pad, replace or join are checked first, results after."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            _check_padding([*args, *kwargs.values()])
            method = getattr(function, "__name__", "")
            if method == "replace":
                _check_replace(text, *args)
            elif method == "join":
                _check_join(text, *args)
        return _bounded(super().call(context, function, *args, **kwargs))
