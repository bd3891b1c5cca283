"""scripts/generate.py as a command: what goes to stdout and what to stderr, exit statuses, and every kind of prompt."""

import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from chunks import choice_of
from script_modules import load_script

import specprefill_jax
from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError, CheckpointError
from specprefill_jax.planning import Reason, plan
from specprefill_jax.selection import Selection
from specprefill_jax.timing import PHASES, PhaseClock

ROOT = Path(__file__).parents[2]
TEXT = "The boat is green. The code is 1234. The river is slow. The cat sleeps. " * 10

script = load_script("generate")


class Bytes:
    """A tokenizer whose tokens are bytes and whose chat template is plain to see."""

    has_chat_template = True

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")


class Fake:
    """The pipeline's interface, with an answer that is known beforehand and a choice that is quick to make."""

    def __init__(self, **loaded):
        self.loaded = loaded
        self.tokenizer = Bytes()
        self.answer = ["It ", "is ", "1234."]
        self.calls, self.warmed = [], []
        self.interrupt_after = None

    def encode(self, prompt):
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.encode_chat(prompt)
        return np.asarray(ids, np.int32)

    def warm_up(self, num_tokens, config=None, sampling=None):
        self.warmed.append((num_tokens, config, sampling))

    def stream(self, prompt, sampling, config):
        self.calls.append(SimpleNamespace(prompt=prompt, sampling=sampling, config=config))
        clock = PhaseClock()
        ids = self.encode(prompt)
        planned = plan(len(ids), config, predicted_gain=2.5)
        selection = Selection(planned) if not planned.engaged else self._choose(planned, clock)
        clock.phase("main_prefill", tokens=selection.num_kept)
        clock.phase("first_token", tokens=1)
        for index, text in enumerate(self.answer):
            if index == self.interrupt_after:
                raise KeyboardInterrupt
            yield SimpleNamespace(text=text, token_id=index, output=None)
            clock.phase("decode", tokens=1)
        yield SimpleNamespace(
            text="",
            token_id=None,
            output=SimpleNamespace(
                text="".join(self.answer),
                token_ids=list(range(len(self.answer))),
                finish_reason="stop",
                selection=selection,
                timings=clock.stop(),
                logprobs=None,
            ),
        )

    def _choose(self, planned, clock):
        clock.phase("speculate", tokens=planned.num_tokens)
        clock.phase("score")
        scores = np.linspace(1, 2, planned.num_chunks, dtype=np.float32)
        order = np.argsort(-np.where(planned.forced_mask(), np.inf, scores), kind="stable")
        mask = np.zeros(planned.num_chunks, bool)
        mask[order[: planned.kept_chunks]] = True
        kept = np.flatnonzero(np.repeat(mask, planned.chunk_size)[: planned.num_tokens])
        return Selection(planned, choice=choice_of(mask, kept), chunk_scores=scores)


@pytest.fixture
def fake(monkeypatch):
    """The model that the command loads; `fake.loaded` is what it was asked for."""
    model = Fake()

    def from_pretrained(**options):
        model.loaded = options
        return model

    monkeypatch.setattr(specprefill_jax, "SpecPrefill", SimpleNamespace(from_pretrained=from_pretrained), raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return model


@pytest.fixture
def command(fake, capsys):
    """Run the command in this process: (status, stdout, stderr)."""

    def run(*argv):
        status = script.main([str(argument) for argument in argv])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


# What it answers


def test_stdout_carries_the_answer_and_nothing_else(command, fake):
    status, out, err = command(TEXT, "--question", "What is the code?")
    assert (status, out) == (0, "It is 1234.\n")
    assert fake.calls[0].prompt == [{"role": "user", "content": TEXT + "\n\nWhat is the code?"}]
    for said in ("tokenise", "speculate", "score and choose", "main prefill", "first token", "decode", "total"):
        assert said in err
    assert "engaged: the speculator chose what to read" in err
    assert "three zero-output blocks" in err, "the stand-in is described wherever it is shown"


def test_the_answer_comes_as_it_is_made(command, monkeypatch):
    seen = []
    monkeypatch.setattr(script, "emit", seen.append)
    command(TEXT)
    assert seen == ["It ", "is ", "1234.", "", "\n"]


def test_phases_add_up_to_the_wall_clock(command, fake, monkeypatch):
    steps = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr(script.time, "perf_counter", lambda: next(steps))
    original = PhaseClock.__init__
    monkeypatch.setattr(PhaseClock, "__init__", lambda self: original(self, now=lambda: next(steps)))
    _, out, _ = command(TEXT, "--json")
    run = json.loads(out)["runs"][0]
    phases = [run["timings"][name] for name in PHASES]
    assert sum(phases) == run["timings"]["total"] == 4.0
    assert run["wall_seconds"] == 5.0, "half a second on each side of the clock"


def test_models_and_settings_are_passed_on(command, fake):
    flags = (
        "--main M --speculator S --dtype bfloat16 --speculator-layers 3 --keep-rate 0.2 --look-ahead 4 --pool-width 7"
    )
    more = "--chunk-size 16 --mode paper --max-tokens 5 --temperature 0.7 --top-k 9 --top-p 0.8 --min-p 0.1"
    rest = "--repetition-penalty 1.1 --seed 3 --ignore-eos --card card.json --stop END STOP"
    status, _, err = command(TEXT, *flags.split(), *more.split(), *rest.split())
    assert status == 0, err
    assert fake.loaded == {
        "main": "M",
        "speculator": "S",
        "dtype": "bfloat16",
        "mesh": None,
        "speculator_layers": 3,
        "card": "card.json",
    }
    (call,) = fake.calls
    assert call.config == SpecPrefillConfig(0.2, look_ahead=4, pool_width=7, chunk_size=16, mode="paper")
    assert call.sampling == SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=3,
        ignore_eos=True,
        stop=("END", "STOP"),
    )


