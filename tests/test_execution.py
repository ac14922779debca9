"""Code that a model wrote is run by the library's own tests, contained, and judged by what it does."""

from __future__ import annotations

import doctest
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from platform import python_version

import pytest

from onlinerl.datasets.fim import FimPrompt, Kind, standard_library
from onlinerl.errors import SettingsError
from onlinerl.validate import sandbox
from onlinerl.validate import sites as sites_module
from onlinerl.validate.estimates import t_quantile
from onlinerl.validate.execution import difference, evaluate, main, rate
from onlinerl.validate.sandbox import Ending, Limits, run_tests, trace_tests
from onlinerl.validate.sites import (
    Site,
    SiteList,
    fill,
    find_sites,
    load,
    nonsense,
    prompts,
    save,
    sha256,
    usable,
)

HAS_TESTS = (standard_library() / "test" / "support").is_dir()
runs_code = pytest.mark.skipif(
    not (HAS_TESTS and "files" in sandbox.fences()), reason="no tests in this Python, or no Landlock here"
)
QUICK = Limits(cpu=1, wall=20)
TEXT = (standard_library() / "textwrap.py").read_text("utf-8")
HIDDEN = "w = TextWrapper(width=width, max_lines=1, **kwargs)"
START = TEXT.index(HIDDEN)
SITE = Site(
    "textwrap.py",
    START,
    START + len(HIDDEN),
    Kind.LINE,
    ("test.test_textwrap.ShortenTestCase.test_simple", "test.test_textwrap.ShortenTestCase.test_whitespace"),
)


def small(chosen: Sequence[Site] = (SITE,)) -> SiteList:
    return SiteList(python_version(), {"textwrap.py": sha256(TEXT)}, tuple(chosen))


def run(completion: str, limits: Limits = QUICK) -> sandbox.Outcome:
    return run_tests({"textwrap.py": fill(TEXT, SITE, completion)}, SITE.tests, limits)


# ------------------------------------------------------------------------------------------- the cell


@runs_code
@pytest.mark.parametrize(
    ("completion", "ending", "reason"),
    [
        (HIDDEN, Ending.PASSED, ""),
        ("w = TextWrapper(width, max_lines=0 + 1, **kwargs)", Ending.PASSED, ""),
        ("pass", Ending.FAILED, "NameError"),
        ("w = (", Ending.SYNTAX, "SyntaxError"),
        ("w = '\0'", Ending.SYNTAX, "null"),
        ("w = " + "(" * 5000, Ending.SYNTAX, ""),
        ("w = TextWrapper(width=width, max_lines=2, **kwargs)", Ending.FAILED, "AssertionError"),
        ("raise SystemExit(0)", Ending.FAILED, "SystemExit"),
        ("import unittest; raise unittest.SkipTest", Ending.FAILED, "skipped"),
        ("import os; os._exit(0)", Ending.CRASH, "status 0"),
        ("import os; os.abort()", Ending.CRASH, "signal 6"),
        ("import ctypes; ctypes.string_at(0)", Ending.CRASH, "signal 11"),
        ("w = bytearray(4 << 30)", Ending.FAILED, "MemoryError"),
        ("open('big', 'wb').write(bytes(64 << 20))", Ending.FAILED, "File too large"),
        ("while True: pass", Ending.TIMEOUT, "CPU"),
    ],
)
def test_how_runs_end(completion: str, ending: Ending, reason: str) -> None:
    outcome = run(completion)
    assert outcome.ending is ending, outcome
    assert reason in outcome.reason


@runs_code
def test_who_only_waits_is_stopped_by_the_clock() -> None:
    outcome = run("import time; time.sleep(60)", Limits(cpu=1, wall=2))
    assert outcome.ending is Ending.TIMEOUT
    assert "clock" in outcome.reason


