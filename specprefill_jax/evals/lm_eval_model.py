"""A model for lm-eval (extra `lm-eval`): any pair, in any of the settings that an evaluation compares.

    python -m specprefill_jax.evals.lm_eval_model run --model specprefill --tasks gsm8k_cot_llama \
        --apply_chat_template --model_args main=MODEL,speculator=SMALL,setting=p3_full_lah8

is lm-eval's own command with this model in it. `scripts/eval_short.py` asks the same, sample by sample and resumably.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.likelihood import log_likelihood
from specprefill_jax.evals.runner import selections
from specprefill_jax.evals.settings import parse_setting
from specprefill_jax.evals.short_tasks import DEFAULT_TOKENS, prompt_tokens, render_history, sampling_of
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.tokens import Tokenizer


@register_model("specprefill")
class SpecPrefillLM(TemplateLM):
    """A pair of models as lm-eval asks them.

    Answers are read as `setting` says. Log-likelihoods are read whole, so they are refused in any setting but `dense`:
    of tokens that were dropped there are none, and numbers of a dense read would pass for those of a sparse one.
    """

    def __init__(
        self,
        main: str = "smollm2-135m",
        speculator: str = "smollm2-135m",
        setting: str = "dense",
        dtype: str = "bfloat16",
        speculator_layers: int | None = None,
        max_gen_toks: int = DEFAULT_TOKENS,
        seed: int = 0,
        pair: SpecPrefill | None = None,
        **ignored: Any,
    ) -> None:
        """Load a pair, or take one.

        Args:
            main: see `SpecPrefill.from_pretrained`, also for the next and for `dtype` and `speculator_layers`.
            speculator: the model that chooses.
            setting: `dense`, `p3_full_lah8`, `product_p3`, ... (`settings.parse_setting`).
            dtype: of both models.
            speculator_layers: use only the speculator's first so many layers.
            max_gen_toks: most tokens of an answer where the task does not say so.
            seed: of the setting `random_...`.
            pair: a pair that is loaded already.
            ignored: what lm-eval hands to every model (`batch_size`, `max_batch_size`, `device`) and none here needs.

        Raises:
            SpecPrefillError: a bad setting or argument, models that cannot be loaded, or that have no tokenizer.
        """
        super().__init__()
        if unknown := ignored.keys() - {"batch_size", "max_batch_size", "device"}:
            raise argument_error("model_args", sorted(unknown), "main, speculator, setting, dtype and the like")
        self.setting = parse_setting(setting)
        self.max_gen_toks = max_gen_toks
        self.seed = seed
        self.pair = pair or SpecPrefill.from_pretrained(main, speculator, dtype, speculator_layers=speculator_layers)
        if self.pair.tokenizer is None:
            raise argument_error("main", main, "a model with a tokenizer")
        self.tokens: Tokenizer = self.pair.tokenizer
        self._chat = False

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.pair.main.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: BOS, or else the id that ends a text."""
        bos = self.tokens.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The main model's context."""
        return self.pair.max_prompt_tokens

    @property
    def tokenizer_name(self) -> str:
        """Names prompts that lm-eval keeps: of another tokenizer or template they would be others."""
        return f"specprefill-{self.tokens.fingerprint()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, which lm-eval stores beside results."""
        return self.tokens.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat; without `add_generation_prompt` its last message, if the assistant's, goes on."""
        self._chat = True
        return render_history(self.tokens, chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Token ids, with BOS where the tokenizer adds one, but not before a chat or a text that begins with it."""
        if add_special_tokens is None:
            return prompt_tokens(self.tokens, string, chat=self._chat)
        return self.tokens.encode(string, add_special_tokens)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer each (prompt, generation arguments).

        Raises:
            SpecPrefillError: arguments that are not known, or a prompt that does not fit: nothing is cut silently.
        """
        return [self._answer(*request.args) for request in _watched(requests, disable_tqdm)]

    def _answer(self, text: str, kwargs: dict[str, Any]) -> str:
        sampling = sampling_of({"max_gen_toks": self.max_gen_toks, **kwargs})
        ids = np.asarray(self.tok_encode(text), np.int32)
        [selection] = selections(self.pair, ids, "", [self.setting], self.seed)
        answer = self.pair.generate(ids, sampling, self.setting.config, selection=selection).text
        self.cache_hook.add_partial("generate_until", (text, kwargs), answer)
        return answer

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        self._check_dense()
        score = partial(log_likelihood, self.pair.main, chunk=self.pair.prefill_chunk)
        found = []
        for key, context, continuation in _watched(requests, disable_tqdm):
            found.append(score(np.asarray([*context, *continuation], np.int32), len(continuation)))
            self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each of at most the context.

        Raises:
            SpecPrefillError: any setting but `dense`, or a longer text.
        """
        self._check_dense()
        found = []
        for request in _watched(requests, disable_tqdm):
            ids = [self.prefix_token_id, *self.tokens.encode(request.args[0], add_special_tokens=False)]
            whole = np.asarray(ids, np.int32)
            found.append(log_likelihood(self.pair.main, whole, len(ids) - 1, chunk=self.pair.prefill_chunk)[0])
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _check_dense(self) -> None:
        if self.setting.method != "dense":
            raise SpecPrefillError(
                f"setting={self.setting.name!r} has no log-likelihoods: they need every token of a prompt, and dropped "
                "ones have none. Use setting=dense, or a generative task (mmlu_generative in place of mmlu)"
            )


def _watched(requests: Sequence[Any], quiet: bool) -> Iterator[Any]:
    from tqdm import tqdm

    yield from tqdm(requests, disable=quiet)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
