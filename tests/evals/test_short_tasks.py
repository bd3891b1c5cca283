"""Short tasks, as far as they need no lm-eval: generation arguments, chats, scores, log-likelihoods, refusals."""

import math

import numpy as np
import oracle
import pytest
from agreement import prompt_of
from script_modules import load_script
from small_tokenizers import TOKENIZERS, byte_level

from specprefill_jax import SamplingParams
from specprefill_jax.errors import ArgumentError, TokenizerError
from specprefill_jax.evals import command
from specprefill_jax.evals.likelihood import log_likelihood
from specprefill_jax.evals.short_tasks import (
    RECIPES,
    numbers_of,
    prompt_tokens,
    render_history,
    sampling_of,
    score_of,
)
from specprefill_jax.tokens import Tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = Tokenizer(byte_level(), chat_templates={"default": TEMPLATE})


def test_the_papers_tasks():
    """Named and asked as arXiv 2502.02789 did: MMLU without a template, 8 examples of GSM8K and GPQA."""
    assert {name: (recipe.chat, recipe.num_fewshot, recipe.max_tokens) for name, recipe in RECIPES.items()} == {
        "mmlu_generative": (False, 0, 4),
        "arc_challenge_llama": (True, 0, None),
        "gsm8k_cot_llama": (True, 8, None),
        "gpqa_main_generative_n_shot": (True, 8, None),
        "leaderboard_ifeval": (True, 0, None),
    }


@pytest.mark.parametrize(
    ("kwargs", "sampling"),
    [
        ({}, SamplingParams(max_tokens=256)),
        ({"until": ["</s>", "\n"], "max_gen_toks": 4}, SamplingParams(max_tokens=4, stop=("</s>", "\n"))),
        ({"until": "Q:", "do_sample": False, "temperature": 0.7}, SamplingParams(max_tokens=256, stop=("Q:",))),
        ({"until": [], "temperature": 0.0}, SamplingParams(max_tokens=256)),
        ({"until": None, "max_new_tokens": 9}, SamplingParams(max_tokens=9)),
        ({"do_sample": True, "top_p": 0.9}, SamplingParams(max_tokens=256, temperature=1.0, top_p=0.9)),
        ({"temperature": 0.5, "top_k": 3, "seed": 1}, SamplingParams(max_tokens=256, temperature=0.5, top_k=3, seed=1)),
    ],
)
def test_generation_arguments(kwargs, sampling):
    assert sampling_of(kwargs) == sampling
    assert sampling_of(kwargs, 7).max_tokens == 7


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 4}, "generation argument='num_beams' is not allowed: generation argument must be one of"),
        ({"until": [""]}, "stop"),
        ({"max_gen_toks": 0}, "max_tokens=0 is not allowed"),
    ],
)
def test_generation_arguments_that_are_refused(kwargs, message):
    with pytest.raises(ArgumentError, match=message):
        sampling_of(kwargs)


def test_chats():
    asked = [{"role": "user", "content": "q"}]
    begun = [*asked, {"role": "assistant", "content": "It is"}]
    assert render_history(CHAT, asked, True) == "[user]q<|end|>[assistant]"
    assert render_history(CHAT, begun, False) == "[user]q<|end|>[assistant]It is"  # goes on: no mark of its end
    assert render_history(CHAT, begun, True) == "[user]q<|end|>[assistant]It is<|end|>[assistant]"
    assert render_history(CHAT, asked, False) == "[user]q<|end|>"
    with pytest.raises(TokenizerError):
        render_history(TOKENIZERS["bytes"], asked, True)


def test_one_bos():
    from tokenizers import processors

    backend = byte_level()
    end = [("<|begin|>", backend.token_to_id("<|begin|>"))]
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=end)
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<|begin|>"})
    bos = tokenizer.bos_token_id
    texts = {
        chat: [prompt_tokens(tokenizer, text, chat=chat) for text in ("hi", "<|begin|>hi")] for chat in (True, False)
    }
    plain, begun = texts[False]
    assert plain == begun == [bos, *tokenizer.encode("hi", add_special_tokens=False)]
    assert texts[True] == [plain[1:], begun]


