"""The way of a prompt: speculate, score, choose, prefill what was kept, decode."""

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import jax
import numpy as np
from jax.sharding import Mesh

from specprefill_jax import costs
from specprefill_jax.cache import capacity_for
from specprefill_jax.cards import PairCard, find_card, read_card
from specprefill_jax.chat_prompt import Spans, encode_chat
from specprefill_jax.config import SamplingParams, SpecPrefillConfig, check_integer
from specprefill_jax.decode import Decoder
from specprefill_jax.errors import ArgumentError, SpecPrefillError, argument_error
from specprefill_jax.kernels.backend import choose_backend
from specprefill_jax.loading import load_pair
from specprefill_jax.models.loaded import LoadedLlama, Step
from specprefill_jax.output import Answer, Output, Piece
from specprefill_jax.planning import Reason
from specprefill_jax.predictor import Predictor
from specprefill_jax.prefill import DEFAULT_CHUNK, padded, pieces, prefill
from specprefill_jax.prompt import PROMPT_KINDS, Prompt, check_ids, padded_ids
from specprefill_jax.sampling import sampling_arrays, seen_tokens
from specprefill_jax.scoring import kept_batch
from specprefill_jax.selecting import Selector
from specprefill_jax.selection import Selection
from specprefill_jax.speculative import Acceptance, Drafts, SpeculativeDecoder, step_cost
from specprefill_jax.speculator import Speculator
from specprefill_jax.timing import Marks, PhaseClock
from specprefill_jax.tokens import Tokenizer

MAX_DRAFT_TOKENS = 32


