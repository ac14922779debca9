"""Runs unit tests against patched modules in a process of its own, with limits, and says how it ended.

What is run was written by a model, so it may do anything: loop, fork, eat memory, delete files, end the
process with a friendly exit status. `cell.py` is the inside and lists the fences; here are the limits, the
clock, and the verdict. A run passed only when the process wrote the word that it was given at its start
together with `passed`: an early `os._exit(0)` is a crash.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from onlinerl.datasets.fim import standard_library
from onlinerl.errors import SettingsError

CELL = Path(__file__).with_name("cell.py")
_USERS = range(65520, 65534)
"""User ids that no system hands out (systemd's list of ids): runs of root each take one, because
RLIMIT_NPROC counts per user."""
_LONGEST_REPORT = 16 * 1024 * 1024
_PARTING = 10.0
"""Seconds to wait at most for the processes of a killed run to be gone."""


class Ending(StrEnum):
    """How a run ended."""

    PASSED = "passed"
    FAILED = "failed"
    """A test failed, or the module could not be imported."""
    SYNTAX = "syntax error"
    """The file does not parse; nothing was run."""
    TIMEOUT = "timeout"
    """CPU seconds or the clock ran out."""
    CRASH = "crash"
    """The process ended without a word: a signal, an exit of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Made by hand, eaten by `run_tests`."""

    cpu: int = 3
    """CPU seconds of one process."""
    wall: float = 30.0
    """Seconds by the clock, everything included; far more than `cpu`, since the machine may be busy."""
    memory: int = 1024**3
    """Bytes of address space of one process."""
    file_size: int = 32 * 1024**2
    """Bytes of one file."""
    processes: int = 48
    """Processes and threads of one run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and why. Made by `run_tests`."""

    ending: Ending
    reason: str = ""
    """The last line of the first failure, or the signal; "" when it passed."""
    test: str = ""
    """Which test failed; "" where there is none to name."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A test and the lines that it ran. Made by `trace_tests`."""

    test: str
    seconds: float
    lines: Mapping[str, frozenset[int]]
    """By file, relative to the standard library."""


def fences() -> frozenset[str]:
    """What this machine's kernel lets a run be kept from: `files` (writes outside of its folder), `net`
    (any network) or at least `tcp`, `pids` (outliving its end), `user` (more than `Limits.processes`)."""
    return _fences()


@functools.cache
def _fences() -> frozenset[str]:
    _, report = _start(lib={}, tests=(), limits=Limits(), trace=())
    return frozenset(report[0].split()) if report else frozenset()


def require_fences() -> frozenset[str]:
    """`fences()`. Raises SettingsError where nothing would keep a run from deleting files."""
    found = fences()
    if "files" not in found:
        raise SettingsError(
            "this machine cannot keep code that a model wrote from writing to files (Landlock is missing: "
            "Linux 5.13 or newer has it); run this elsewhere, or with --unfenced in a machine to throw away"
        )
    return found


def run_tests(
    patches: Mapping[str, str], tests: Sequence[str], limits: Limits, *, fenced: bool = True
) -> Outcome:
    """Run `tests` (`test.test_json.test_decode.TestPyDecode.test_x`) in a fresh interpreter, in which
    the files of the standard library named by `patches` (relative paths) have these texts.

    Raises SettingsError where the machine cannot fence the run and `fenced` asks for it.
    """
    if fenced:
        require_fences()
    for path, text in patches.items():
        problem = syntax_error(text)
        if problem:
            return Outcome(Ending.SYNTAX, problem, path)
    code, report = _start(lib=patches, tests=tests, limits=limits, trace=())
    if report:
        verdict, *rest = report[1:]
        if verdict == "passed":
            return Outcome(Ending.PASSED)
        test, reason = (*rest, "", "")[:2]
        return Outcome(Ending.FAILED, reason[:300], test)
    if code is None:
        return Outcome(Ending.TIMEOUT, f"{limits.wall:g} s by the clock")
    if code == 128 + signal.SIGXCPU:
        return Outcome(Ending.TIMEOUT, f"{limits.cpu} s of CPU")
    if code > 128:
        return Outcome(Ending.CRASH, f"signal {code - 128}")
    return Outcome(Ending.CRASH, f"the process ended by itself with status {code}")


def trace_tests(modules: Sequence[str], files: Sequence[str], *, slow: float, wall: float) -> list[Traced]:
    """Run every test of `modules` by itself and note which lines of `files` (relative to the standard
    library) it ran. Tests that do not pass in the cell, or take more than `slow` seconds, are left out."""
    root = standard_library()
    limits = Limits(cpu=int(wall), wall=wall)
    _, report = _start(
        lib={}, tests=modules, limits=limits, trace=[str(root / file) for file in files], slow=slow
    )
    found = []
    for line in report[2:]:
        test, seconds, places = line.split("\t")
        lines = {}
        for place in places.split():
            number, _, ran = place.partition(":")
            lines[files[int(number)]] = frozenset(map(int, ran.split(",")))
        found.append(Traced(test, float(seconds), lines))
    return found


def syntax_error(text: str) -> str:
    """Why `text` is no Python module; "" when it is one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<completion>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        # ValueError: a null byte, a lone surrogate; MemoryError: brackets nested too deeply for the parser
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------------------------------------------------ processes


def _start(
    *, lib: Mapping[str, str], tests: Sequence[str], limits: Limits, trace: Sequence[str], slow: float = 0.0
) -> tuple[int | None, list[str]]:
    """Exit status (None: the clock ran out) and the lines of the report, [] when there is none to trust:
    fences first, then the verdict."""
    with TemporaryDirectory(prefix="onlinerl-cell-") as folder, _user() as user:
        root = Path(folder)
        root.chmod(0o755)  # another user works in it
        (root / "work").mkdir()
        _shadow(root / "lib", lib)
        word = secrets.token_hex(16)
        work = str(root / "work")
        task = {
            "nonce": word,
            "report": str(root / "report"),
            "lib": str(root / "lib"),
            "work": work,
            "user": user,
            "tests": list(tests),
            "trace": list(trace),
            "slow": slow,
            "cpu": limits.cpu,
            "memory": limits.memory,
            "file_size": limits.file_size,
            "processes": limits.processes,
        }
        environment = {
            "HOME": work,
            "TMPDIR": work,
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
        }
        alive, held = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", str(CELL)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=(held,),
            )
        finally:
            os.close(held)
        try:
            process.communicate(marshal.dumps(task), timeout=limits.wall)
        except subprocess.TimeoutExpired:
            return None, []
        finally:
            # What the PID namespace did not end already; the group's number is not free while one is left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # A killed namespace dies a moment later: every process of the run holds the pipe's other end.
            end = time.monotonic() + _PARTING
            while select.select([alive], [], [], max(0.0, end - time.monotonic()))[0] and os.read(
                alive, 4096
            ):
                pass  # somebody wrote into it
            os.close(alive)
        return process.returncode, _read(root / "report", word)


def _shadow(lib: Path, patches: Mapping[str, str]) -> None:
    """Fill `lib` with the patched modules; of a package all of it, the other files as links."""
    lib.mkdir()
    for top in {Path(path).parts[0] for path in patches}:
        original = standard_library() / top
        if not original.is_dir():
            continue
        for folder, folders, files in os.walk(original):
            folders[:] = [name for name in folders if name not in ("test", "tests")]
            here = lib / top / Path(folder).relative_to(original)
            here.mkdir()
            for name in files:
                (here / name).symlink_to(Path(folder) / name)
    for path, text in patches.items():
        file = lib / path
        file.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogatepass")


_idle_users = list(_USERS)
_users_changed = threading.Condition()


@contextlib.contextmanager
def _user() -> Iterator[int]:
    """A user id that no other run of this process has."""
    with _users_changed:
        while not _idle_users:
            _users_changed.wait()
        user = _idle_users.pop()
    try:
        yield user
    finally:
        with _users_changed:
            _idle_users.append(user)
            _users_changed.notify()


def _read(report: Path, word: str) -> list[str]:
    """The report's lines after the word; [] when there is none, or another word."""
    try:
        with report.open("rb") as file:
            lines = file.read(_LONGEST_REPORT).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    return lines[1:] if lines[0] == word else []
