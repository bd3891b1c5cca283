"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from specprefill_jax.chat_prompt import ChatPrompt, encode_chat
from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Delta
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.server.body import parse_json, parse_object
from specprefill_jax.server.errors import invalid, refused
from specprefill_jax.server.generation import Answer
from specprefill_jax.server.prepare import Arrival, Prepared, Prompt, build, need_tokenizer
from specprefill_jax.server.protocol import ChatBody, ChatPromptBody, Message, refuse_unsupported
from specprefill_jax.server.reply import Reply, finite
from specprefill_jax.server.service import EngineLike, Service


def encode_messages(engine: EngineLike, body: ChatPromptBody) -> ChatPrompt:
    """The chat as the checkpoint's own template renders it; raises ApiError 400 where it cannot."""
    tokenizer = need_tokenizer(engine, "messages")
    tools = None if body.tool_choice == "none" else body.tools
    messages = [_for_template(message) for message in body.messages]
    try:
        return encode_chat(
            tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs or None,
        )
    except SpecPrefillError as error:
        raise refused(error) from None


def _for_template(message: Message) -> dict[str, Any]:
    """As templates expect it: "system" for its newer name, and the arguments of tool calls as objects, not as text."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"
    for call in fields.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = parse_json(function["arguments"])
            except ValueError:
                continue  # a model's own slip in an earlier turn: the template gets the text
    return fields


def prepare(service: Service, data: bytes, arrival: Arrival) -> Prepared:
    """Parse, check, render and tokenise; for a thread. Raises ApiError."""
    value = parse_object(data)
    body = ChatBody.read(value)
    refuse_unsupported(value)
    engine = service.named(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid(f"top_logprobs={body.top_logprobs} is not allowed: it needs logprobs, which is false", "logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    chat = encode_messages(engine, body)
    prompts = [Prompt(chat.ids, None, chat.forced_spans, chat.generation_tail)]
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise invalid("max_tokens=0 is not allowed: max_tokens must be at least 1", "max_tokens")
    return build(service, engine, body, prompts, arrival, max_tokens=most, logprobs=logprobs)


class ChatReply(Reply):
    """`chat.completion` and its chunks."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """The message."""
        message = {"role": "assistant", "content": answer.text}
        return {"message": message, "logprobs": self._logprobs(answer.token_ids, answer.logprobs)}

    def piece(self, index: int, answer: Answer | Delta, first: bool) -> dict[str, Any]:
        """A part of the message; the first one says whose it is."""
        delta = ({"role": "assistant"} if first else {}) | {"content": answer.text}
        return {"delta": delta, "logprobs": self._logprobs(answer.token_ids, answer.logprobs)}

    def empty_piece(self, index: int, first: bool) -> dict[str, Any]:
        """Nothing more."""
        return {"delta": {"role": "assistant", "content": ""} if first else {}, "logprobs": None}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        most = self.call.logprobs
        if most is None:
            return None
        content = []
        for index, seen in zip(ids, logprobs or (), strict=True):
            top = [self._entry(token, value) for token, value in list(seen.top.items())[:most]]
            content.append(self._entry(index, seen.token) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, index: int, logprob: float) -> dict[str, Any]:
        text, content = self.token(index)
        return {"token": text, "logprob": finite(logprob), "bytes": content}