def test_dense_reads_everything_and_loads_one_model(command, fake):
    status, out, err = command(TEXT, "--dense", "--main", "M")
    assert (status, out) == (0, "It is 1234.\n")
    assert fake.loaded["speculator"] == "M"
    assert not fake.calls[0].config.enabled
    assert "disabled: sparse prefill was switched off" in err
    assert "speculator " not in err


def test_compare_shows_both_side_by_side(command, fake):
    status, out, err = command(TEXT, "--compare", "--keep-rate", "0.3")
    assert (status, out) == (0, "It is 1234.\nIt is 1234.\n")
    assert [call.config.enabled for call in fake.calls] == [False, True]
    assert fake.warmed == [(len(fake.encode(fake.calls[0].prompt)), SpecPrefillConfig(0.3), SamplingParams())]
    assert "the cost model's ceiling is 2.50x" in err
    assert "compiling took" in err
    assert "dense answer" in err


def test_json_is_one_object(command, fake):
    status, out, _ = command(TEXT, "--json", "--compare", "--keep-rate", "0.3")
    assert status == 0
    said = json.loads(out)
    assert out.count("\n") == 1
    dense, sparse = said["runs"]
    assert (dense["engaged"], dense["reason"]) == (False, "disabled")
    assert (sparse["engaged"], sparse["reason"], sparse["text"]) == (True, "engaged", "It is 1234.")
    assert sparse["kept_tokens"] < sparse["total_tokens"] == dense["kept_tokens"]
    assert sparse["keep_rate"] == sparse["kept_tokens"] / sparse["total_tokens"]
    assert said["speedup"] == dense["timings"]["ttft"] / sparse["timings"]["ttft"]
    assert said["ceiling"] == 2.5
    assert "stand-in" in said["main_description"]
    assert len(said["selection"]["chunk_scores"]) == said["selection"]["num_chunks"]
    assert len(said["selection"]["kept_chunk_ids"]) == said["selection"]["kept_chunks"]
    assert said["settings"]["config"]["keep_rate"] == 0.3
    assert said["settings"]["sampling"]["max_tokens"] == 128


def test_json_of_a_prompt_read_whole(command):
    _, out, _ = command("short", "--json")
    said = json.loads(out)
    assert said["selection"]["chunk_scores"] is None
    assert said["selection"]["reason"] == Reason.SHORT_PROMPT
    assert (said["speedup"], said["compile_seconds"]) == (None, None)


def test_map_is_on_stderr_and_page_in_its_file(command, tmp_path):
    page = tmp_path / "map.html"
    status, out, err = command(TEXT, "--map", "--html", page, "--keep-rate", "0.3", "--quiet")
    assert (status, out) == (0, "It is 1234.\n")
    assert "tokens dropped ..." in err
    assert "█" in err
    assert "main prefill" not in err, "quiet leaves out the table and keeps what was asked for"
    assert "The code is 1234." in page.read_text(encoding="utf-8")