@runs_code
@pytest.mark.skipif("user" not in sandbox.fences(), reason="processes cannot be limited here")
def test_a_fork_bomb_stays_small_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    body = "import os\n    while True:\n        try: os.fork()\n        except OSError: pass"
    counted = "import os\n    made = 0\n    for _ in range(200): made += os.fork() > 0"
    assert "BlockingIOError" in run(counted).reason
    assert run(body, Limits(cpu=1, wall=3)).ending is Ending.TIMEOUT
    alive = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = os.fsencode(tmp_path) in (process / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is somebody else's
        alive += [process.name] if mine else []
    assert alive == []
    assert list(tmp_path.iterdir()) == []


@runs_code
def test_files_outside_are_out_of_reach(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    tmp_path.chmod(0o777)
    precious.chmod(0o666)
    for code in (
        f"import os; os.unlink({str(precious)!r})",
        f"open({str(precious)!r}, 'w').close()",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w').close()",
        f"open({str(precious)!r}).read()",
        f"open({sandbox.__file__!r}, 'a').close()",
    ):
        assert "PermissionError" in run(code).reason, code
    assert precious.read_text() == "kept"
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]
    assert run(f"{HIDDEN}; open('mine', 'w').write('x')").ending is Ending.PASSED


@runs_code
@pytest.mark.skipif(not sandbox.fences() & {"net", "tcp"}, reason="the network cannot be fenced off here")
def test_there_is_no_network() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert outcome.ending is Ending.FAILED
    assert "Error" in outcome.reason


@runs_code
def test_the_parent_and_strangers_cannot_be_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        for target in (os.getpid(), stranger.pid):
            assert "Error" in run(f"import os; os.kill({target}, 9)").reason
        assert stranger.poll() is None
        assert stranger.stdin is not None
        stranger.stdin.close()


@runs_code
def test_a_forged_report_is_none() -> None:
    code = (
        "import os\n    for fd in range(3, 20):\n        try: os.write(fd, b'x\\nfences\\npassed')\n"
        "        except OSError: pass\n    os._exit(0)"
    )
    assert run(code).ending is Ending.CRASH


@runs_code
def test_packages_are_shadowed_whole() -> None:
    path = "json/decoder.py"
    text = (standard_library() / path).read_text("utf-8")
    test = ("test.test_json.test_decode.TestPyDecode.test_decimal",)
    assert run_tests({path: text}, test, QUICK).ending is Ending.PASSED
    broken = run_tests({path: text + "\nraise KeyError('patched')\n"}, test, QUICK)
    assert broken.ending is Ending.FAILED
    assert "patched" in broken.reason


@runs_code
def test_traces_name_the_lines_that_ran() -> None:
    traced = trace_tests(["test.test_textwrap"], ["textwrap.py"], slow=0.5, wall=60)
    number = TEXT[:START].count("\n") + 1
    ran = {one.test for one in traced if number in one.lines["textwrap.py"]}
    assert set(SITE.tests) <= ran
    assert ran
    assert all("Shorten" in test for test in ran)


# ---------------------------------------------------------------------------------------------- sites


@runs_code
def test_found_sites_pass_with_the_author_and_fail_with_nothing() -> None:
    subjects: dict[tuple[str, ...], tuple[str, ...]] = {("textwrap.py",): ("test.test_textwrap",)}
    found = find_sites(2, subjects=subjects, limits=QUICK)
    assert found == find_sites(2, subjects=subjects, limits=QUICK, seed=0, jobs=1)
    assert found.python == python_version()
    assert len(found.sites) == 2
    spans = sorted((site.start, site.end) for site in found.sites)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    author = {site.id: [TEXT[site.start : site.end]] for site in found.sites}
    # The same meaning in other words, so that it is really run: trailing space.
    worded = {name: [text + " "] for name, (text,) in author.items()}
    for completions in (author, worded):
        result = evaluate(found, completions)
        assert result.pass_at_1.mean == 1
        assert result.exact == 2
    nothing = {site.id: nonsense(TEXT, site.start, site.end) for site in found.sites}
    assert all(nothing.values())
    result = evaluate(found, nothing)
    assert result.pass_at_1.mean == 0
    assert result.endings["passed"] == 0


@runs_code
def test_completions_are_counted_by_what_became_of_them() -> None:
    other = replace(SITE, tests=SITE.tests[:1], start=SITE.start + 4)
    made = [HIDDEN, HIDDEN + "  # as it was", "pass", "w = (", "while True: pass", ""]
    result = evaluate(small([SITE, other]), {SITE.id: made, "gone.py:1-2": ["x"]}, limits=QUICK)
    assert result.endings == {"passed": 2, "failed": 2, "syntax error": 1, "timeout": 1, "crash": 0}
    assert result.passed == {SITE.id: pytest.approx(2 / 6)}
    assert (result.exact, result.empty) == (1, 1)
    assert result.skipped == {"no completion": 1}
    assert result.by_module["textwrap.py"].sites == 1
    assert "files" in result.fences
    json.dumps(result.report())


@runs_code
def test_a_callable_is_asked_once_with_the_prompts() -> None:
    asked: list[FimPrompt] = []

    def complete(chosen: Sequence[FimPrompt]) -> list[list[str]]:
        asked.extend(chosen)
        return [[one.middle] for one in chosen]

    assert evaluate(small(), complete).pass_at_1.mean == 1
    (prompt,) = asked
    assert prompt == prompts(small())[SITE.id]
    assert prompt.middle == HIDDEN
    assert TEXT.count(prompt.prefix + prompt.middle + prompt.suffix) == 1
    assert len(prompt.prefix) + len(prompt.suffix) <= 2048


@runs_code
def test_sites_that_do_not_hold_here_are_skipped_and_counted() -> None:
    unstable = replace(SITE, end=SITE.end - 1, tests=("test.test_textwrap.Gone.test_gone",))
    moved = replace(SITE, path="heapq.py")
    gone = replace(SITE, path="no_such_module.py")
    found = SiteList(
        "0.0", {**small().sources, "heapq.py": "0", "no_such_module.py": "0"}, (SITE, unstable, moved, gone)
    )
    completions = {site.id: ["pass"] for site in found.sites}
    result = evaluate(found, completions, limits=QUICK)
    assert result.skipped == {"another source": 1, "no such file": 1, "its tests fail here": 1}
    assert list(result.passed) == [SITE.id]
    with pytest.raises(SettingsError, match=r"none of the 1 sites .* found in Python 0.0"):
        evaluate(replace(found, sites=(moved,)), completions)


@runs_code
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, asked, made, out = (str(tmp_path / name) for name in ("s.json", "p.jsonl", "c.json", "r.json"))
    save(Path(listed), small())
    assert main(["prompts", "--sites", listed, "--out", asked]) == 0
    rows = [json.loads(line) for line in Path(asked).read_text().splitlines()]
    Path(made).write_text(json.dumps({row["id"]: [row["middle"], "pass"] for row in rows}))
    assert main(["run", "--sites", listed, "--completions", made, "--out", out]) == 0
    assert json.loads(Path(out).read_text())["pass_at_1"]["mean"] == 0.5
    assert "pass@1 0.500" in capsys.readouterr().out
    Path(made).write_text('{"a": "b"}')
    assert main(["run", "--sites", listed, "--completions", made, "--out", out]) == 2
    assert "object of lists of strings" in capsys.readouterr().err


def test_a_python_without_tests_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites_module, "standard_library", lambda: tmp_path)
    for call in (lambda: find_sites(1), lambda: evaluate(small(), {})):
        with pytest.raises(SettingsError, match="comes without the standard library's tests"):
            call()