class SpecPrefill:
    """A main model and its speculator.

    One prompt at a time; not safe to share between threads. Nothing is kept between prompts but compiled programs.

    On a mesh over several processes (`sharding.distributed`), every process makes the same calls with the same prompts
    and settings, takes as many pieces of a stream as the others, and gets the same results.
    """

    def __init__(
        self,
        main: LoadedLlama,
        speculator: LoadedLlama,
        tokenizer: Tokenizer | None,
        *,
        prefill_chunk: int = DEFAULT_CHUNK,
        default_look_ahead: int = 8,
        machine: costs.Machine | None = None,
        kernels: str | None = None,
        card: PairCard | None = None,
    ):
        """Combine two loaded models that share a vocabulary; see `from_pretrained` for the usual way."""
        self.main = main
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.default_look_ahead = default_look_ahead
        self.card = card
        self.kernels = choose_backend(kernels, speculator.mesh)
        self.speculator = Speculator(speculator, prefill_chunk)
        self.predictor = Predictor(main, speculator, machine, prefill_chunk)
        self.selector = Selector(
            self.speculator,
            self.predictor,
            kernels=self.kernels,
            prefill_chunk=prefill_chunk,
            default_look_ahead=default_look_ahead,
            card=card,
        )
        self.decoder = Decoder(main)
        self._speculative = SpeculativeDecoder(self.decoder, self.speculator)

    @classmethod
    def from_pretrained(
        cls,
        main: str | os.PathLike[str],
        speculator: str | os.PathLike[str],
        dtype: str = "bfloat16",
        mesh: Mesh | None = None,
        *,
        speculator_mesh: Mesh | None = None,
        speculator_layers: int | None = None,
        prefill_chunk: int | None = None,
        kernels: str | None = None,
        card: PairCard | str | os.PathLike[str] | None = None,
    ) -> Self:
        """Load a pair of models.

        Args:
            main: the model that answers: a folder in Hugging Face layout, a .gguf file, a built-in name or a Hub id.
            speculator: the small model that chooses; the same tokenizer, or the same model.
            dtype: float32, bfloat16 or float16.
            mesh: devices that share both models along the axis `tensor` (`sharding.mesh.make_mesh`). None: as many
                of those that JAX sees as both models can be split over.
            speculator_mesh: devices of the speculator's own: fewer, or others. None: the main model's.
            speculator_layers: use only the speculator's first so many layers; it then scores with the prompt's last
                token alone unless a config asks for a look-ahead.
            prefill_chunk: tokens a forward pass reads at most (default 1,024).
            kernels: what scores and chooses: "reference" (plain JAX), "triton" (GPU), "mosaic_tpu" (TPU), or the latter
                two with "_interpret" (any machine, for tests). None: the one for the platform.
            card: what calibration has found for the pair: a file, or "auto" for the one in the speculator's folder or
                of a built-in pair. It says how many layers of the speculator are run (unless `speculator_layers`
                does), and settings that hold wherever a config leaves its own at their defaults. None: no card.

        Raises:
            ArgumentError: a bad argument.
            CheckpointError: a model that is missing, damaged or not a Llama.
            TokenizerError: the two models' tokenizers differ.
        """
        choose_backend(kernels)  # before any file is read
        chunk = DEFAULT_CHUNK if prefill_chunk is None else prefill_chunk
        chunk = check_integer("prefill_chunk", chunk, 1, allowed="None or an integer of at least 1")
        if card is not None and not isinstance(card, PairCard):
            card = find_card(main, speculator) if card == "auto" else read_card(card)
        pair = load_pair(
            main,
            speculator,
            dtype,
            mesh,
            speculator_mesh=speculator_mesh,
            speculator_layers=speculator_layers,
            card=card,
        )
        return cls(
            pair.main,
            pair.speculator,
            pair.tokenizer,
            prefill_chunk=chunk,
            default_look_ahead=pair.look_ahead,
            kernels=kernels,
            card=card,
        )

    @property
    def max_prompt_tokens(self) -> int:
        """The main model's context: kept tokens keep their positions, so dropping some makes no room."""
        return self.main.config.max_position_embeddings

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Token ids of a prompt, int32 [M], checked against the vocabulary and the context.

        Raises:
            ArgumentError: an empty prompt, an id outside the vocabulary, or a prompt longer than the context.
        """
        return self._encode(prompt)[0]

    def _encode(self, prompt: Prompt) -> tuple[np.ndarray, Spans]:
        """Token ids, and the spans of them that a chat prompt must keep (none for other prompts)."""
        flat = prompt.ndim == 1 if isinstance(prompt, np.ndarray) else isinstance(prompt, Sequence)
        if not flat or isinstance(prompt, bytes | bytearray | memoryview):
            raise argument_error("prompt", prompt, PROMPT_KINDS)
        if isinstance(prompt, str):
            return self._checked(self._tokenizer("prompt").encode(prompt)), ()
        if not (len(prompt) and isinstance(prompt[0], Mapping)):
            return self._checked(cast(Sequence[int], prompt)), ()
        chat = encode_chat(self._tokenizer("prompt"), cast(Sequence[Mapping[str, Any]], prompt))
        return self._checked(chat.ids), chat.forced_spans

    def select(self, prompt: Prompt, config: SpecPrefillConfig | None = None) -> Selection:
        """Choose which tokens of a prompt the main model should read.

        Raises:
            ArgumentError: see `encode`; or settings that do not fit the prompt.
            SpecPrefillError: in paper mode, a speculator that failed.
        """
        ids, spans = self._encode(prompt)
        return self.selector.select(ids, spans, self.selector.settle(config))

    def select_many(self, prompt: Prompt, configs: Sequence[SpecPrefillConfig]) -> list[Selection]:
        """What `select` chooses with each of several configs, from as few speculations as that takes.

        One does for all configs that look ahead, however far, and end it with the same ids; a query window takes its
        own. What differs in the keep rate alone is scored once.

        Raises:
            ArgumentError, SpecPrefillError: see `select`.
        """
        ids, spans = self._encode(prompt)
        return self.selector.select_many(ids, spans, [self.selector.settle(config) for config in configs])

    def prefill(self, prompt: Prompt, selection: Selection) -> np.ndarray:
        """Float32 logits [V] after the last kept token of a prompt."""
        ids = self.encode(prompt)
        _check_selection(ids, selection)
        step, _ = self.read(ids, selection, 0)
        return np.asarray(self.main.logits(self.main.weights, step.hidden)[0])

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        config: SpecPrefillConfig | None = None,
        *,
        selection: Selection | None = None,
        draft_tokens: int = 0,
    ) -> Output:
        """Answer a prompt; see `stream` for the arguments and errors."""
        output = None
        for piece in self.stream(prompt, sampling, config, selection=selection, draft_tokens=draft_tokens):
            output = piece.output
        assert output is not None
        return output

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        config: SpecPrefillConfig | None = None,
        *,
        selection: Selection | None = None,
        draft_tokens: int = 0,
    ) -> Iterator[Piece]:
        """Answer a prompt piece by piece: one piece a token, never half a character, then a closing one.

        The prompt is checked and tokenised at once, before the first piece is asked for.

        Args:
            prompt: text, chat messages, or token ids.
            sampling: how tokens are drawn, and when it ends.
            config: how the prompt is read.
            selection: of this prompt: says what is read, so that nothing is speculated or chosen (`config` then only
                says what a failed one does).
            draft_tokens: proposals of the speculator a round of decoding, at most; fewer, or none, where few are right.
                The answer is the same (`speculative`). 0: plain decoding.

        Raises:
            ArgumentError: a bad prompt, or settings that do not fit it.
            SpecPrefillError: in paper mode, a speculator that failed (product mode reads the prompt whole and says so).
        """
        clock = PhaseClock()
        sampling = sampling or SamplingParams()
        config = self.selector.settle(config)
        check_integer("draft_tokens", draft_tokens, 0, MAX_DRAFT_TOKENS)
        ids, spans = self._encode(prompt)
        self.check_request(ids, sampling, () if selection is None else (selection,))
        clock.count("tokenise", len(ids))
        clock.stop()  # until the first piece is asked for
        return self._stream(ids, spans, sampling, config, clock, selection, draft_tokens)

    def check_request(self, ids: np.ndarray, sampling: SamplingParams, selections: Sequence[Selection] = ()) -> None:
        """ArgumentError for a prompt `encode` let pass without room for an answer, or what does not go with it."""
        if len(ids) >= self.max_prompt_tokens:
            allowed = f"shorter than the context of {self.max_prompt_tokens} tokens, to leave room for an answer"
            raise ArgumentError(f"prompt of {len(ids)} tokens is not allowed: prompt must be {allowed}")
        if sampling.stop:
            self._tokenizer("stop")
        for selection in selections:
            _check_selection(ids, selection)

    def warm_up(
        self, num_tokens: int, config: SpecPrefillConfig | None = None, sampling: SamplingParams | None = None
    ) -> None:
        """Compile what a prompt of `num_tokens` tokens needs, whole and sparse, without doing all of its work.

        Programs depend on the room for the answer and on what is sampled, so give the settings that will be used.
        """
        config = self.selector.settle(config)
        sampling = replace(sampling or SamplingParams(), ignore_eos=True, stop=(), stop_token_ids=())
        ids = np.zeros(num_tokens, np.int32)
        self._checked(ids)
        whole = SpecPrefillConfig(enabled=False)
        ways: list[tuple[SpecPrefillConfig, Selection | None]] = [(whole, None), (config, None)]
        ways += [(config, selection) for selection in self._sizes(ids, config, sampling)]
        with self.main.one_layer(), self.speculator.model.one_layer():
            for settings, given in ways:
                stream = self._stream(ids, (), sampling, settings, PhaseClock(), given)
                for _, _ in zip(stream, range(3), strict=False):
                    pass

    def _sizes(self, ids: np.ndarray, config: SpecPrefillConfig, sampling: SamplingParams) -> Iterable[Selection]:
        """Selections that need every program which keep rate "auto" may, there being no telling what it keeps."""
        planned = self.selector.plan(ids, (), config)
        room = min(sampling.max_tokens, self.max_prompt_tokens - len(ids))
        found: dict[tuple, Selection] = {}
        last = planned.num_chunks - 1
        for kept in range(planned.least_chunks or planned.kept_chunks + 1, planned.kept_chunks + 1):
            size = planned.keep(kept).max_kept_tokens
            total = padded(size, self.prefill_chunk)
            shape = tuple(pieces(size, self.prefill_chunk)), capacity_for(max(total, size + room))
            if shape not in found:
                found[shape] = Selection.of_chunks(ids, [*range(kept - 1), last], chunk_size=config.chunk_size)
        return found.values()

    def _stream(
        self,
        ids: np.ndarray,
        spans: Spans,
        sampling: SamplingParams,
        config: SpecPrefillConfig,
        clock: PhaseClock,
        given: Selection | None = None,
        draft_tokens: int = 0,
    ) -> Iterator[Piece]:
        clock.phase("tokenise")
        limit = min(sampling.max_tokens, self.max_prompt_tokens - len(ids))
        answer = self.answer(sampling)
        settings = sampling_arrays(
            [sampling.temperature],
            [sampling.top_k],
            [sampling.top_p],
            [sampling.min_p],
            [sampling.repetition_penalty],
            [_seed(sampling)],
            put=self.main.put,
        )
        drafts = Drafts(self.speculator, ids, limit + draft_tokens) if draft_tokens else None
        selection, step, slot = self._read(ids, spans, config, limit + draft_tokens, clock, given, drafts)
        position = self.main.put(np.full((1,), len(ids), np.int32))
        seen = None
        if sampling.repetition_penalty != 1.0:
            seen = _seen_tokens(self.main.put(padded_ids(ids)), position, self.main.config.vocab_size)
        decoding = (step, position, slot, settings, seen)
        acceptance = Acceptance(draft_tokens, step_cost(self.main, self.speculator.model))
        if drafts is None or selection.reason is Reason.SPECULATOR_FAILED:
            decoded = self.decoder.tokens(*decoding, max_tokens=limit, logprobs=sampling.logprobs)
        else:
            decoded = self._speculative.tokens(
                *decoding,
                max_tokens=limit,
                logprobs=sampling.logprobs,
                drafts=drafts,
                looked_ahead=selection.look_ahead_tokens if drafts.cache is not None else (),
                acceptance=acceptance,
            )
        del decoding
        del step  # its cache is consumed by the first decode step
        for token in decoded:
            first = not answer.token_ids
            clock.phase("decode", tokens=0 if first else 1)
            clock.count("first_token", int(first))
            piece = answer.push(token)
            clock.stop()  # what the caller does with a piece is not ours to count
            yield Piece(piece, token.token_id, None)
            clock.phase("decode")
            if answer.stopped:
                break
        closing = answer.close()
        proposals = acceptance.proposed, acceptance.accepted
        yield Piece(closing, None, answer.output(selection, clock.stop(), *proposals))

    def answer(self, sampling: SamplingParams) -> Answer:
        """An answer of the main model's that has no tokens yet."""
        return Answer(self.tokenizer, sampling, self.main.config.eos_token_ids)

    def _read(
        self,
        ids: np.ndarray,
        spans: Spans,
        config: SpecPrefillConfig,
        max_tokens: int,
        clock: PhaseClock,
        given: Selection | None,
        drafts: Drafts | None,
    ) -> tuple[Selection, Step, jax.Array]:
        """Select, prefill, and fall back to a dense prefill from a clean cache if the speculator fails."""
        marks = Marks(clock, eager=self.main.layerwise)
        if given is None:
            selection = self.selector.enqueue(ids, spans, config, marks, drafts)
        else:
            selection = given
            clock.phase("main_prefill")
        step, slot = self.read(ids, selection, max_tokens)
        marks.reach(step.hidden, "first_token")
        clock.count("main_prefill", selection.plan.max_kept_tokens)
        marks.settle()
        try:
            selection.check()
        except SpecPrefillError as error:
            if config.mode == "paper":
                raise
            clock.phase("main_prefill", tokens=len(ids))
            del step
            selection = self.selector.failed(ids, config, error)
            step, slot = self.read(ids, selection, max_tokens)
            jax.block_until_ready(step.hidden)
            clock.phase("first_token")
        return selection, step, slot

    def read(self, ids: np.ndarray, selection: Selection, max_tokens: int) -> tuple[Step, jax.Array]:
        """The main model's pass over the kept tokens of a checked prompt, and how many they are, [1] int32.

        Enqueued, not waited for. The cache has room for an answer of `max_tokens`.
        """
        size = selection.plan.max_kept_tokens
        total = padded(size, self.prefill_chunk)
        indices = selection.host_indices
        if indices is not None:
            arrays = np.zeros((2, 1, total), np.int32)
            arrays[:, 0, : len(indices)] = ids[indices], indices
            kept, positions = map(self.main.put, arrays)
            count = self.main.put(np.full((1,), len(indices), np.int32))
        else:
            assert selection.choice is not None
            # The selection may come from a pipeline with another prefill chunk: its padding is not ours.
            kept, positions, count = kept_batch(selection.choice, size=total)
            if kept.sharding.device_set != self.main.whole.device_set:  # a speculator on devices of its own
                kept, positions, count = (self._handed_on(array) for array in (kept, positions, count))
        step = prefill(
            self.main,
            kept,
            positions,
            count,
            size=size,
            capacity=capacity_for(max(total, size + max_tokens)),
            chunk=self.prefill_chunk,
        )
        return step, count

    def _handed_on(self, array: jax.Array) -> jax.Array:
        """An array that every speculator's device holds whole, on every device of the main model."""
        if array.is_fully_addressable:
            return jax.device_put(array, self.main.whole)
        return self.main.put(np.asarray(array))  # each process hands on its own; JAX copies within one only

    def _checked(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return check_ids(ids, self.main.config.vocab_size, self.max_prompt_tokens)

    def _tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ArgumentError(f"{name} as text is not allowed: the model has no tokenizer, so give token ids only")
        return self.tokenizer


def _check_selection(ids: np.ndarray, selection: Selection) -> None:
    """ArgumentError unless the selection is of this prompt."""
    if selection.num_tokens != len(ids):
        raise argument_error("selection", selection, f"a selection of this prompt, of {len(ids)} tokens")
    if selection.prompt is not None and not np.array_equal(selection.prompt, ids):
        raise argument_error("selection", selection, "a selection of this prompt, not of another as long")


def _seed(sampling: SamplingParams) -> int | None:
    """The seed; where none is given and processes could draw different ones, process 0's."""
    if sampling.seed is not None or sampling.temperature == 0 or jax.process_count() == 1:
        return sampling.seed
    from specprefill_jax.sharding.distributed import broadcast  # here: one process alone has no use for it

    return broadcast(secrets.randbits(64))


_seen_tokens = jax.jit(seen_tokens, static_argnums=2)
