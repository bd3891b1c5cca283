"""The sandbox: what programs come to that end, do not end, or try what they must not.

With isolation where the system allows it. Without it only as another user than root, and then that is tested, too.
"""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals import sandbox
from specprefill_jax.evals.sandbox import Limits, Verdict, check, run_program

FEW = Limits(cpu_seconds=2, wall_seconds=120, memory_bytes=1 << 29, file_bytes=1 << 20, disk_bytes=1 << 22)
PASSED = Verdict(True, "passed")


def works(isolated: bool) -> str | None:
    """Why programs cannot be run so here; None where they can."""
    try:
        check(isolated=isolated)
    except SpecPrefillError as error:
        return str(error)
    return None


REFUSED = {isolated: works(isolated) for isolated in (True, False)}


WAYS = [isolated for isolated, why in REFUSED.items() if why is None]


@pytest.fixture(params=WAYS, ids=["isolated" if way else "limits-alone" for way in WAYS])
def isolated(request) -> bool:
    return request.param


@pytest.fixture
def alone() -> None:
    """Where the kernel refuses namespaces there is nothing to test but that it is said, which the next test does."""
    if REFUSED[True]:
        pytest.skip(REFUSED[True])


def test_what_does_not_work_here_is_said():
    if REFUSED[True]:
        assert "does not let a program be isolated" in REFUSED[True]
        assert "run as root, or allow users to make namespaces" in REFUSED[True]
    if os.getuid():
        assert REFUSED[False] is None
    else:
        assert "as root nothing would limit the number of processes" in str(REFUSED[False])


def test_correct_programs_pass(isolated):
    program = "from __future__ import annotations\nimport math, heapq\ndef f(x: Later): return x + 1\nassert f(1) == 2"
    assert run_program(program, FEW, isolated=isolated) == PASSED
    assert run_program("import sys\nprint('out')\nprint('err', file=sys.stderr)", FEW, isolated=isolated) == PASSED
    assert (
        run_program("import os\nassert os.listdir('.') == []\nopen('mine', 'w').write('x')", FEW, isolated=isolated)
        == PASSED
    )
    assert run_program("", FEW, isolated=isolated) == PASSED


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("raise KeyError('a\\nb: c')", "KeyError"),
        ("class Odd(Exception): pass\nraise Odd", "exit status 1"),
        ("def f(:", "SyntaxError"),
        ("x = '''open", "SyntaxError"),
        ("import sys; sys.exit(0)", "exit before the end"),
        ("raise SystemExit", "exit before the end"),
        ("import os; os._exit(0)", "exit before the end"),
        ("import os; os._exit(7)", "exit status 7"),
        ("import sys; sys.exit('text')", "exit status 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("import numpy", "ModuleNotFoundError"),
        ("f = lambda n: f(n + 1)\nf(0)", "RecursionError"),
        ("'\ud800'", "SyntaxError"),
        ("input()", "EOFError"),
    ],
)  # fmt: skip
def test_programs_that_fail(isolated, program, how):
    assert run_program(program, FEW, isolated=isolated) == Verdict(False, how)


def test_an_endless_loop_ends_with_its_cpu_time(isolated):
    limits = Limits(cpu_seconds=1, wall_seconds=60)
    assert run_program("while True: pass", limits, isolated=isolated) == Verdict(False, "CPU time")


def test_a_program_that_sleeps_ends_with_the_clock(isolated):
    limits = Limits(wall_seconds=1)
    assert run_program("import time; time.sleep(600)", limits, isolated=isolated) == Verdict(False, "wall time")


def test_what_a_program_leaves_behind_ends_with_it(isolated):
    program = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], **MORE)"
    # Not isolated, one that begins a session of its own is not found again.
    more = "dict(start_new_session=True)" if isolated else "{}"
    before = processes()
    assert run_program(program.replace("**MORE", f"**{more}"), FEW, isolated=isolated) == PASSED
    while not isolated and processes() - before:  # it has been told to end; pytest's own patience is the limit
        pass
    assert processes() <= before


def processes() -> set[str]:
    """The processes that sleep as the program above asks one to."""
    found = set()
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/cmdline", "rb") as file:
                found |= {number} if b"import time; time.sleep(600)" in file.read() else set()
        except OSError:
            continue
    return found


def test_a_fork_bomb_is_stopped(isolated):
    bomb = "import os\nwhile True: os.fork()"
    found = run_program(bomb, Limits(cpu_seconds=1, wall_seconds=3, processes=8), isolated=isolated)
    assert found in (Verdict(False, "BlockingIOError"), Verdict(False, "wall time"), Verdict(False, "CPU time"))
    count = (
        "import os, time\nn = 0\ntry:\n    while n < 50:\n        if not os.fork():\n            time.sleep(600)\n"
        "        n += 1\nexcept BlockingIOError: pass\nassert n < 8, n"
    )
    assert run_program(count, Limits(wall_seconds=120, processes=8), isolated=isolated) == PASSED


