"""The thirteen tasks and their parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from specprefill_jax.evals.ruler.chain import chain
from specprefill_jax.evals.ruler.counting import common_words, frequent_words
from specprefill_jax.evals.ruler.making import Maker
from specprefill_jax.evals.ruler.needles import needles
from specprefill_jax.evals.ruler.questions import questions
from specprefill_jax.evals.ruler.scoring import match_all, match_part
from specprefill_jax.evals.ruler.sources import Sources


@dataclass(frozen=True)
class Task:
    """One task."""

    maker: Callable[[int, Sources], Maker]
    """What makes its samples, from the length in tokens."""
    answer_tokens: int
    """Most tokens of an answer; they count to a row's length."""
    score: Callable[[str, tuple[str, ...]], float] = match_all
    """From an output and the row's outputs, the sample's score from 0 to 1."""


_hidden = partial(partial, needles)

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "niah_single_1": Task(_hidden(haystack="noise"), 128),
        "niah_single_2": Task(_hidden(haystack="essay"), 128),
        "niah_single_3": Task(_hidden(haystack="essay", value="uuid"), 128),
        "niah_multikey_1": Task(_hidden(haystack="essay", keys=4), 128),
        "niah_multikey_2": Task(_hidden(haystack="needles"), 128),
        "niah_multikey_3": Task(_hidden(haystack="needles", key="uuid", value="uuid"), 128),
        "niah_multivalue": Task(_hidden(haystack="essay", values=4), 128),
        "niah_multiquery": Task(_hidden(haystack="essay", queries=4), 128),
        "vt": Task(partial(chain, hops=4), 30),
        "cwe": Task(partial(common_words, common=10), 120),
        "fwe": Task(partial(frequent_words, asked=3), 50),
        "qa_1": Task(partial(questions, dataset="squad"), 32, match_part),
        "qa_2": Task(partial(questions, dataset="hotpotqa"), 32, match_part),
    }
)
"""By RULER's names, in its order."""