def test_numbers():
    metrics = {
        "acc": True,
        "f1": np.float32(0.5),
        "each": [True, False, True, True],
        "text": "a",
        "none": [],
        "x": None,
    }
    assert numbers_of(metrics) == {"acc": 1.0, "f1": 0.5, "each": 0.75}


def test_scores():
    metrics = {"strict": {"exact_match": 0.0, "f1": 0.5}, "flexible": {"exact_match": 1.0}, "empty": {}}
    assert score_of(metrics, None) == 0.0
    assert score_of(metrics, "flexible") == 1.0
    for name in ("empty", "loose"):
        with pytest.raises(ArgumentError, match=f"filter='{name}' is not allowed.*: strict, flexible"):
            score_of(metrics, name)
    with pytest.raises(ArgumentError, match="filter=None"):
        score_of({}, None)


@pytest.mark.parametrize(
    ("length", "count", "chunk"), [(40, 7, 1024), (40, 7, 16), (40, 39, 16), (33, 1, 16), (2, 1, 16)]
)
def test_log_likelihood(tiny, reference, length, count, chunk):
    """Equal to the oracle's, wherever the continuation lies among the passes."""
    ids = prompt_of(length)
    before, after = ids[:-count], ids[-count:]
    logits = reference.logits_of(before, range(len(before)), after)
    expected = math.fsum(oracle.log_softmax(row)[token] for row, token in zip(logits, after, strict=True))
    found, greedy = log_likelihood(tiny.main, np.array(ids, np.int32), count, chunk=chunk)
    assert found == pytest.approx(expected, rel=1e-4)
    assert greedy == all(row.argmax() == token for row, token in zip(logits, after, strict=True))


def test_a_greedy_continuation_is_known_as_one(tiny):
    ids = np.array(prompt_of(20), np.int32)
    tokens = tiny.generate(ids, SamplingParams(max_tokens=5, ignore_eos=True)).token_ids
    found, greedy = log_likelihood(tiny.main, np.concatenate([ids, np.array(tokens, np.int32)]), 5, chunk=16)
    assert greedy
    other = [*tokens[:-1], (tokens[-1] + 1) % 512]
    less, is_greedy = log_likelihood(tiny.main, np.concatenate([ids, np.array(other, np.int32)]), 5, chunk=16)
    assert not is_greedy
    assert less < found < 0


def test_log_likelihoods_that_cannot_be(tiny):
    ids = np.array(prompt_of(9), np.int32)
    assert log_likelihood(tiny.main, ids, 0, chunk=16) == (0.0, True)
    for count in (-1, 9, 10):
        with pytest.raises(
            ArgumentError, match=f"continuation={count} is not allowed: continuation must be from 0 to 8"
        ):
            log_likelihood(tiny.main, ids, count, chunk=16)
    with pytest.raises(ArgumentError, match="ids=4098 is not allowed: ids must be at most 4097 tokens"):
        log_likelihood(tiny.main, np.zeros(4098, np.int32), 1, chunk=16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "limit=0 is not allowed"),
        (["--num-fewshot", "-1"], "num_fewshot=-1 is not allowed"),
        (["--max-tokens", "0"], "max_tokens=0 is not allowed"),
        (["--include-path", "nowhere"], "include_path='nowhere' is not allowed"),
        (["--settings", "p0"], "setting='p0' is not allowed"),
        ([], "main='smollm2-135m' is not allowed: main must be a model with a tokenizer"),
    ],
)
def test_wrong_flags(tiny, monkeypatch, tmp_path, flags, message, capsys):
    """All but the last are refused before a model is loaded."""
    monkeypatch.setattr(command.SpecPrefill, "from_pretrained", lambda *given, **named: tiny)
    assert load_script("eval_short").main(["--out", str(tmp_path), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_lm_eval_it_says_what_to_install(tiny, monkeypatch, tmp_path, capsys):
    import sys

    from specprefill_jax import SpecPrefill

    pair = SpecPrefill(tiny.main, tiny.speculator.model, CHAT)
    monkeypatch.setattr(command.SpecPrefill, "from_pretrained", lambda *given, **named: pair)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert load_script("eval_short").main(["--out", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "install the extra `lm-eval`, pip install 'specprefill-jax[lm-eval]'" in said
