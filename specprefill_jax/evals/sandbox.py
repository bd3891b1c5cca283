"""Runs a program that a model wrote, in a process of its own that is kept from doing harm.

Isolated (the default; Linux, as root or where users may make namespaces), the kernel guarantees that a program

- sees no network, no process and no file of the machine but the interpreter's, /usr and the libraries, all read-only;
- writes into an empty folder in memory that is gone afterwards, so many bytes at most;
- has no privileges (as root it is run as the user `nobody`), no core file, and limits of CPU time, address space, file
  size and open files for each of its processes, and of their number;
- ends with every process that it started, at the latest when its time is up.

Without isolation (`isolated=False`, Linux, not as root) only the limits hold, and the processes of its own session are
ended: it can reach the network and whatever its user can read or write. Nothing else is promised in either case: a flaw
of the kernel is not kept from anybody, and several processes together may use several times the memory of one.

A program has the standard library alone: no installed package can be imported.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGXCPU, Signals

from specprefill_jax.errors import SpecPrefillError

_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    cpu_seconds: int = 10
    """Of each process."""
    wall_seconds: float = 60.0
    """Of the whole, the interpreter's start included."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    file_bytes: int = 16 << 20
    """Size of each file."""
    disk_bytes: int = 64 << 20
    """All files together; isolated only."""
    processes: int = 32
    """Processes and threads together; not isolated, those of the same user elsewhere count, too."""


@dataclass(frozen=True)
class Verdict:
    """How a program ended."""

    passed: bool
    """Whether it reached its end: no exception, no exit before, no limit."""
    how: str
    """Such as "passed", "AssertionError", "exit before the end", "CPU time", "wall time", "killed by SIGSEGV"."""


def run_program(source: str, limits: Limits | None = None, *, isolated: bool = True) -> Verdict:
    """Run a Python program to its end, or to its limits.

    Args:
        source: the program.
        limits: None for the default ones.
        isolated: False where the system allows no namespaces; see above for what is lost.

    Raises:
        SpecPrefillError: this system cannot run programs so.
        OSError: the sandbox itself failed, which says nothing of the program.
    """
    if sys.platform != "linux":
        raise SpecPrefillError(f"programs of a model are run on Linux only, and this is {sys.platform}")
    limits = limits or Limits()
    given = json.dumps({"source": source, "limits": asdict(limits), "isolated": isolated})
    with tempfile.TemporaryDirectory(prefix="specprefill-sandbox-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_CHILD)],
            input=given,
            cwd=folder,
            env={},
            capture_output=True,
            text=True,
            timeout=limits.wall_seconds + 60,  # it keeps the time itself
            start_new_session=True,  # Ctrl-C ends the evaluation, and the pipe's end ends this
        )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise OSError(f"the sandbox failed: {done.stderr.strip()[-500:]}") from None
    if "unsupported" in found:
        raise SpecPrefillError(_unsupported(found["unsupported"], isolated))
    if found["ended"] == 125 and found["said"].startswith("the sandbox failed"):
        raise OSError(found["said"])
    return Verdict(found["passed"], "passed" if found["passed"] else _how(found["ended"], found["said"]))


def check(*, isolated: bool = True) -> None:
    """Raise what `run_program` would where programs cannot be run so, or where even an empty one does not pass."""
    found = run_program("", isolated=isolated)
    if not found.passed:
        raise SpecPrefillError(f"the sandbox does not work: an empty program ended with {found.how}")


def _unsupported(why: str, isolated: bool) -> str:
    if not isolated:
        return f"programs cannot be run here without isolation: {why}; run as another user"
    return (
        f"this system does not let a program be isolated ({why}): run as root, or allow users to make namespaces, or "
        "give up isolation (--without-isolation), and the program can reach the network and all that its user can"
    )


_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")


def _how(ended: int | None, said: str) -> str:
    if ended is None:
        return "wall time"
    if ended == 0:
        return "exit before the end"
    if ended == -SIGXCPU:
        return "CPU time"
    if ended < 0:
        return f"killed by {Signals(-ended).name}"
    # The last line of a traceback; a message may have lines of its own, so the name is looked for from the end.
    for line in reversed(said.splitlines()):
        known = _EXCEPTION.match(line)
        if known and (known[1].endswith(("Error", "Exception", "Exit", "Interrupt", "Warning", "Iteration", "Group"))):
            return known[1]
    return f"exit status {ended}"
