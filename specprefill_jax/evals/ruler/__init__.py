"""RULER's thirteen tasks with prompts of our own: rows of any length (`generate`), and their scores.

What a task is made of and how it is sized follow RULER (arXiv 2404.06654); the words around it are our own, since
RULER's prompts are not ours to copy, and every row says so. Ours as well, so that results can be read beside others:

- Keys and values are distinct, within the haystack too, and needles among lines may stand behind the last one.
- Below 4,096 tokens essays shrink by 50 words and questions by one document, where RULER would lose half a text.
- A question is passed over where its documents do not fit; HotpotQA's distractors may be left out, its facts not.
- Where SQuAD or HotpotQA has too few documents, those without the answer come again.
- Where cwe needs more words than there are, and no file of more is given, "adjective-noun" pairs are made.
"""

from specprefill_jax.evals.ruler.generation import Prompting, Row, generate, plain, prompting
from specprefill_jax.evals.ruler.samples import check_tasks, ruler_samples
from specprefill_jax.evals.ruler.scoring import match_all, match_part, string_match_all, string_match_part
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.tasks import TASKS, Task

__all__ = [
    "TASKS",
    "Prompting",
    "Row",
    "Sources",
    "Task",
    "check_tasks",
    "generate",
    "match_all",
    "match_part",
    "plain",
    "prompting",
    "ruler_samples",
    "string_match_all",
    "string_match_part",
]
