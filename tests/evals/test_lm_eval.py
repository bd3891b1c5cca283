"""lm-eval itself (`make test-lm-eval`): its tasks through our runner, and our model in its own evaluation, agree."""

import json

import numpy as np
import pytest
from script_modules import load_script
from small_tokenizers import byte_level

from specprefill_jax import SpecPrefill
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals import command
from specprefill_jax.evals.likelihood import log_likelihood
from specprefill_jax.evals.results import read_rows
from specprefill_jax.tokens import Tokenizer

pytestmark = [
    pytest.mark.lm_eval,
    pytest.mark.filterwarnings("default"),  # what lm-eval and its libraries warn of is theirs
]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

GENERATIVE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {data}, test: {data}}}}}
output_type: generate_until
test_split: test
fewshot_split: train
doc_to_text: "Which letter? {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["z"], max_gen_toks: 6{more}}}
num_fewshot: {shots}
filter_list:
  - name: first
    filter: [{{function: regex, regex_pattern: "^(.)"}}, {{function: take_first}}]
  - name: whole
    filter: [{{function: take_first}}]
metric_list: [{{metric: exact_match}}]
"""
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" a", " bc"]
target_delimiter: ""
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def pair(tiny) -> SpecPrefill:
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": TEMPLATE})
    return SpecPrefill(tiny.main, tiny.speculator.model, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pair):
    """Task files and their data, of which some answers are what the model says."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"{word} " * 8, "answer": "?"} for word in ("red", "green", "blue")]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, shots, more in (("letters", 1, ""), ("drawn", 0, ", temperature: 0.5"), ("beams", 0, ", num_beams: 2")):
        text = GENERATIVE.format(name=name, data=data, shots=shots, more=more)
        (folder / f"{name}.yaml").write_text(text)
    (folder / "choice.yaml").write_text(CHOICE.format(data=data))
    (folder / "two.yaml").write_text("group: two\ntask: [letters, drawn]\n")
    return folder


@pytest.fixture
def script(monkeypatch, pair, folder, tmp_path):
    """eval_short on that pair, into a folder."""
    monkeypatch.setattr(command.SpecPrefill, "from_pretrained", lambda *given, **named: pair)

    def run(*flags: str) -> int:
        return load_script("eval_short").main(["--include-path", str(folder), "--out", str(tmp_path / "out"), *flags])

    return run


def evaluate(pair, folder, task, setting, chat=True, **more):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from specprefill_jax.evals.lm_eval_model import SpecPrefillLM

    return simple_evaluate(
        model=SpecPrefillLM(pair=pair, setting=setting),
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder)),
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        bootstrap_iters=0,
        **more,
    )


@pytest.mark.parametrize("chat", [True, False])
def test_rows_agree_with_lm_evals_own_evaluation(pair, folder, script, tmp_path, chat, capsys):
    """Same prompts, same answers, same scores, in every setting; and nothing is done twice."""
    settings = ["dense", "p3_full_lah8", "random_p3"]
    flags = ["--tasks", "letters", "--settings", *settings, "--chat", str(chat)]
    assert script(*flags, "--limit", "2") == 0
    assert script(*flags) == 0
    assert "3 rows added to" in (said := " ".join(capsys.readouterr().err.split()))
    assert "6 were there" in said
    rows = list(read_rows(tmp_path / "out" / "short.jsonl"))
    for setting in settings:
        mine = [row for row in rows if row["setting"] == setting]
        theirs = evaluate(pair, folder, "letters", setting, chat)
        samples = [sample for sample in theirs["samples"]["letters"] if sample["filter"] == "first"]
        assert [row["output"] for row in mine] == [sample["resps"][0][0] for sample in samples]
        assert [row["score"] for row in mine] == [sample["exact_match"] for sample in samples]
        for name in ("first", "whole"):
            mean = np.mean([row["metrics"][f"exact_match,{name}"] for row in mine])
            assert mean == theirs["results"]["letters"][f"exact_match,{name}"]
        prompts = [pair.tokenizer.encode(sample["arguments"][0][0]) for sample in samples]
        assert [row["num_tokens"] for row in mine] == list(map(len, prompts))
    first = rows[0]
    assert (first["task"], first["key"], first["bucket"], first["subtask"]) == ("letters", "0", "1-shot", "letters")
    assert first["kept"] == [[0, first["num_tokens"]]]
    assert rows[1]["num_kept"] < first["num_tokens"] / 2