# Where the prompt comes from


def test_prompt_from_a_file(command, fake, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfA na\xc3\xafve text.\n\n")
    command("--file", file, "--question", "Why?")
    command("--file", file, "--raw")
    assert fake.calls[0].prompt == [{"role": "user", "content": "A naïve text.\n\nWhy?"}]
    assert fake.calls[1].prompt == "A naïve text.\n\n", "raw text stays as it is, but for a byte-order mark"


@pytest.mark.parametrize("argv", [["-"], ["--file", "-"]])
def test_prompt_from_stdin(command, fake, monkeypatch, argv):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Über alles".encode())))
    assert command(*argv)[0] == 0
    assert fake.calls[0].prompt == [{"role": "user", "content": "Über alles"}]


@pytest.mark.parametrize("wrap", [lambda messages: messages, lambda messages: {"messages": messages, "model": "x"}])
def test_prompt_from_a_chat(command, fake, tmp_path, wrap):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(wrap(messages)))
    command("--chat", file, "--question", "Why?")
    assert fake.calls[0].prompt == [*messages, {"role": "user", "content": "Why?"}]


def test_raw_and_models_without_a_template_continue_the_text(command, fake):
    command("--prompt", "Once", "--raw", "--question", "Why?")
    fake.tokenizer.has_chat_template = False
    command("Once", "--question", "Why?")
    assert [call.prompt for call in fake.calls] == ["Once\n\nWhy?"] * 2


# What goes wrong


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of: a prompt as argument, --prompt, --file, --chat; nothing was given"),
        (["a", "--prompt", "b"], "a prompt as argument and --prompt was given"),
        ([" \n"], "prompt=' \\n' is not allowed"),
        (["a", "--dense", "--compare"], "--dense and --compare"),
        (["--chat", "x", "--raw"], "--raw and --chat"),
        (["--file", "/no/such/file"], "file='/no/such/file' is not allowed"),
        (["--file", "/"], "file='/' is not allowed"),
        (["a", "--html", "/no/such/folder/map.html"], "html='/no/such/folder/map.html' is not allowed"),
        (["a", "--html", "/"], "html='/' is not allowed"),
        (["a", "--keep-rate", "1.5"], "error: keep_rate=1.5 is not allowed: keep_rate must be a number above 0"),
        (["a", "--keep-rate", "nan"], "keep_rate=nan is not allowed"),
        (
            ["a", "--keep-rate", "much"],
            "--keep-rate: no type matching FLOAT|{auto} could be instantiated from ['much']",
        ),
        (["a", "--pool-width", "4"], "pool_width=4 is not allowed"),
        (["a", "--max-tokens", "0"], "error: max_tokens=0 is not allowed"),
        (["a", "--mode", "fast"], "'fast' for argument '--mode'. Expected one of ('product', 'paper')"),
        (["a", "--no-such-flag"], "Unrecognized options: --no-such-flag"),
        (["a", "b"], "Unrecognized options: b"),
    ],
)
def test_bad_input_is_one_line_and_status_two(command, fake, argv, said):
    status, out, err = command(*argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert said in err
    assert not fake.calls


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"not json", "Expecting value"),
        (b"[]", "there are no messages"),
        (b"{}", "there are no messages"),
        (b'[{"role": "user"}]', "message 0 has no role or no content"),
        (b'[{"role": "user", "content": ""}, 3]', "message 1 has no role or no content"),
        (b"\xff\xfe", "byte 0 is not"),
    ],
)
def test_bad_chats(command, tmp_path, data, said):
    file = tmp_path / "chat.json"
    file.write_bytes(data)
    status, out, err = command("--chat", file)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert str(file) in err
    assert said in err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_wrong_flags_are_told_apart_from_their_frame(fake, monkeypatch, encoding):
    """tyro draws its frame with what stdout can show."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(ArgumentError) as wrong:
        script.parse(["a", "--keep-rate", "1.5"])
    assert str(wrong.value) == (
        "keep_rate=1.5 is not allowed: keep_rate must be a number above 0 and up to 1, or 'auto' "
        "(--help lists all flags)"
    )


def test_errors_of_the_package_are_one_line(command, monkeypatch):
    def broken(**options):
        raise CheckpointError("model.safetensors: tensor x\x1b[2J\nis short")

    monkeypatch.setattr(specprefill_jax, "SpecPrefill", SimpleNamespace(from_pretrained=broken), raising=False)
    status, out, err = command("a", "--quiet")
    assert (status, out) == (2, "")
    assert err == "error: model.safetensors: tensor x\u241b[2J is short\n"


def test_faults_in_the_program_are_not_hidden(command, fake, monkeypatch):
    monkeypatch.setattr(fake, "stream", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("a")


@pytest.mark.parametrize("after", [0, 2])
def test_ctrl_c_leaves_what_was_produced(command, fake, after):
    fake.interrupt_after = after
    status, out, err = command(TEXT)
    assert (status, out) == (130, "".join(fake.answer[:after]) + "\n")
    assert err.endswith("interrupted\n")
    assert "total" not in err


def test_ctrl_c_with_json(command, fake):
    fake.interrupt_after = 2
    status, out, _ = command(TEXT, "--json")
    assert (status, json.loads(out)) == (130, {"interrupted": True, "text": "It is "})


def test_ctrl_c_while_loading(command, monkeypatch):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(specprefill_jax, "SpecPrefill", SimpleNamespace(from_pretrained=interrupted), raising=False)
    status, out, err = command("a", "--quiet")
    assert (status, out, err) == (130, "", "interrupted before the first token\n")


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as left:
        script.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--keep-rate", "--look-ahead", "--pool-width", "--chunk-size", "--mode", "--dense", "--compare"):
        assert flag in shown
    assert "a stand-in for a larger" in " ".join(shown.replace("│", " ").split())


def test_a_broken_pipe_is_quiet(tmp_path):
    """As a process of its own, its answer written into a pipe that nobody reads any more."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_generate as t, specprefill_jax\n"
        "model = t.Fake()\nmodel.answer = ['word '] * 50_000\n"
        "specprefill_jax.SpecPrefill = t.SimpleNamespace(from_pretrained=lambda **_: model)\n"
        "sys.exit(t.script.main(['text', '--quiet']))\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, driver], stdout=write, stderr=subprocess.PIPE, check=False, timeout=120)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


