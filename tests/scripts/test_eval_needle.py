"""scripts/eval_needle.py with stand-ins for pairs of models: it tells at which keep rate a pair loses what it reads."""

import json
import re
from types import SimpleNamespace

import pytest
from script_modules import load_script

script = load_script("eval_needle")


class Words:
    """A tokenizer whose tokens are words; a chat is its message."""

    @staticmethod
    def render_chat(messages):
        return messages[0]["content"]

    @staticmethod
    def encode(text, add_special_tokens=True):
        return text.split()


class Pair:
    """Answers with the number that stands after the needle's words, if those were read.

    One that finds keeps the needle whatever the rate; another keeps the prompt's beginning, as much as the rate allows.
    """

    tokenizer = Words()

    def __init__(self, finds: bool):
        self._finds = finds

    def encode(self, text):
        return text.split()

    def generate(self, prompt, sampling, config):
        kept = round(config.keep_rate * len(prompt)) if config.enabled else len(prompt)
        read = prompt if self._finds else prompt[:kept]
        number = re.search(r"special magic number is (\d+)", " ".join(read))
        selection = SimpleNamespace(num_tokens=len(prompt), num_kept=kept)
        return SimpleNamespace(text=f" {number[1]}." if number else " unknown", selection=selection)


@pytest.mark.parametrize(
    ("speculator", "keep_rate", "found", "status"),
    [("safe", 0.2, 5, 0), ("unsafe", 0.2, 1, 1), ("unsafe", 0.6, 3, 1), ("unsafe", 1.0, 5, 0)],
)
def test_rapid_mlx_1458_a_keep_rate_is_measured_pair_by_pair(
    monkeypatch, tmp_path, speculator, keep_rate, found, status
):
    """The same rate is safe with one pair and loses four of five needles with another: status and file say which."""
    asked = []

    def from_pretrained(*names):
        asked.append(names)
        return Pair(names[1] == "safe")

    monkeypatch.setattr(script.SpecPrefill, "from_pretrained", from_pretrained)
    out = tmp_path / "pair.json"
    args = script.Args(main="m", speculator=speculator, cases=5, tokens=1000, keep_rate=keep_rate, out=out)
    assert script.main(args) == status
    assert asked == [("m", speculator, "float32")]
    written = json.loads(out.read_text())
    settings = written["settings"]
    assert (settings["main"], settings["speculator"], settings["keep_rate"]) == ("m", speculator, keep_rate)
    assert [case["dense_right"] for case in written["cases"]] == [True] * 5
    assert [case["sparse_right"] for case in written["cases"]] == [True] * found + [False] * (5 - found)


def test_a_pair_that_answers_nothing_is_not_safe(monkeypatch):
    """Where not even the whole prompt is answered, nothing has been shown."""
    pair = Pair(True)
    silent = SimpleNamespace(text="", selection=SimpleNamespace(num_tokens=200, num_kept=20))
    monkeypatch.setattr(pair, "generate", lambda *given: silent)
    monkeypatch.setattr(script.SpecPrefill, "from_pretrained", lambda *names: pair)
    assert script.main(script.Args(cases=2, tokens=100)) == 1
