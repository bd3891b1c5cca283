"""Other ways to choose what is read of a prompt, at the same number of tokens, without a speculator.

All of them restore positions as SpecPrefill does: what is kept stays in the order of the prompt, each token at its
place. All but `head_tail` first keep the prompt's first chunk and its last 64 tokens, as product mode does; these count
towards the budget. Without them no question would be left to answer.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np

from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.bm25 import bm25
from specprefill_jax.evals.extras import extra
from specprefill_jax.planning import budget, num_chunks
from specprefill_jax.selection import Selection
from specprefill_jax.tokens import StreamDecoder, Tokenizer

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_TERM = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]”’]*\s+|[。！？]+[”’」』]*\s*|\s*\n\s*")


@dataclass(frozen=True)
class Embedder:
    """What embeds texts."""

    model: str
    """Its name."""
    embed: Callable[[Sequence[str]], np.ndarray]
    """Texts -> their embeddings [texts, dimensions], each of length 1."""


@dataclass(frozen=True)
class Request:
    """What a way of choosing may look at."""

    ids: np.ndarray
    """int [M] token ids of the whole prompt."""
    keep_rate: float
    question: str = ""
    """What is asked about the text; "": taken from the last 64 tokens."""
    tokenizer: Tokenizer | None = None
    """None: token ids stand for words, and chunks for sentences."""
    seed: int = 0
    embedder: Embedder | None = None
    """Of "embedding_sentences"."""
    chunk_size: int = 32
    tail_tokens: int = 64

    @property
    def num_chunks(self) -> int:
        """Chunks of the prompt."""
        return num_chunks(len(self.ids), self.chunk_size)

    @property
    def kept_chunks(self) -> int:
        """The budget in chunks, the same as SpecPrefill's."""
        return budget(self.num_chunks, self.keep_rate)


def _filled(forced: Iterable[int], ranked: Iterable[int], room: int) -> list[int]:
    """The first `room` of the forced and then of the ranked ones, each once, ascending."""
    return sorted(list(dict.fromkeys([*forced, *ranked]))[:room])


def _ends(total: int, head: int, tail: int) -> list[int]:
    """The last `tail` of `total` from the end backwards, then the first `head`: what must go last goes first."""
    return [*range(total - 1, max(total - tail, 0) - 1, -1), *range(min(head, total))]


def _forced_chunks(request: Request) -> list[int]:
    first = max(len(request.ids) - request.tail_tokens, 0) // request.chunk_size
    return _ends(request.num_chunks, 1, request.num_chunks - first)


def random_chunks(request: Request) -> Selection:
    """Chunks by a seeded draw that differs from prompt to prompt; a higher keep rate keeps a lower one's chunks."""
    digest = hashlib.sha256(np.asarray(request.ids, "<i4").tobytes()).digest()
    draw = np.random.default_rng([request.seed, *digest])
    order = draw.permutation(request.num_chunks).tolist()
    chunks = _filled(_forced_chunks(request), order, request.kept_chunks)
    return Selection.of_chunks(request.ids, chunks, chunk_size=request.chunk_size)


def head_tail(request: Request) -> Selection:
    """The prompt's beginning and its end, half of the budget each; an odd chunk goes to the end."""
    head = request.kept_chunks // 2
    chunks = _ends(request.num_chunks, head, request.kept_chunks - head)
    return Selection.of_chunks(request.ids, chunks, chunk_size=request.chunk_size)


def bm25_chunks(request: Request) -> Selection:
    """The chunks whose words answer the question best, by BM25; ties go to the lower chunk."""
    text = _Text(request)
    borders = range(0, len(request.ids) + request.chunk_size, request.chunk_size)
    ranked = _ranked(text, [min(border, len(request.ids)) for border in borders])
    chunks = _filled(_forced_chunks(request), ranked, request.kept_chunks)
    return Selection.of_chunks(request.ids, chunks, chunk_size=request.chunk_size)


def bm25_sentences(request: Request) -> Selection:
    """The sentences whose words answer the question best, by BM25; see `_sentences`."""
    return _sentences(request, _ranked)


def embedding_sentences(request: Request) -> Selection:
    """The sentences whose embeddings are nearest to the question's; see `_sentences`.

    The retrieval that arXiv 2502.02789 compares with, except that what is found stays at its place. Without a question
    the last 64 tokens ask.

    Raises:
        ArgumentError: no embedder, or no tokenizer.
    """
    embedder = request.embedder
    if embedder is None or request.tokenizer is None:
        raise argument_error("embedder", embedder, "given, together with a tokenizer")

    def ranked(text: "_Text", borders: Sequence[int]) -> list[int]:
        pieces = [text.piece(start, end) for start, end in pairwise(borders)]
        asked = request.question or text.piece(max(len(request.ids) - request.tail_tokens, 0), len(request.ids))
        *found, question = embedder.embed([*pieces, asked])
        return np.argsort(-(np.asarray(found) @ question), kind="stable").tolist()

    return _sentences(request, ranked)


