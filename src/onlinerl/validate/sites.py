"""Sites: holes in functions of the standard library that the library's own unit tests notice.

A hole is in a package that the base model never saw, and its tests are those that run the hidden line. It
is kept only when the line matters and the tests notice: with the author's text they pass, and with every
filling by nothing, `pass` or `None` that parses they fail. So filling in nothing has a pass rate of 0 and
the author has 1.

Sites belong to the very sources that they were found in: a list holds the hash of each file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import Progress

from onlinerl.datasets.fim import (
    LONGEST_MIDDLE,
    FimPrompt,
    Kind,
    is_test,
    prompt_at,
    span,
    standard_library,
)
from onlinerl.errors import SettingsError
from onlinerl.validate.sandbox import (
    Ending,
    Limits,
    Traced,
    require_fences,
    run_tests,
    syntax_error,
    trace_tests,
)

SITES = Path(__file__).with_name("sites.json")
"""The verified list that comes with onlinerl; it names the Python that it is for."""
SUBJECTS: Mapping[tuple[str, ...], tuple[str, ...]] = MappingProxyType(
    {
        ("argparse.py",): ("test.test_argparse",),
        ("asyncio/locks.py",): ("test.test_asyncio.test_locks",),
        ("asyncio/queues.py",): ("test.test_asyncio.test_queues",),
        ("collections/__init__.py",): (
            "test.test_collections",
            "test.test_ordered_dict",
            "test.test_userdict",
            "test.test_userlist",
            "test.test_userstring",
        ),
        ("configparser.py",): ("test.test_configparser",),
        ("csv.py",): ("test.test_csv",),
        ("dataclasses.py",): ("test.test_dataclasses",),
        (
            "email/_encoded_words.py",
            "email/_header_value_parser.py",
            "email/_parseaddr.py",
            "email/base64mime.py",
            "email/charset.py",
            "email/contentmanager.py",
            "email/feedparser.py",
            "email/generator.py",
            "email/header.py",
            "email/headerregistry.py",
            "email/iterators.py",
            "email/message.py",
            "email/quoprimime.py",
            "email/utils.py",
        ): (
            "test.test_email.test__encoded_words",
            "test.test_email.test__header_value_parser",
            "test.test_email.test_contentmanager",
            "test.test_email.test_email",
            "test.test_email.test_generator",
            "test.test_email.test_headerregistry",
            "test.test_email.test_message",
            "test.test_email.test_utils",
        ),
        ("heapq.py",): ("test.test_heapq",),
        ("http/client.py",): ("test.test_httplib",),
        ("http/cookiejar.py",): ("test.test_http_cookiejar",),
        ("http/cookies.py",): ("test.test_http_cookies",),
        ("json/__init__.py", "json/decoder.py", "json/encoder.py", "json/scanner.py"): ("test.test_json",),
        ("logging/__init__.py", "logging/config.py", "logging/handlers.py"): ("test.test_logging",),
        ("mailbox.py",): ("test.test_mailbox",),
        ("pathlib.py",): ("test.test_pathlib",),
        ("shutil.py",): ("test.test_shutil",),
        ("statistics.py",): ("test.test_statistics",),
        ("textwrap.py",): ("test.test_textwrap",),
        ("urllib/parse.py",): ("test.test_urlparse",),
        ("urllib/request.py",): ("test.test_urllib", "test.test_urllib2"),
        ("urllib/robotparser.py",): ("test.test_robotparser",),
        ("wsgiref/handlers.py", "wsgiref/headers.py", "wsgiref/util.py"): ("test.test_wsgiref",),
        ("xml/dom/expatbuilder.py", "xml/dom/minidom.py"): ("test.test_minidom",),
        ("xml/etree/ElementInclude.py", "xml/etree/ElementTree.py"): ("test.test_xml_etree",),
        ("xml/sax/expatreader.py", "xml/sax/saxutils.py", "xml/sax/xmlreader.py"): ("test.test_sax",),
        ("zipfile.py",): ("test.test_zipfile",),
    }
)
"""Files of held-out packages, and the modules with their tests. Left out: what needs a network, many
processes, a terminal or seconds to set up (tarfile), what runs in C (asyncio's tasks), and `unittest` and
`importlib`, which run the tests."""

TESTS = 12
"""Tests of a site at most."""
SLOW = 0.4
"""Seconds of CPU; a slower test (while it is traced) is not used."""
SHORTEST = 4
"""Characters of a middle at least: closing brackets alone say little."""
_OPENERS, _CLOSERS = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class Site:
    """A hole in a function and the tests that see it. Made by `find_sites`, eaten by `evaluate`."""

    path: str
    """Relative to the standard library, with forward slashes."""
    start: int
    """First hidden character of the file's text."""
    end: int
    """One behind the last."""
    kind: Kind
    tests: tuple[str, ...]
    """Names as unittest loads them."""

    @property
    def id(self) -> str:
        """Unique within one source."""
        return f"{self.path}:{self.start}-{self.end}"

    @staticmethod
    def example() -> Site:
        """A small one, for tests and documentation."""
        return Site("textwrap.py", 10, 20, Kind.LINE, ("test.test_textwrap.WrapTestCase.test_simple",))


@dataclass(frozen=True, slots=True)
class SiteList:
    """Verified sites of one Python. Made by `find_sites` and `load`."""

    python: str
    """The version that they were found in, such as 3.11.7."""
    sources: Mapping[str, str]
    """SHA-256 of each file's text, by path."""
    sites: tuple[Site, ...]


# --------------------------------------------------------------------------------------- finding sites


def find_sites(
    count: int = 200,
    *,
    seed: int = 0,
    subjects: Mapping[tuple[str, ...], tuple[str, ...]] = SUBJECTS,
    jobs: int = 2,
    limits: Limits | None = None,
    progress: bool = False,
) -> SiteList:
    """Find up to `count` sites and verify them, half of them in files of the test split, evenly over the
    files. The same arguments and sources give the same sites, as far as the tests themselves are steady.

    Raises SettingsError when this Python has no tests, or the machine no fences.
    """
    require_tests()
    require_fences()
    limits = limits or Limits()
    root = standard_library()
    texts = {path: text for files in subjects for path in files if (text := _source(root / path)) is not None}
    with (
        ThreadPoolExecutor(jobs) as pool,
        Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar,
    ):
        tracing = bar.add_task("tracing tests", total=len(subjects))

        def trace(subject: tuple[tuple[str, ...], tuple[str, ...]]) -> list[Traced]:
            files = [path for path in subject[0] if path in texts]
            found = trace_tests(subject[1], files, slow=SLOW, wall=120.0) if files else []
            bar.advance(tracing)
            return found

        traced = list(pool.map(trace, subjects.items()))
        sources = {
            path: _verified(path, texts[path], tests, seed, limits)
            for files, tests in zip(subjects, traced, strict=True)
            for path in files
            if path in texts
        }
        found: list[Site] = []
        unseen = {path: source for path, source in sources.items() if is_test(path)}
        seen = {path: source for path, source in sources.items() if not is_test(path)}
        verifying = bar.add_task("verifying sites", total=count)
        for side, goal in ((unseen, count // 2), (seen, count)):
            alive = dict(side)
            while alive and len(found) < goal:
                # Next to each other the files find their next site; then they are taken in order.
                nexts = list(pool.map(lambda source: next(source, None), alive.values()))
                alive = {
                    path: source
                    for (path, source), site in zip(alive.items(), nexts, strict=True)
                    if site is not None
                }
                found += [site for site in nexts if site is not None][: goal - len(found)]
                bar.update(verifying, completed=len(found))
    used = sorted({site.path for site in found})
    return SiteList(
        python_version(),
        {path: sha256(texts[path]) for path in used},
        tuple(sorted(found, key=lambda site: (site.path, site.start))),
    )


def _verified(path: str, text: str, traced: Sequence[Traced], seed: int, limits: Limits) -> Iterator[Site]:
    """The file's sites that hold what the words at the top promise, none over another."""
    taken: list[Site] = []
    for site in candidates(path, text, traced, seed):
        if any(site.start < other.end and other.start < site.end for other in taken):
            continue
        fillings = nonsense(text, site.start, site.end)
        if not fillings or run_tests({path: text}, site.tests, limits).ending is not Ending.PASSED:
            continue
        if all(
            run_tests({path: fill(text, site, one)}, site.tests, limits).ending is not Ending.PASSED
            for one in fillings
        ):
            taken.append(site)
            yield site


def candidates(path: str, text: str, traced: Sequence[Traced], seed: int) -> Iterator[Site]:
    """Holes in statements of functions that tests ran, at most one a line, in an order of their own."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    ran: defaultdict[int, list[str]] = defaultdict(list)
    for one in traced:
        for number in one.lines.get(path, ()):
            ran[number].append(one.test)
    statements = _statements(ast.parse(text))
    numbers = sorted(statements)
    random.Random(f"{seed}/{path}").shuffle(numbers)
    for number in numbers:
        # A generator for each line: what tests there are must not move the holes of other lines.
        rng = random.Random(f"{seed}/{path}/{number}")
        first, last = statements[number]
        tests = sorted({test for line in range(first, last + 1) for test in ran[line]})
        hidden = span(lines, number - 1, rng.choice(list(Kind)), rng)
        chosen = _spread(tests, rng)
        if not chosen or hidden is None or not lines[number - 1].strip():
            continue
        column, end_line = hidden
        start, end = starts[number - 1] + column, starts[end_line] + len(lines[end_line].rstrip())
        middle = text[start:end]
        if middle.startswith("#") or len(middle.strip()) < SHORTEST or len(middle) > LONGEST_MIDDLE:
            continue
        kind = (
            Kind.LINES
            if end_line > number - 1
            else Kind.REST
            if text[:start].split("\n")[-1].strip()
            else Kind.LINE
        )
        yield Site(path, start, end, kind, tuple(chosen))


def _statements(tree: ast.Module) -> dict[int, tuple[int, int]]:
    """First and last line of the statement, or of its head, by each of its lines; functions' bodies only,
    without docstrings and the heads of inner functions."""
    found: dict[int, tuple[int, int]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for outer in function.body:
            for node in ast.walk(outer):
                if not isinstance(node, ast.stmt) or isinstance(
                    node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                ):
                    continue
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    continue
                body = getattr(node, "body", None)
                last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
                for line in range(node.lineno, last + 1):
                    found[line] = (node.lineno, last)
    return found


def _spread(tests: Sequence[str], rng: random.Random) -> list[str]:
    """At most TESTS of them, from as many classes as there are."""
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        classes[test.rpartition(".")[0]].append(test)
    groups = list(classes.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    chosen: list[str] = []
    while groups and len(chosen) < TESTS:
        chosen += [group.pop() for group in groups][: TESTS - len(chosen)]
        groups = [group for group in groups if group]
    return sorted(chosen)


def nonsense(text: str, start: int, end: int) -> list[str]:
    """Fillings of `text[start:end]` that say nothing, yet parse, and are not what the author wrote.

    >>> nonsense("def f(x):\\n    return max(x, 0)\\n", 25, 30)
    ['None)', '0)']
    """
    middle = text[start:end].strip()
    open_brackets: list[str] = []
    closing = ""
    for character in middle:
        if character in _OPENERS:
            open_brackets.append(character)
        elif character in _CLOSERS:
            if open_brackets:
                open_brackets.pop()
            else:
                closing += character
    colon = ":" if middle.endswith(":") else ""
    word = middle.split(" ")[0].rstrip(":")
    tries = ["", "pass", f"None{closing}{colon}", f"0{closing}{colon}"]
    if colon:
        heads = {
            "if": ("if False:", "if True:"),
            "elif": ("elif False:", "elif True:"),
            "while": ("while False:",),
            "for": ("for _ in ():",),
            "except": ("except ():",),
            "with": ("if True:",),
        }
        tries += heads.get(word, ())
    if word == "return":
        tries.append("return")
    found: list[str] = []
    trees = {_tree(text)}
    for one in tries:
        filled = text[:start] + one + text[end:]
        if syntax_error(filled):
            continue
        tree = _tree(filled)
        if tree not in trees:
            trees.add(tree)
            found.append(one)
    return found


def _tree(text: str) -> str:
    return ast.dump(ast.parse(text))


def fill(text: str, site: Site, completion: str) -> str:
    """The file with `completion` in the hole."""
    return text[: site.start] + completion + text[site.end :]


# ------------------------------------------------------------------------------------------- the list


def save(path: Path, found: SiteList) -> None:
    """Write a list as JSON; names of tests stand once a file."""
    files: dict[str, Any] = {}
    for file, digest in found.sources.items():
        inside = [site for site in found.sites if site.path == file]
        names = sorted({test for site in inside for test in site.tests})
        places = {name: place for place, name in enumerate(names)}
        files[file] = {
            "sha256": digest,
            "tests": names,
            "sites": [
                [site.start, site.end, site.kind.value, [places[test] for test in site.tests]]
                for site in inside
            ],
        }
    write_json(path, {"python": found.python, "files": files})


def load(path: Path = SITES) -> SiteList:
    """Read a list. Raises SettingsError when it is none."""
    rows = read_json(path)
    try:
        found = [
            Site(file, start, end, Kind(kind), tuple(one["tests"][place] for place in tests))
            for file, one in rows["files"].items()
            for start, end, kind, tests in one["sites"]
        ]
        sources = {file: one["sha256"] for file, one in rows["files"].items()}
        return SiteList(rows["python"], sources, tuple(found))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SettingsError(f"{path} is no list of sites: {error!r}") from None


def usable(found: SiteList) -> tuple[dict[str, str], list[Site], Counter[str]]:
    """Texts by path, sites whose source is here as it was, and how many are not and why."""
    texts: dict[str, str] = {}
    kept: list[Site] = []
    skipped: Counter[str] = Counter()
    for site in found.sites:
        if site.path not in texts:
            texts[site.path] = _source(standard_library() / site.path) or ""
        if sha256(texts[site.path]) == found.sources[site.path]:
            kept.append(site)
        else:
            skipped["another source" if texts[site.path] else "no such file"] += 1
    return texts, kept, skipped


def prompts(found: SiteList, *, characters: int = 2048) -> dict[str, FimPrompt]:
    """What a model has to complete, by site id; sites whose source differs are left out."""
    texts, kept, _ = usable(found)
    return {
        site.id: prompt_at(site.path, texts[site.path], site.start, site.end, characters) for site in kept
    }


# --------------------------------------------------------------------------------------------- files


def require_tests() -> None:
    """Raise SettingsError when this Python has no tests."""
    if not (standard_library() / "test" / "support").is_dir():
        raise SettingsError(
            f"this Python ({sys.executable}, {python_version()}) comes without the standard library's tests: "
            "take one built from source, or install them (Debian: libpython3-testsuite)"
        )


def _source(file: Path) -> str | None:
    """Text of a file as it stands there; None when there is none."""
    try:
        # Line ends stay what they are: offsets and the hash count them.
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None


def sha256(text: str) -> str:
    """Hash of a source."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises SettingsError."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file. Raises SettingsError."""
    try:
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from None