def test_a_machine_without_fences_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_fences", lambda: frozenset({"net"}))
    with pytest.raises(SettingsError, match="Landlock is missing"):
        run("pass")


def test_lists_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "sites.json"
    other = replace(SITE, start=SITE.start + 4, kind=Kind.REST, tests=SITE.tests[1:])
    save(file, small([SITE, other]))
    assert load(file) == small([SITE, other])
    for text, said in (("{}", "no list of sites"), ("[", "not JSON")):
        file.write_text(text)
        with pytest.raises(SettingsError, match=said):
            load(file)


def test_the_list_that_comes_along_is_of_its_python() -> None:
    found = load()
    assert len(found.sites) >= 180
    assert len(found.sources) >= 25
    assert len({site.id for site in found.sites}) == len(found.sites)
    if python_version() == found.python:
        _, kept, skipped = usable(found)
        assert not skipped
        assert len(kept) == len(found.sites)
        assert {site.kind for site in kept} == set(Kind)


@pytest.mark.slow  # some 250 interpreters start: two minutes on two cores
@pytest.mark.timeout(1200)
@runs_code
def test_nothing_passes_nowhere_and_the_authors_pass_everywhere() -> None:
    found = load()
    if python_version() != found.python:
        pytest.skip("the list is for another Python")
    texts, kept, _ = usable(found)
    nothing = {site.id: nonsense(texts[site.path], site.start, site.end)[-1:] for site in kept}
    result = evaluate(found, nothing)
    # Sites whose tests fail here with the author's text are skipped.
    assert sum(result.skipped.values()) <= len(found.sites) * 0.05
    assert set(result.passed.values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "hidden", "expected"),
    [
        ("def f(x):\n    return max(x, 0)\n", "x, 0)", ["None)", "0)"]),
        ("def f(x):\n    if x:\n        return 1\n", "if x:", ["if False:", "if True:"]),
        ("def f(x):\n    for y in x:\n        print(y)\n", "for y in x:", ["for _ in ():"]),
        ("def f(x):\n    return None\n", "return None", ["pass", "0", "return"]),
        ("def f(x):\n    pass\n", "pass", ["None", "0"]),
        ("def f(x):\n    g(x)\n    h(x)\n", "g(x)\n    h(x)", ["pass", "None", "0"]),
    ],
)
def test_nonsense_parses_and_differs(text: str, hidden: str, expected: list[str]) -> None:
    start = text.index(hidden)
    found = nonsense(text, start, start + len(hidden))
    for one in found:
        compile(text[:start] + one + text[start + len(hidden) :], "", "exec")
    assert [one for one in found if one in expected] == expected


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(sites_module)
    assert result.attempted
    assert not result.failed


