"""The inside of one run of code that nobody has read: fences itself in, then runs unit tests.

A script for a fresh interpreter, started by `sandbox.py` with `-P -s -S -B`; it gets its task as marshalled
dictionary on standard input and writes lines into the report file. It imports nothing but what an
interpreter has loaded anyway before the folder with the patched modules is first on `sys.path`: what
stood in `sys.modules` by then could not be shadowed any more. So it knows nothing of onlinerl.

The fences, each where the kernel offers it (Linux):

- files: Landlock (5.13 on): reads below the interpreter and the system's folders, writes below the
  run's own folder, nothing else. Without privileges, and nothing inside can take it back.
- network: a network namespace without any device; else Landlock's TCP rules (6.7 on).
- processes: a PID namespace, whose end is the end of all that runs in it, and RLIMIT_NPROC. That limit does
  not bind root, so root becomes an unused user who may still read everything that Landlock lets through.
- rlimits: CPU seconds, address space and file size per process, open files, no core files.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys
import time
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 4, 8, 38
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
# The same numbers on every architecture (they are newer than the unification of the tables).
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 1 | 4 | 8  # execute, read a file, list a folder
_WRITE_FILE = 2 | 4
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/dev")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


def main() -> None:
    """Fence, run, report. The exit status is 0 when a report was written, 128 + signal after a signal."""
    task: dict[str, Any] = marshal.loads(sys.stdin.buffer.read())
    report = os.open(task["report"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fences = _namespaces()
    # Two forks: the first process of a PID namespace is its init, for which signals without a handler do
    # nothing, so the tests run in the second. When init ends, the kernel ends all that is left.
    init = os.fork()
    if init:
        _end_like(init)
    worker = os.fork()
    if worker:
        _end_like(worker)
    if _drop_root(task["user"], task["work"]):
        fences.append("user")
    _limit(task)
    fences += _landlock((*_SYSTEM, sys.base_prefix, sys.prefix, task["lib"]), task["work"])
    me = os.getpid()
    os.chdir(task["work"])
    sys.path.insert(0, task["lib"])
    lines = _trace(task) if task["trace"] else _run(task["tests"])
    if os.getpid() != me:
        os._exit(1)  # a child that the tested code left behind comes this way too
    text = "\n".join([task["nonce"], " ".join(fences), *lines])
    os.write(report, text.encode("utf-8", "backslashreplace"))
    os._exit(0)  # threads and exit handlers of the tested code have no say


def _end_like(child: int) -> None:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


# ------------------------------------------------------------------------------------------- fences


def _namespaces() -> list[str]:
    """Leave the machine's network and its processes; [] where that is not allowed."""
    root = os.geteuid() == 0
    flags = _NEW_PID | _NEW_NET | (0 if root else _NEW_USER)
    user, group = os.geteuid(), os.getegid()
    if _LIBC.unshare(flags) != 0:
        return []
    if not root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return ["pids", "net"]


def _drop_root(user: int, work: str) -> bool:
    """Become `user`, who owns `work` and may read what root may. True when RLIMIT_NPROC binds from now on."""
    if os.geteuid() != 0:
        return True
    try:
        os.chown(work, user, user)
        _LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    except OSError:  # a container whose root is not allowed to, or that has no such user
        return False
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    reading = 1 << _CAP_DAC_READ_SEARCH
    _LIBC.capset(header, struct.pack("=6I", reading, reading, 0, 0, 0, 0))
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # /proc/self is the process's own again
    return True


def _limit(task: dict[str, Any]) -> None:
    for which, value in (
        (resource.RLIMIT_CPU, task["cpu"]),
        (resource.RLIMIT_AS, task["memory"]),
        (resource.RLIMIT_FSIZE, task["file_size"]),
        (resource.RLIMIT_NPROC, task["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second between SIGXCPU, which tells the parent what happened, and the kill.
        resource.setrlimit(which, (value, value + 1 if which == resource.RLIMIT_CPU else value))


def _landlock(readable: tuple[str, ...], writable: str) -> list[str]:
    """Read below `readable`, everything below `writable`, nothing else. Returns what holds from now on."""
    abi = _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return []
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    rules = struct.pack("=Q", every)
    if abi >= 4:
        rules += struct.pack("=Q", 3)  # bind and connect TCP
    if abi >= 6:
        rules += struct.pack("=Q", 2)  # no signals to processes outside
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return []
    allowed = [(path, _READ) for path in readable]
    allowed += [(path, _WRITE_FILE | (every & (1 << 14))) for path in _DEVICES]
    allowed.append((writable, every))
    for path, rights in allowed:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights & every, place), 0)
        os.close(place)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
        return []
    os.close(ruleset)
    return ["files", "tcp"] if abi >= 4 else ["files"]


# -------------------------------------------------------------------------------------------- tests


def _run(tests: list[str]) -> list[str]:
    """`passed`, or `failed`, the test's name, and the last line of its traceback."""
    try:
        import unittest

        suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromName(name) for name in tests)
        expected = suite.countTestCases()
        result = unittest.TestResult()
        result.failfast = True
        suite.run(result)
    except BaseException as error:  # noqa: BLE001  the boundary: whatever the code under test does is a verdict
        return ["failed", "", f"{type(error).__name__}: {error}"]
    for test, text in (*result.errors, *result.failures):
        return ["failed", str(test.id()), _reason(text)]
    if result.skipped or result.expectedFailures or result.unexpectedSuccesses:
        return ["failed", "", "a test was skipped, or failed as expected"]
    if result.testsRun != expected or expected < len(tests):
        return ["failed", "", f"{result.testsRun} of {expected} tests ran"]
    return ["passed"]


def _reason(traceback: str) -> str:
    """`AssertionError: 1 != 2`: of the last exception of a chain the line after its frames."""
    last = traceback.rpartition("Traceback (most recent call last):")[2].split("\n")
    return next((line for line in last if line.strip() and not line.startswith(" ")), "")


def _trace(task: dict[str, Any]) -> list[str]:
    """Run each test of the modules `tests` by itself; one line of those that pass within `slow` seconds
    of CPU: name, seconds, and for each file of `trace` the lines that ran (`place in trace:line,line,…`).

    CPU seconds, so that a busy machine finds the same tests; four times as many by the clock, against
    sleepers.
    """
    import signal
    import threading
    import unittest

    seen: dict[str, set[int]] = {path: set() for path in task["trace"]}

    def enter(frame: Any, event: str, argument: Any) -> Any:
        lines = seen.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def step(frame: Any, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return step

        return step

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    found = []
    for test in _cases(unittest.defaultTestLoader.loadTestsFromNames(task["tests"])):
        for lines in seen.values():
            lines.clear()
        result = unittest.TestResult()
        start = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, 4 * task["slow"])
        try:
            threading.settrace(enter)
            sys.settrace(enter)
            unittest.TestSuite([test]).run(result)
        except TimeoutError:
            continue
        finally:
            sys.settrace(None)
            threading.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
        took = time.process_time() - start
        if took > task["slow"]:
            continue
        if not result.wasSuccessful() or result.testsRun != 1 or result.skipped or result.expectedFailures:
            continue
        places = " ".join(
            f"{place}:" + ",".join(map(str, sorted(seen[path])))
            for place, path in enumerate(task["trace"])
            if seen[path]
        )
        if places:
            found.append(f"{test.id()}\t{took:.3f}\t{places}")
    return ["passed", *found]


def _cases(suite: Any) -> Any:
    for test in suite:
        if hasattr(test, "countTestCases") and hasattr(test, "__iter__"):
            yield from _cases(test)
        else:
            yield test


if __name__ == "__main__":
    main()