def test_memory_is_bounded(isolated):
    assert run_program("bytearray(1 << 30)", FEW, isolated=isolated) == Verdict(False, "MemoryError")
    grows = run_program("x = []\nwhile True: x.append(' ' * 10**7)", FEW, isolated=isolated)
    assert grows in (Verdict(False, "MemoryError"), Verdict(False, "exit status 1"))  # too little left to say so


def test_output_is_thrown_away_as_it_comes(isolated):
    program = "import os\nfor _ in range(999):\n    print('x' * 9999)\n    os.write(2, b'y' * 9999 + b'\\n')\n1 // 0"
    assert run_program(program, FEW, isolated=isolated) == Verdict(False, "ZeroDivisionError")
    endless = "import os\nwhile True: os.write(2, b'z' * 65536)"
    found = run_program(endless, Limits(cpu_seconds=1, wall_seconds=2), isolated=isolated)
    assert found in (Verdict(False, "wall time"), Verdict(False, "CPU time"))


def test_files_are_bounded(isolated):
    program = "with open('f', 'wb') as file:\n    file.write(bytes(1 << 21))"
    assert run_program(program, FEW, isolated=isolated) == Verdict(False, "OSError")


def test_all_files_together_are_bounded(alone):
    program = "for i in range(100):\n    with open(str(i), 'wb') as file: file.write(bytes(1 << 19))"
    assert run_program(program, FEW) == Verdict(False, "OSError")


def test_an_isolated_program_sees_nothing_of_the_machine(alone, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    program = f"""
import ctypes, os, socket, sys
def refused(do):
    try: do()
    except OSError: return True
folder = os.path.dirname(os.__file__)
assert refused(lambda: open({str(secret)!r}))
assert refused(lambda: open('/etc/passwd'))
assert refused(lambda: os.listdir('/proc'))
assert refused(lambda: open(os.path.join(folder, 'new.py'), 'w'))
assert refused(lambda: open('/usr/new', 'w'))
assert refused(lambda: os.kill({os.getpid()}, 0))
assert refused(lambda: os.kill({os.getppid()}, 0))
assert refused(lambda: os.chroot('.'))
assert refused(lambda: os.unshare(os.CLONE_NEWUSER))
assert refused(lambda: os.setuid(0))
assert os.getuid() != 0
assert os.environ['HOME'] == '/work' and len(os.environ) <= 7
assert {str(tmp_path)!r} not in sys.path
"""
    assert run_program(program, FEW) == PASSED


def test_an_isolated_program_has_no_network(alone):
    """A server of this machine is within reach of this process, and not of the program's."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        there = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        assert run_program(there, FEW) == Verdict(False, "OSError")
        away = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"
        assert run_program(away, FEW) == Verdict(False, "OSError")


def test_the_same_program_ends_the_same_way(isolated):
    """Sets of strings have one order."""
    program = "import os\nos._exit(sum(i * ord(c) for i, c in enumerate({'a', 'b', 'c', 'd', 'e'})) % 100 + 1)"
    assert run_program(program, FEW, isolated=isolated) == run_program(program, FEW, isolated=isolated)


def test_it_runs_beside_other_threads(isolated):
    """Several at once, from threads, keep apart."""
    found = {}

    def run(number: int) -> None:
        found[number] = run_program(
            f"open('{number}', 'w')\nimport os\nassert os.listdir('.') == ['{number}']", FEW, isolated=isolated
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), PASSED)


def answering(monkeypatch, **found):
    done = SimpleNamespace(stdout=json.dumps(found), stderr="")
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *given, **named: done)


def test_refusals_say_what_to_do(monkeypatch):
    answering(monkeypatch, unsupported="Operation not permitted")
    with pytest.raises(SpecPrefillError, match=r"isolated \(Operation not permitted\).* \(--without-isolation\)"):
        run_program("")
    with pytest.raises(SpecPrefillError, match="without isolation: Operation not permitted; run as another user"):
        check(isolated=False)
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(SpecPrefillError, match="on Linux only, and this is darwin"):
        run_program("")


def test_faults_of_the_sandbox_are_not_the_programs(monkeypatch):
    answering(monkeypatch, passed=False, ended=125, said="the sandbox failed: OSError(24, 'x')")
    with pytest.raises(OSError, match="the sandbox failed: OSError"):
        run_program("")
    answering(monkeypatch, passed=False, ended=-11, said="")
    with pytest.raises(SpecPrefillError, match="does not work: an empty program ended with killed by SIGSEGV"):
        check()
    done = SimpleNamespace(stdout="", stderr="Traceback\nNameError: x\n")
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *given, **named: done)
    with pytest.raises(OSError, match="NameError: x"):
        run_program("")


def test_the_child_needs_the_standard_library_alone():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(sorted(m for m in sys.modules if 'specprefill' in m))"
    child = sandbox.__file__.replace("sandbox.py", "sandbox_child.py")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, child], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
