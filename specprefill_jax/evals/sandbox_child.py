"""Runs one untrusted program under limits and tells how it ended; a script of its own, started by `sandbox`.

Standard library alone, and one thread: it forks. Standard input: a JSON object (`isolated`, `source`, `limits`).
Standard output: one of `unsupported`, or of `passed`, `ended` and `said`.

    this process       in its namespaces' parent; holds the clock
      init             the first process of the process namespace: when it ends, the kernel ends all others in there
        the program    with limits, without privileges
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

NOBODY = 65534
"""What a program runs as where this script runs as root."""

SAID = 2000
"""Bytes of the program's standard error that are kept: the last ones."""

READABLE = ("/usr", "/lib", "/lib64", "/nix", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
"""What a program sees of the machine's files, beside its interpreter; all of it read-only."""

_READ_ONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38


def main() -> None:
    """Read what to run, run it, and say how it went."""
    spec = json.load(sys.stdin)
    limits, isolated = spec["limits"], spec["isolated"]
    null = os.open("/dev/null", os.O_RDWR)
    folder = os.getcwd()
    python = os.path.realpath(sys.executable)
    try:
        if isolated:
            _isolate(folder, python, limits["disk_bytes"])
            folder = "/"
        elif os.getuid() == 0:
            raise OSError("as root nothing would limit the number of processes")
    except OSError as error:
        print(json.dumps({"unsupported": str(error)}))
        return
    work = os.path.join(folder, "work")
    os.mkdir(work)
    os.chmod(work, 0o777)
    mark = os.urandom(16).hex()
    (said, say), (passed, pass_on), (status, report) = os.pipe(), os.pipe(), os.pipe()
    program = os.path.join(folder, "program.py")
    with open(program, "w", encoding="utf-8", errors="surrogatepass") as file:
        # Only a program that gets here has passed: neither sys.exit nor os._exit before does.
        file.write(f'{spec["source"]}\n__import__("os").write({pass_on}, b"{mark}"), __import__("os")._exit(0)\n')
    os.chmod(program, 0o644)
    started = time.monotonic()
    init = os.fork()
    if not init:
        os.setsid()
        _prctl(_PDEATHSIG, signal.SIGKILL)
        child = os.fork()
        if not child:
            _become([python, "-P", "-s", "-S", program], work, limits, null, say, pass_on)
        _report(child, report)
    os.close(report)
    os.close(say)
    ended, tail = _watch(status, said, started + limits["wall_seconds"])
    os.kill(init, signal.SIGKILL)
    if not isolated:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(init, signal.SIGKILL)
    os.waitpid(init, 0)  # and, in a process namespace, all that it holds
    os.set_blocking(passed, False)
    try:
        marked = os.read(passed, len(mark)) == mark.encode()
    except BlockingIOError:
        marked = False
    print(json.dumps({"passed": marked, "ended": ended, "said": tail.decode("utf-8", "replace")}))


def _isolate(folder: str, python: str, disk_bytes: int) -> None:
    """Own namespaces, and a root that holds the interpreter and nothing that can be written; OSError if not allowed."""
    user, group = os.getuid(), os.getgid()
    flags = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    os.unshare(flags | (os.CLONE_NEWUSER if user else 0))
    if user:
        # No other user is known in there; this one has no privileges once the program begins.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, f"size={disk_bytes},nr_inodes=4096,mode=755")
    seen: list[str] = []
    for path in (*READABLE, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(python))):
        if os.path.exists(path) and not any(path == other or path.startswith(other + "/") for other in seen):
            seen.append(path)
            _show(path, folder + path)
    os.chroot(folder)


def _show(path: str, target: str) -> None:
    """Let `target` be `path`, read-only."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        with open(target, "w"):
            pass
    _mount(path, target, None, _BIND | _REC)
    # What a mount forbids cannot be taken back in a user namespace: not to repeat it would be refused.
    kept = os.statvfs(target).f_flag & (_NODEV | _NOEXEC)
    _mount(None, target, None, _BIND | _REMOUNT | _READ_ONLY | _NOSUID | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(*texts, ctypes.c_ulong(flags), None if data is None else data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), zero, zero, zero)


def _become(command: list[str], work: str, limits: dict[str, Any], null: int, say: int, pass_on: int) -> None:
    """Become the program; never returns."""
    try:
        os.chdir(work)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _prctl(_NO_NEW_PRIVS, 1)
        cpu = limits["cpu_seconds"]
        for kind, soft, hard in (
            (resource.RLIMIT_CPU, cpu, cpu + 1),
            (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
            (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
            (resource.RLIMIT_NOFILE, 64, 64),
            (resource.RLIMIT_CORE, 0, 0),
        ):
            _, most = resource.getrlimit(kind)
            known = most != resource.RLIM_INFINITY
            resource.setrlimit(kind, (min(soft, most), min(hard, most)) if known else (soft, hard))
        for number, file in enumerate((null, null, say)):
            os.dup2(file, number)
        os.set_inheritable(pass_on, True)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": work,
            "TMPDIR": work,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the same program ends the same way every time, as far as that depends on us
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        os.execve(command[0], command, environment)
    except BaseException as why:
        os.write(say, f"the sandbox failed: {why!r}".encode())
    finally:
        os._exit(125)


def _report(child: int, report: int) -> None:
    """As the first process of a namespace: take in what ends, and say how the program did; never returns."""
    try:
        while True:
            ended, status = os.wait()
            if ended == child:
                os.write(report, str(os.waitstatus_to_exitcode(status)).encode())
                break
    finally:
        os._exit(0)


def _watch(status: int, said: int, until: float) -> tuple[int | None, bytes]:
    """How the program ended (None: it had not by `until`), and the last of what it said."""
    tail, waiting = b"", [status, said]
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select(waiting, [], [], left)
        if said in ready:
            piece = os.read(said, 65536)
            tail = (tail + piece)[-SAID:]
            if not piece:
                waiting.remove(said)
        elif status in ready:
            code = os.read(status, 16)
            return int(code) if code else None, tail
    return None, tail


if __name__ == "__main__":
    main()