def _sentences(request: Request, rank: "Callable[[_Text, Sequence[int]], list[int]]") -> Selection:
    """The sentences that `rank` puts first, to as many tokens as whole chunks would have.

    The last sentence is cut where the budget ends.
    """
    text = _Text(request)
    borders = text.sentence_borders()
    ranked = (token for index in rank(text, borders) for token in range(borders[index], borders[index + 1]))
    short = request.num_chunks * request.chunk_size - len(request.ids)  # what the last chunk lacks; it is kept
    room = request.kept_chunks * request.chunk_size - short
    forced = _ends(len(request.ids), request.chunk_size, request.tail_tokens)
    return Selection.of_chunks(request.ids, _filled(forced, ranked, room), chunk_size=1)


def _ranked(text: "_Text", borders: Sequence[int]) -> list[int]:
    """The pieces between the borders (token indices), best first."""
    documents: list[list[Hashable]] = [[] for _ in pairwise(borders)]
    for token, term in text.terms:
        documents[bisect_right(borders, token) - 1].append(term)
    return np.argsort(-bm25(documents, text.query), kind="stable").tolist()


class _Text:
    """A prompt as words, each at the token in which it begins."""

    def __init__(self, request: Request):
        self.request = request
        tokens = len(request.ids)
        tail = tokens - request.tail_tokens
        self.terms: list[tuple[int, Hashable]] = list(enumerate(request.ids.tolist()))
        self._text, self._starts = "", list(range(tokens))
        if request.tokenizer is not None:
            decoder = StreamDecoder(request.tokenizer, skip_special_tokens=False)
            pieces = [decoder.push(token) for token in request.ids.tolist()]
            pieces[-1] += decoder.flush()
            self._text = "".join(pieces)
            self._starts = [0, *accumulate(map(len, pieces[:-1]))]
            self.terms = [(self._token_at(word.start()), word[0].casefold()) for word in _TERM.finditer(self._text)]
        asked = [word[0].casefold() for word in _TERM.finditer(request.question)]
        known = request.tokenizer is not None and asked
        self.query: list[Hashable] = list(asked) if known else [term for token, term in self.terms if token >= tail]

    def piece(self, start: int, end: int) -> str:
        """The text of tokens `start` to `end`."""
        return self._text[self._starts[start] : self._starts[end] if end < len(self._starts) else None]

    def _token_at(self, character: int) -> int:
        """The token in which the character begins: of several bytes' tokens, the first."""
        token = bisect_right(self._starts, character) - 1
        return bisect_left(self._starts, self._starts[token])

    def sentence_borders(self) -> list[int]:
        """Tokens at which sentences begin, and the prompt's length."""
        tokens, size = len(self.request.ids), self.request.chunk_size
        if self.request.tokenizer is None:
            return [*range(0, tokens, size), tokens]
        ends = [end.end() for end in _SENTENCE_END.finditer(self._text)]
        found = {self._token_at(end) for end in ends if end < len(self._text)}
        return sorted({0, tokens, *found})


BASELINES: Mapping[str, Callable[[Request], Selection]] = MappingProxyType(
    {
        "random": random_chunks,
        "head_tail": head_tail,
        "bm25_chunks": bm25_chunks,
        "bm25_sentences": bm25_sentences,
        "embedding_sentences": embedding_sentences,
    }
)
"""The ways of choosing by name."""


def sentence_embedder(model: str) -> Embedder:
    """Embeddings by a model of sentence-transformers: a folder or a Hub id, in safetensors and without code of its own.

    Raises:
        SpecPrefillError: the library is missing, or has no such model.
    """
    library = extra("sentence_transformers", "embedding")
    try:
        encoder = library.SentenceTransformer(model, trust_remote_code=False, model_kwargs={"use_safetensors": True})
    except (OSError, ValueError) as error:
        raise SpecPrefillError(f"{model} is no model of sentence-transformers: {error}") from error

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.asarray(encoder.encode(list(texts), normalize_embeddings=True, show_progress_bar=False), np.float32)

    return Embedder(model, embed)


def choose(name: str, request: Request) -> Selection:
    """What the way of that name chooses; ArgumentError for an unknown one or an empty prompt."""
    if name not in BASELINES:
        raise argument_error("name", name, "one of " + ", ".join(BASELINES))
    if not len(request.ids):
        raise argument_error("ids", request.ids, "at least one token")
    return BASELINES[name](request)
