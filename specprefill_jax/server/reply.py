"""What all answers have in common: the envelope, usage, and what speculative prefill did."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from specprefill_jax.config import KeepRate
from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Delta, Finished
from specprefill_jax.selection import Selection
from specprefill_jax.server.generation import Answer, Gathered
from specprefill_jax.server.prepare import Prepared
from specprefill_jax.timing import PHASES
from specprefill_jax.tokens import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def token_text(tokenizer: Tokenizer | None, index: int) -> tuple[str, list[int] | None]:
    """A token's text and its bytes; no bytes where they are not known."""
    if tokenizer is None:
        return f"token_id:{index}", None
    if tokenizer.is_byte_level:
        content = tokenizer.token_bytes(index)
        return content.decode(errors="replace"), list(content)
    anchor, length = tokenizer.anchor
    text = tokenizer.decode([*anchor, index], skip_special_tokens=False)[length:]
    return text, None if "\ufffd" in text else list(text.encode())


def finite(logprob: float) -> float:
    """The number, or `LEAST_LOGPROB` for minus infinity."""
    return max(logprob, LEAST_LOGPROB)


def what_was_read(end: Finished, requested: KeepRate, with_map: bool) -> dict[str, Any] | None:
    """The `specprefill` object of an answer; None where the prompt was not read to its end.

    Args:
        end: the request's last event.
        requested: the keep rate that was set, by the request or by the server's default.
        with_map: whether to say which chunks were kept.
    """
    selection = end.selection
    if selection is None:
        return None
    spent = end.timings
    seconds = {"ttft": spent.ttft, "total": spent.total, **{name: getattr(spent, name) for name in PHASES}}
    told = {
        "engaged": selection.engaged,
        "reason": str(selection.reason),
        "detail": selection.detail,
        "requested_keep_rate": requested,
        "keep_rate": selection.keep_rate,
        "num_tokens": selection.num_tokens,
        "kept_tokens": selection.num_kept,
        "cached_tokens": end.cached_tokens,
        "predicted_gain": selection.plan.predicted_gain,
        "predicted_ttft_ms": selection.plan.predicted_ttft_ms,
        "over_budget": selection.plan.over_budget,
        "proposed_tokens": end.proposed_tokens,
        "accepted_tokens": end.accepted_tokens,
        "timings": {name: round(value, 6) for name, value in seconds.items()},
    }
    return told | _map(selection) if with_map else told


def _map(selection: Selection) -> dict[str, Any]:
    def bits(mask: np.ndarray) -> str:
        return "".join("1" if bit else "0" for bit in mask.tolist())

    return {
        "chunk_size": selection.chunk_size,
        "kept_chunks": bits(selection.kept_chunk_mask),
        "forced_chunks": bits(selection.plan.forced_mask()),
    }


class Reply(ABC):
    """Builds the answer to one HTTP request, in one piece or in chunks."""

    object_name: str
    chunk_name: str

    def __init__(self, call: Prepared) -> None:
        """Answer `call`."""
        self.call = call
        self._ends: dict[int, Finished] = {}
        self._generated = [0] * len(call.requests)
        self._held = [Gathered() for _ in call.requests]
        self._begun = [False] * len(call.requests)

    @abstractmethod
    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Text and log-probabilities of a choice in one piece."""

    @abstractmethod
    def piece(self, index: int, answer: Answer | Delta, first: bool) -> dict[str, Any]:
        """Text and log-probabilities of a chunk; `first` of its choice."""

    @abstractmethod
    def empty_piece(self, index: int, first: bool) -> dict[str, Any]:
        """The same for the chunk that says how a choice ended."""

    @property
    def holds(self) -> bool:
        """Whether a stream's text can only be given at the end."""
        return False

    def body(self, answers: list[Answer]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, answer in enumerate(answers):
            self._ends[index] = answer.end
            choice = self.whole_choice(index, answer)
            if self.call.token_ids:
                choice["token_ids"] = self._kept_ids(answer.token_ids)
            choices.append({"index": index, **choice, "finish_reason": self._reason(answer.end)} | self._own(index))
        return {**self._envelope(self.object_name), "choices": choices, "usage": self.usage(), **self._first()}

    def chunks(self, index: int, event: Delta | Finished) -> list[dict[str, Any]]:
        """The chunks that an event of choice `index` makes."""
        if isinstance(event, Finished):
            self._ends[index] = event
            last = []
            if self.holds:
                last.append(self._chunk(index, self.piece(index, self._held[index].answer(event), True)))
                self._begun[index] = True
            choice = {**self.empty_piece(index, not self._begun[index]), "finish_reason": self._reason(event)}
            last.append(self._chunk(index, choice | self._own(index), **(self._first() if index == 0 else {})))
            return last
        if self.holds:
            self._held[index].add(event)
            return []
        self._generated[index] += len(event.token_ids)
        first = not self._begun[index]
        tells = event.text or event.logprobs or (self.call.token_ids and event.token_ids)
        if not tells and not (first and event.token_ids):
            return []
        self._begun[index] = True
        choice = self.piece(index, event, first)
        if self.call.token_ids:
            choice["token_ids"] = list(event.token_ids)
        return [self._chunk(index, choice)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """What follows the chunks of all choices: usage, if it was asked for."""
        if not self.call.stream_options.include_usage:
            return []
        return [{**self._envelope(self.chunk_name), "choices": [], "usage": self.usage(), **self._first()}]

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many answers it gets."""
        firsts = [self._ends[index] for index in range(0, len(self._generated), self.call.n) if index in self._ends]
        prompt = sum(len(one.ids) for one in self.call.prompts)
        generated = sum(
            self._count(self._ends[index]) if index in self._ends else count
            for index, count in enumerate(self._generated)
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(end.cached_tokens for end in firsts),
                "kept_tokens": sum(end.selection.num_kept for end in firsts if end.selection is not None),
            },
        }

    def _chunk(self, index: int, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        options = self.call.stream_options
        chunk = {**self._envelope(self.chunk_name), "choices": [{"index": index, "finish_reason": None, **choice}]}
        if options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif options.include_usage:
            chunk["usage"] = None
        return chunk | more

    def _envelope(self, name: str) -> dict[str, Any]:
        return {"id": self.call.id, "object": name, "created": self.call.created, "model": self.call.model}

    def _read(self, index: int) -> dict[str, Any]:
        rate = self.call.requests[index].config.keep_rate
        return {"specprefill": what_was_read(self._ends[index], rate, self.call.map)}

    def _own(self, index: int) -> dict[str, Any]:
        """One object a choice, where there are several."""
        return self._read(index) if len(self.call.requests) > 1 else {}

    def _first(self) -> dict[str, Any]:
        return self._read(0)

    def _count(self, end: Finished) -> int:
        return 0 if self.call.drop else end.num_generated

    def _kept_ids(self, ids: list[int]) -> list[int]:
        return [] if self.call.drop else ids

    def _reason(self, end: Finished) -> str:
        return "length" if self.call.drop else end.finish_reason

    def token(self, index: int) -> tuple[str, list[int] | None]:
        """A token's text and bytes."""
        return token_text(self.call.tokenizer, index)


def with_own(index: int, logprobs: TokenLogprobs, most: int) -> dict[int, float]:
    """The `most` likeliest tokens by id, best first, and the token itself behind them if it is none of them."""
    top = dict(list(logprobs.top.items())[:most])
    top.setdefault(index, logprobs.token)
    return {token: finite(value) for token, value in top.items()}
