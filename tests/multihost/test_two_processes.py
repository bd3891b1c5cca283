"""Two local processes with four CPU devices each: they answer as one, and neither outlives the other."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from agreement import goldens

from specprefill_jax.sharding import distributed

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4",
}
PATIENCE = 600
"""Seconds that a slow machine may take for what takes a few."""
SECONDS = 60
"""Seconds that a slow machine may take to notice a loss; on a quiet one it is a tenth of a second."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Pair:
    """The two processes; what each has said lies in files."""

    def __init__(self, folder: Path, what: str, *more: tuple[str, ...]):
        port = free_port()
        self.logs = [(folder / f"out{i}", folder / f"err{i}") for i in (0, 1)]
        self.processes = []
        for i, (out, err) in enumerate(self.logs):
            given = [word.format(port=port) for word in more[i]] if more else []
            command = [sys.executable, "-u", str(WORKER), str(port), str(i), what, *given]
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=stdout, stderr=stderr)
            self.processes.append(process)

    def out(self, index: int) -> list[str]:
        """Lines on stdout; Gloo's own, which it writes there, left out."""
        said = self.logs[index][0].read_text(encoding="utf-8")
        return [line for line in said.splitlines() if not line.startswith("[Gloo]")]

    def err(self, index: int) -> str:
        return self.logs[index][1].read_text(encoding="utf-8", errors="replace")

    def status(self, index: int, seconds: float = PATIENCE) -> int:
        return self.processes[index].wait(timeout=seconds)

    def until_ready(self) -> None:
        limit = time.monotonic() + PATIENCE
        while not all("ready" in self.out(i) for i in (0, 1)):
            ended = [process.poll() for process in self.processes]
            assert ended == [None, None], [self.err(i) for i in (0, 1)]
            assert time.monotonic() < limit
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path):
    """Starts a pair; one whose port somebody else took in between is started again."""
    pairs = []

    def start(what: str, *more: tuple[str, ...]) -> Pair:
        for attempt in range(3):
            folder = tmp_path / f"{what}{attempt}"
            folder.mkdir()
            pairs.append(Pair(folder, what, *more))
            time.sleep(3)
            if "address already in use" not in pairs[-1].err(0).lower():
                break
            pairs[-1].end()
        return pairs[-1]

    yield start
    for one in pairs:
        one.end()


def test_both_answer_as_the_golden_does(pair):
    both = pair("answer")
    assert [both.status(i) for i in (0, 1)] == [0, 0], both.err(0) + both.err(1)
    first, second = (json.loads(both.out(i)[-1]) for i in (0, 1))
    known = next(np.load(case) for case in goldens() if case.stem == "tiny_17")
    assert first == second
    assert first["kept"] == known["kept"].tolist()
    assert first["tokens"] == known["tokens"].tolist()
    assert len(first["drawn"]) == 8


def test_what_process_0_knows_both_know(pair):
    both = pair("agree")
    assert [both.status(i) for i in (0, 1)] == [0, 0], both.err(0) + both.err(1)
    assert [both.out(i) for i in (0, 1)] == [["agreed"]] * 2


@pytest.mark.parametrize("what", ["busy", "idle"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other(pair, what, lost):
    both = pair(what)
    both.until_ready()
    both.processes[lost].send_signal(signal.SIGKILL)
    assert both.status(1 - lost, SECONDS) not in (0, -signal.SIGKILL)
    # Where process 0 is lost JAX may be first to say so: it ends this process as fast as it can.
    said = both.err(1 - lost)
    assert f"error: process {lost} of 2 was lost: its connection closed; process {1 - lost} ends, too\n" in said or (
        lost == 0 and "the leader task was preempted/died/restarted unexpectedly" in said
    )


def test_an_exception_in_one_process_ends_the_other(pair):
    both = pair("fail")
    assert both.status(1) == distributed.EXIT_STATUS
    assert "KeyError: 'a bug'" in both.err(1)
    assert both.status(0, SECONDS) == distributed.EXIT_STATUS
    assert "error: process 1 of 2 failed: its own output says why; process 0 ends, too\n" in both.err(0)


FLAGS = ("--coordinator", "127.0.0.1:{port}", "--num-processes", "2", "--process-id")
TEXT = "The boat is green. The code is 1234. The river is slow."


def test_generate_asks_both_what_process_0_was_asked(pair):
    both = pair("generate", (*FLAGS, "0", TEXT, "--max-tokens", "7"), (*FLAGS, "1", "something else"))
    assert [both.status(i) for i in (0, 1)] == [0, 0], both.err(0) + both.err(1)
    assert both.logs[0][0].read_text(encoding="utf-8") == "It is 1234.\n", "not even Gloo writes to stdout"
    assert both.logs[1][0].read_text(encoding="utf-8") == ""
    asked = f"asked {[{'role': 'user', 'content': TEXT}]} 7\n"
    assert asked in both.err(0)
    assert asked in both.err(1)
    assert "first token" in both.err(0)
    assert "first token" not in both.err(1)


def test_generate_ends_both_on_what_is_wrong_with_process_0s_prompt(pair):
    both = pair("generate", (*FLAGS, "0", "--file", "/no/such/file"), (*FLAGS, "1", TEXT))
    assert [both.status(i) for i in (0, 1)] == [2, 2], both.err(0) + both.err(1)
    for i in (0, 1):
        assert "error: file='/no/such/file' is not allowed: file must be a readable file" in both.err(i)


# What is wrong before anything starts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("h:1", None, None), "num_processes=None is not allowed: num_processes must be given with coordinator: all"),
        (("h:1", 2, None), "process_id=None is not allowed: process_id must be given with coordinator and num_proc"),
        ((None, 2, 1), "coordinator=None is not allowed: coordinator must be given with num_processes and process_id"),
        (("h:1", 2, 2), "process_id=2 is not allowed: process_id must be an integer from 0 to 1"),
        (("h:1", 2, -1), "process_id=-1 is not allowed"),
        (("h:1", 0, 0), "num_processes=0 is not allowed"),
        (("h", 2, 0), "coordinator='h' is not allowed: coordinator must be the \"host:port\" of process 0"),
        ((":1", 2, 0), "coordinator=':1' is not allowed"),
        (("h:0", 2, 0), "coordinator='h:0' is not allowed"),
        (("h:65536", 2, 0), "coordinator='h:65536' is not allowed"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match="is not allowed") as error:
        distributed.start(*arguments)
    assert said in str(error.value)


def test_nobody_there():
    """Alone as process 1, alone as process 0, and where JAX finds no cluster; side by side, since each has to wait."""
    port = free_port()
    code = "from specprefill_jax.sharding.distributed import start; start({})"
    cases = {
        f"'127.0.0.1:{port}', 2, 1, timeout_seconds=3": (
            f"coordinator='127.0.0.1:{port}' is not allowed: within 3 s process 0 could not be reached there"
        ),
        f"'127.0.0.1:{free_port()}', 2, 0, timeout_seconds=3": "within 3 s not all of 2 processes came",
        "": "coordinator, num_processes and process_id must be given where JAX finds no Slurm, Open MPI",
    }
    clusters = ("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR")
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(clusters)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(arguments)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for arguments in cases
    ]
    for process, said in zip(started, cases.values(), strict=True):
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert f"specprefill_jax.errors.ArgumentError: {'' if said.startswith('coord') else 'coordinator='}" in err
        assert said in err