def test_answers_that_are_right_score(pair, folder, tmp_path, script, monkeypatch):
    """A task whose answers are what the model says: each filter sees it."""
    assert script("--tasks", "letters", "--settings", "dense") == 0
    said = [row["output"] for row in read_rows(tmp_path / "out" / "short.jsonl")]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    own = tmp_path / "own"
    own.mkdir()
    (own / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "answer": text[:1]}) + "\n" for row, text in zip(rows, said, strict=True))
    )
    # No examples: they would tell the answers.
    (own / "first.yaml").write_text(GENERATIVE.format(name="first", data=own / "rows.jsonl", shots=0, more=""))
    flags = ["--tasks", "first", "--settings", "dense", "--include-path", str(own), "--out", str(tmp_path / "again")]
    assert script(*flags) == 0
    once = list(read_rows(tmp_path / "again" / "short.jsonl"))
    for row, given in zip(once, (text[:1] for text in said), strict=True):
        assert row["metrics"]["exact_match,first"] == float(row["output"][:1] == given)
        assert row["metrics"]["exact_match,whole"] == float(row["output"] == given)
        assert row["score"] == row["metrics"]["exact_match,first"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("nothing_of_this_name", "lm-eval cannot load the task nothing_of_this_name"),
        ("choice", "choice: output_type='multiple_choice' is not allowed: choice: output_type must be generative"),
        ("drawn", "drawn: temperature=0.5 is not allowed"),
        ("beams", "generation argument='num_beams' is not allowed"),
        ("mmlu_generative", "lm-eval cannot load the task mmlu_generative"),  # no network in a test
    ],
)
def test_tasks_that_are_refused(script, task, message, capsys):
    assert script("--tasks", task, "--settings", "dense") == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_log_likelihoods_are_read_whole_or_refused(pair, folder):
    from specprefill_jax.evals.lm_eval_model import SpecPrefillLM

    theirs = evaluate(pair, folder, "choice", "dense", chat=False)
    question = json.loads((folder / "rows.jsonl").read_text().splitlines()[0])["question"]
    [first, *_] = theirs["samples"]["choice"]
    for choice, response in zip((" a", " bc"), first["resps"], strict=True):
        # lm-eval moves the space before a choice into it.
        context = pair.tokenizer.encode(question.rstrip())
        whole = pair.tokenizer.encode(question + choice)
        ids = np.array(whole, np.int32)
        expected = log_likelihood(pair.main, ids, len(whole) - len(context), chunk=pair.prefill_chunk)
        assert response[0] == pytest.approx(expected)
    with pytest.raises(SpecPrefillError, match="setting='p3_full' has no log-likelihoods: they need every token"):
        evaluate(pair, folder, "choice", "p3_full", chat=False)
    from lm_eval.api.instance import Instance

    text = "hello world"
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    model = SpecPrefillLM(pair=pair)
    ids = np.array([model.prefix_token_id, *pair.tokenizer.encode(text)], np.int32)
    expected = log_likelihood(pair.main, ids, len(ids) - 1, chunk=pair.prefill_chunk)[0]
    assert model.loglikelihood_rolling([request], disable_tqdm=True) == [pytest.approx(expected)]
    with pytest.raises(SpecPrefillError, match="has no log-likelihoods"):
        SpecPrefillLM(pair=pair, setting="random_p3").loglikelihood_rolling([request])


def test_the_model_as_lm_eval_makes_it(pair, tiny, monkeypatch):
    from lm_eval.api.registry import get_model

    from specprefill_jax.evals.lm_eval_model import SpecPrefillLM

    given = []
    monkeypatch.setattr(SpecPrefill, "from_pretrained", lambda *some, **named: given.append((some, named)) or pair)
    kind = get_model("specprefill")
    assert kind is SpecPrefillLM
    arguments = "main=big,speculator=small,setting=p3_full_lah8,dtype=float32"
    model = kind.create_from_arg_string(arguments, {"batch_size": 1, "max_batch_size": None, "device": None})
    assert given == [(("big", "small", "float32"), {"speculator_layers": None})]
    assert (model.setting.name, model.max_length, model.max_gen_toks) == ("p3_full_lah8", 4096, 256)
    assert model.tokenizer_name == f"specprefill-{pair.tokenizer.fingerprint()[:16]}"
    assert (model.chat_template(True), model.chat_template(False)) == (TEMPLATE, None)
    for wrong, message in (({"setting": "p0"}, "setting='p0'"), ({"pretrained": "x"}, r"model_args=\['pretrained'\]")):
        with pytest.raises(ArgumentError, match=message):
            kind(**wrong)
    monkeypatch.setattr(SpecPrefill, "from_pretrained", lambda *some, **named: tiny)
    with pytest.raises(ArgumentError, match="a model with a tokenizer"):
        kind()
