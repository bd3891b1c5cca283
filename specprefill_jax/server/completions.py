"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Delta
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.server.body import parse_object
from specprefill_jax.server.errors import invalid, refused
from specprefill_jax.server.generation import Answer
from specprefill_jax.server.prepare import Arrival, Prepared, Prompt, build, check_ids, need_tokenizer
from specprefill_jax.server.protocol import CompletionBody, refuse_unsupported
from specprefill_jax.server.reply import Reply, finite, with_own
from specprefill_jax.server.service import EngineLike, Service


def encode_text(engine: EngineLike, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a plain prompt; raises ApiError 400."""
    try:
        return need_tokenizer(engine, "prompt").encode(text, add_special_tokens)
    except SpecPrefillError as error:
        raise refused(error) from None


def prepare(service: Service, data: bytes, arrival: Arrival) -> Prepared:
    """Parse, check and tokenise; for a thread. Raises ApiError."""
    value = parse_object(data)
    body = CompletionBody.read(value)
    refuse_unsupported(value)
    engine = service.named(body.model)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens=0 is not allowed: max_tokens must be at least 1, or echo be true", "max_tokens")
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompts.append(Prompt(encode_text(engine, prompt, body.add_special_tokens), prompt))
        else:
            check_ids(prompt, engine.vocab_size, "prompt")
            prompts.append(Prompt(prompt))
    return build(
        service, engine, body, prompts, arrival, max_tokens=body.max_tokens, logprobs=body.logprobs, echo=body.echo
    )


class CompletionReply(Reply):
    """`text_completion`, which is the name of its chunks too."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, call: Prepared) -> None:
        """Answer `call`."""
        super().__init__(call)
        self._offsets = [0] * len(call.requests)

    @property
    def holds(self) -> bool:
        """The prompt's log-probabilities come before those of the answer, and are known at the end."""
        return self.call.drop or (self.call.echo and self.call.logprobs is not None)

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Text, behind the prompt if that is to be echoed."""
        return self.piece(index, answer, True)

    def piece(self, index: int, answer: Answer | Delta, first: bool) -> dict[str, Any]:
        """A part of the text; the prompt goes before the first."""
        text = "" if self.call.drop else answer.text
        ids = [] if self.call.drop else list(answer.token_ids)
        logprobs: list[TokenLogprobs | None] = [] if self.call.drop else list(answer.logprobs or ())
        if first and self.call.echo:
            prompt = self.call.prompt_of(index)
            text = self._prompt_text(index) + text
            if isinstance(answer, Answer) and answer.end.prompt_logprobs is not None:
                ids = [*prompt.ids, *ids]
                logprobs = [*answer.end.prompt_logprobs, *logprobs]
        return {"text": text, "logprobs": self._logprobs(index, ids, logprobs)}

    def empty_piece(self, index: int, first: bool) -> dict[str, Any]:
        """Nothing more, but the prompt if nothing was before."""
        return {"text": self._prompt_text(index) if first and self.call.echo else "", "logprobs": None}

    def _prompt_text(self, index: int) -> str:
        prompt = self.call.prompt_of(index)
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.call.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.ids, skip_special_tokens=False)

    def _logprobs(
        self, choice: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        most = self.call.logprobs
        if most is None:
            return None
        tokens, own, top, offsets = [], [], [], []
        for index, seen in zip(ids, logprobs, strict=True):
            text = self.token(index)[0]
            tokens.append(text)
            own.append(None if seen is None else finite(seen.token))
            top.append(None if seen is None else self._by_text(with_own(index, seen, most)))
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(text)
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}

    def _by_text(self, top: dict[int, float]) -> dict[str, float]:
        """Tokens may share a text: the likeliest of them stands for all."""
        named: dict[str, float] = {}
        for index, value in top.items():
            named.setdefault(self.token(index)[0], value)
        return named