# With real models


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The tiny pair with a tokenizer of bytes and a chat template."""
    root = tmp_path_factory.mktemp("pair")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: 5 + at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for name in ("tiny-main", "tiny-draft"):
        shutil.copytree(ROOT / "tests" / "data" / "checkpoints" / name, root / name)
        backend.save(str(root / name / "tokenizer.json"))
        template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
        (root / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ["--main", str(root / "tiny-main"), "--speculator", str(root / "tiny-draft")]


def test_the_whole_way(pair, capsys, tmp_path):
    page = tmp_path / "map.html"
    flags = "--keep-rate 0.5 --min-predicted-gain 0 --max-tokens 8 --ignore-eos --compare --json --map"
    argv = [TEXT, "--question", "Why?", *pair, *flags.split(), "--html", str(page)]
    assert script.main(argv) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    tokens = len(f"[user]{TEXT}\n\nWhy?[answer]")
    dense, sparse = report["runs"]
    assert (dense["reason"], dense["kept_tokens"], dense["total_tokens"]) == ("disabled", tokens, tokens)
    assert (sparse["reason"], sparse["total_tokens"]) == ("engaged", tokens)
    assert len(report["selection"]["kept_chunk_ids"]) == math.ceil(math.ceil(tokens / 32) / 2)
    for run in (dense, sparse):
        assert run["new_tokens"] == 8
        phases = [run["timings"][name] for name in PHASES]
        assert sum(phases) == pytest.approx(run["wall_seconds"], rel=0.02, abs=0.02)
    assert report["compile_seconds"] > 0
    assert report["ceiling"] > 0
    assert "tokens dropped ..." in said.err
    assert "The main model read" in page.read_text(encoding="utf-8")


def test_bad_models_and_prompts_are_one_line(pair, capsys, tmp_path):
    for argv, said in (
        ([TEXT, "--main", str(tmp_path), "--speculator", str(tmp_path)], str(tmp_path)),
        ([TEXT, *pair, "--dtype", "float8"], "dtype='float8' is not allowed"),
        (["word " * 2000, *pair], "context"),
        ([TEXT, *pair, "--speculator-layers", "9"], "speculator_layers=9 is not allowed"),
        ([TEXT, *pair, "--devices", "99"], "devices=99 is not allowed: devices must be from 1 to the"),
    ):
        assert script.main([*argv, "--quiet"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1, shown.err
        assert said in shown.err
