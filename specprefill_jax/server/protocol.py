"""The bodies of requests. Unknown fields are ignored, null is the same as absent, types are strict."""

import contextlib
import reprlib
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from specprefill_jax.config import MAX_LOGPROBS, MAX_STOP_STRINGS, KeepRate
from specprefill_jax.server.errors import ApiError, invalid

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOP_IDS = 256

_TOKEN_SCHEMA = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS_SCHEMA = {"type": "array", "items": _TOKEN_SCHEMA, "minItems": 1}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 2**31 for item in value)


def _check_ids(value: object) -> list[int]:
    if isinstance(value, list) and (not value or _is_ids(value)):
        return value
    raise ValueError("a list of token ids is needed")


def _check_stop_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= MAX_STOP_IDS:
        return tuple(_check_ids(value))
    raise ValueError(f"a list of at most {MAX_STOP_IDS} token ids is needed")


def _check_prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, as a list of texts and lists of ids; without pydantic, which would try every type in
    turn and list one error an id."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    several = isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS
    if several and (all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value)):
        return value
    raise ValueError(f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either is needed")


def _check_stop(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and len(values) <= MAX_STOP_STRINGS and all(isinstance(s, str) and s for s in values):
        return tuple(values)
    raise ValueError(f"a string or a list of at most {MAX_STOP_STRINGS} strings is needed, none of them empty")


def _check_content(value: object) -> str:
    """Text, or the text parts of a list a line apart."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("a string or a list of text parts is needed")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise ValueError('only text is read: {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


def _check_keep_rate(value: object) -> KeepRate:
    if value == "auto":
        return "auto"
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise ValueError('a number or "auto" is needed')


KeepRateField = Annotated[
    KeepRate,
    PlainValidator(_check_keep_rate),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "auto"}]}),
]
Ids = Annotated[list[int], PlainValidator(_check_ids), WithJsonSchema({"type": "array", "items": _TOKEN_SCHEMA})]
StopIds = Annotated[
    tuple[int, ...],
    PlainValidator(_check_stop_ids),
    WithJsonSchema({"type": "array", "items": _TOKEN_SCHEMA, "maxItems": MAX_STOP_IDS}),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_check_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "maxItems": MAX_STOP_STRINGS}]}),
]
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    PlainValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @classmethod
    def read(cls, value: dict[str, Any]) -> Self:
        """Check `value`; raises ApiError 400 that names the first field that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise _complaint(error) from None


def _complaint(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(f"{param} is missing", param)
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return invalid(f"{param}: {message}" if param else message, param or None)
    return invalid(f"{param}={reprlib.repr(first['input'])} is not allowed: {message}", param)


class SpecPrefillOptions(Body):
    """How one prompt is read; what is absent is the server's default. See `SpecPrefillConfig` for their meaning."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    enabled: bool | None = None
    keep_rate: KeepRateField | None = None
    look_ahead: int | None = None
    pool_width: int | None = None
    chunk_size: int | None = None
    mode: Literal["product", "paper"] | None = None
    tail_tokens: int | None = None
    min_prompt_tokens: int | None = None
    min_predicted_gain: float | None = None
    max_divergence: float | None = None
    importance_share: float | None = None
    min_keep_rate: float | None = None
    max_keep_rate: float | None = None
    ttft_budget_ms: float | None = None
    query_window: int | None = None
    draft_tokens: Annotated[int, Field(ge=0)] | None = None
    """Proposals a step of decoding, at most; no more than the engine makes."""
    map: bool = False
    """Whether the answer says which chunks were kept."""

    @model_validator(mode="before")
    @classmethod
    def _no_other_key(cls, value: Any) -> Any:
        # A misspelt keep rate that is ignored is the worst of answers: it looks as if it had been obeyed.
        if isinstance(value, dict) and (unknown := [key for key in value if key not in cls.model_fields]):
            raise ValueError(f"{reprlib.repr(unknown[0])} is no option: allowed are {', '.join(cls.model_fields)}")
        return value

    def settings(self) -> dict[str, Any]:
        """The fields of `SpecPrefillConfig` that were given."""
        return self.model_dump(exclude={"map", "draft_tokens"}, exclude_none=True)


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ModelBody(Body):
    """A body that may name the model, which is checked, there being one alone."""

    model: str | None = Field(None, max_length=1024)


class GenerationBody(ModelBody):
    """What chats and completions have in common. Ranges that are not here are checked by `SamplingParams`."""

    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Stop = ()
    stop_token_ids: StopIds = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    specprefill: SpecPrefillOptions = Field(default_factory=SpecPrefillOptions)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True


class Message(Body):
    """One message of a chat; what else it holds is for the template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: Content | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatPromptBody(ModelBody):
    """The part of a chat that makes its prompt."""

    messages: list[Message] = Field(min_length=1, max_length=16384)
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatBody(GenerationBody, ChatPromptBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokenizeBody(ModelBody):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatPromptBody):
    """POST /tokenize with a chat."""

    return_token_strs: bool = False


class DetokenizeBody(ModelBody):
    """POST /detokenize."""

    tokens: Ids


_ONLY: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "suffix": "",
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "use_beam_search": False,
    "response_format": {"type": "text"},
    "structured_outputs": {},
    "guided_json": {},
    "guided_regex": "",
    "guided_choice": [],
    "guided_grammar": "",
}


def refuse_unsupported(value: dict[str, Any]) -> None:
    """Raise ApiError 400 for known options that would change the answer and that this server cannot obey."""
    for name, neutral in _ONLY.items():
        given = value.get(name)
        if given is not None and given != neutral:
            raise invalid(
                f"{name}={reprlib.repr(given)} is not allowed: {name} is not supported, it must be absent or "
                f"{str(neutral).lower() if isinstance(neutral, bool) else neutral!r}",
                name,
                "unsupported_parameter",
            )
