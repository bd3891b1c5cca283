"""RULER's thirteen tasks with prompts of our own: rows of any length (`generate`), and their scores. No JAX here.

What a task is made of and how it is sized follow RULER (arXiv 2404.06654); the words around it are our own, since
RULER's prompts are not ours to copy, and every row says so.
"""

from specprefill_jax.evals.ruler.generation import Prompting, Row, generate, plain, prompting
from specprefill_jax.evals.ruler.scoring import match_all, match_part, string_match_all, string_match_part
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.tasks import TASKS, Task

__all__ = [
    "TASKS",
    "Prompting",
    "Row",
    "Sources",
    "Task",
    "generate",
    "match_all",
    "match_part",
    "plain",
    "prompting",
    "string_match_all",
    "string_match_part",
]