# ---------------------------------------------------------------------------------------------- rates


def test_students_quantiles() -> None:
    # tables of Student's t, two-sided 95 %
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 100: 1.984}
    for freedom, value in known.items():
        assert t_quantile(freedom) == pytest.approx(value, abs=0.0005)


def test_intervals_of_rates() -> None:
    # Wilson's for 0 of 10 and 5 of 10 (Brown, Cai and DasGupta 2001)
    assert (rate([0] * 10, ["a"] * 10).low, rate([0] * 10, ["a"] * 10).high) == pytest.approx(
        (0, 0.2775), abs=1e-4
    )
    half = rate([1, 0] * 5, ["a"] * 10)
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    # Modules that agree within themselves are worth one value each, up to the few there are.
    clusters = [name for name in "abcdefghij" for _ in range(6)]
    agreeing = rate([float(name in "abc") for name in clusters], clusters)
    n = 9 * (1.959964 / t_quantile(9)) ** 2  # variance of the mean is p(1−p)/(G−1)
    z2 = 1.959964**2 / n
    centre, half_width = (
        (0.3 + z2 / 2) / (1 + z2),
        1.959964 / (1 + z2) * math.sqrt(0.21 / n + z2 / (4 * n)),
    )
    assert (agreeing.low, agreeing.high) == pytest.approx(
        (centre - half_width, centre + half_width), abs=1e-4
    )
    mixed = rate([1, 1, 0, 0, 0, 0] * 10, clusters)
    assert mixed.high - mixed.low < agreeing.high - agreeing.low
    assert rate([], []).sites == 0


def test_differences_are_paired_and_clustered() -> None:
    before = {f"{name}.py:{n}-9": float(n == 0) for name in "abcd" for n in range(5)}
    after = {key: value + (0.2 if key[0] in "ab" else 0.0) for key, value in before.items()}
    mean, low, high = difference(before, {**after, "other.py:1-2": 1.0})
    assert mean == pytest.approx(0.1)
    # Cluster means 0.2, 0.2, 0, 0: standard error sqrt(4/3 · Σ(5·0.1)² / 20²) = 0.0577; t(3) = 3.182
    assert high - mean == pytest.approx(3.182 * 0.05774, rel=0.01)
    assert mean - low == pytest.approx(high - mean)
    same = difference(before, before)
    assert same == (0, 0, 0)
    with pytest.raises(ValueError, match="two modules"):
        difference({"a.py:1-2": 1.0}, {"a.py:1-2": 0.0})
