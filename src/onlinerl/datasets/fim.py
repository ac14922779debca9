"""Fill-in-the-middle prompts from any folder of Python, and their files.

A prompt is made by putting the cursor where a person would put it in a real file and hiding what
stands there: the rest of a line, a whole line, or a few lines. Without a folder the source is this
interpreter's standard library, restricted to the packages that the base model never saw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from onlinerl.datasets.sources import generated, minified
from onlinerl.errors import SettingsError

Split = Literal["train", "test", "all"]

HELD_OUT = frozenset(
    (
        "asyncio",
        "email",
        "json",
        "http",
        "logging",
        "unittest",
        "concurrent",
        "multiprocessing",
        "importlib",
        "argparse",
        "dataclasses",
        "statistics",
        "zipfile",
        "tarfile",
        "mailbox",
        "smtplib",
        "configparser",
        "csv",
        "heapq",
        "textwrap",
        "shutil",
        "subprocess",
        "pathlib",
        "urllib",
        "collections",
        "xml",
        "sqlite3",
        "wsgiref",
        "curses",
    )
)
"""Standard-library packages that the embedded model was not trained on (its model card)."""

LARGEST_FILE = 400_000
"""Bytes; larger files are tables or bundles, not what people type."""
MARKERS = re.compile(r"<\|(?:fim_|endoftext|repo_name|file_sep|im_start|im_end)")
"""A file that holds the prompt's own markers would change the prompt's meaning."""
LONGEST_MIDDLE = 400
# The cursor stands before a non-space character and after an opening, a separator, an operator or a space.
_CURSOR = re.compile(r"(?<=[(\[{.,=:+\-*/ ])(?=\S)")


class Kind(StrEnum):
    """What is hidden behind the cursor."""

    REST = "rest"
    """The rest of a line that was begun."""
    LINE = "line"
    """A whole line after its indentation."""
    LINES = "lines"
    """Two to four lines."""


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """A place in a file and what stands there. Made here, eaten by simulated users and judges.

    >>> one = FimPrompt.example()
    >>> one.prefix + one.middle + one.suffix
    'def twice(x):\\n    return 2 * x\\n'
    """

    prefix: str
    suffix: str
    middle: str
    """What the author wrote there."""
    path: str = ""
    """Relative to the folder, with forward slashes; "" when unknown."""
    language: str = ""
    """`python`, or whatever the file it was read from says."""

    @staticmethod
    def example() -> FimPrompt:
        """A small one, for tests and documentation."""
        return FimPrompt("def twice(x):\n    ", "\n", "return 2 * x", "twice.py", "python")


@dataclass(frozen=True, slots=True)
class Collection:
    """Prompts and an account of where they come from. Made by `collect`."""

    prompts: tuple[FimPrompt, ...]
    files: int
    """Files of the split that prompts could be taken from."""
    skipped: Mapping[str, int]
    """Files left out, by reason, over both splits."""


def is_test(path: str, share: float = 0.2) -> bool:
    """True when the file belongs to the test split: decided by a hash of its relative path alone,
    so it stays on its side when other files come and go."""
    digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def collect(
    code: Path | None = None,
    *,
    split: Split = "all",
    limit: int = 1000,
    seed: int = 0,
    characters: int = 2048,
    kinds: Sequence[Kind] = tuple(Kind),
    shortest: int = 1,
    longest: int = LONGEST_MIDDLE,
    test_share: float = 0.2,
    only: Callable[[str], bool] | None = None,
    progress: bool = False,
) -> Collection:
    """Take up to `limit` prompts from the Python files under `code`, evenly over the files.

    `characters` bounds prefix and suffix together, three quarters of it before the cursor; `shortest`
    is the least length of a middle, in characters without surrounding space, and `longest` the greatest with
    it; `only` tells by its relative
    path whether a file may be taken from. The same arguments and files give the same prompts. Raises
    SettingsError when there is nothing to take.
    """
    skipped: Counter[str] = Counter()
    texts: list[tuple[str, str]] = []
    root = standard_library() if code is None else code
    listed = list(_python_files(root, held_out_only=code is None))
    for path in track(
        listed, description="reading code", console=Console(stderr=True), disable=not progress, transient=True
    ):
        name = path.relative_to(root).as_posix()
        if split != "all" and is_test(name, test_share) != (split == "test"):
            continue
        if only is not None and not only(name):
            continue
        text, reason = _read(path)
        if reason:
            skipped[reason] += 1
        else:
            texts.append((name, text))
    if not listed:
        raise SettingsError(f"there is no Python file under {root}: name another folder with --code")
    random.Random(seed).shuffle(texts)
    prompts = round_robin(
        [_places(name, text, seed, characters, tuple(kinds), shortest, longest) for name, text in texts],
        limit,
    )
    if not prompts:
        raise SettingsError(
            f"no prompt could be made from the {len(listed)} Python files under {root} "
            f"(skipped: {dict(skipped) or 'none'}; split: {split})"
        )
    return Collection(tuple(prompts), len(texts), MappingProxyType(dict(skipped)))


def standard_library() -> Path:
    """Folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _python_files(root: Path, *, held_out_only: bool) -> Iterator[Path]:
    if root.is_file() and root.suffix == ".py":
        raise SettingsError(f"{root} is a file: name the folder that holds it")
    if not root.is_dir():
        raise SettingsError(f"the code folder {root} does not exist")
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in {"__pycache__", "node_modules", "site-packages"}
        )
        for name in sorted(files):
            path = here / name
            if path.suffix != ".py" or path.is_symlink():
                continue
            if held_out_only and not _held_out(path.relative_to(root)):
                continue
            yield path


def _held_out(path: Path) -> bool:
    """True for files of the packages in HELD_OUT and for their tests (`test/test_json/…`)."""
    parts = [part.removesuffix(".py") for part in path.parts]
    if parts[0] == "test":
        return len(parts) > 1 and parts[1].removeprefix("test_") in HELD_OUT
    return parts[0] in HELD_OUT


def _read(path: Path) -> tuple[str, str]:
    """Text and "", or "" and the reason to leave the file out."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return "", "huge"
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except OSError:
        return "", "not readable"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        return "", "empty"
    if "\0" in text:
        return "", "binary"
    if minified(text):
        return "", "minified"
    if generated(text):
        return "", "generated"
    if MARKERS.search(text):
        return "", "holds FIM markers"
    return text, ""


def _places(
    name: str, text: str, seed: int, characters: int, kinds: tuple[Kind, ...], shortest: int, longest: int
) -> Iterator[FimPrompt]:
    """Every prompt of a file, in an order of its own: one place a line at most."""
    rng = random.Random(f"{seed}/{name}")
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    numbers = [i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    rng.shuffle(numbers)
    for number in numbers:
        hidden = span(lines, number, rng.choice(kinds), rng)
        if hidden is None:
            continue
        column, last = hidden
        start, end = starts[number] + column, starts[last] + len(lines[last].rstrip())
        middle = text[start:end]
        if len(middle.strip()) < shortest or len(middle) > longest:
            continue
        yield prompt_at(name, text, start, end, characters)


def prompt_at(name: str, text: str, start: int, end: int, characters: int = 2048) -> FimPrompt:
    """The prompt that hides `text[start:end]` of the Python file `name`, cut as `collect` cuts."""
    return cut(FimPrompt(text[:start], text[end:], text[start:end], name, "python"), characters)


def cut(prompt: FimPrompt, characters: int) -> FimPrompt:
    """The window around the cursor: three quarters of it before, and whole lines where it is cut."""
    before = characters * 3 // 4
    return replace(
        prompt, prefix=_tail(prompt.prefix, before), suffix=_head(prompt.suffix, characters - before)
    )


def span(lines: list[str], number: int, kind: Kind, rng: random.Random) -> tuple[int, int] | None:
    """Column of the cursor in line `number` and number of the last hidden line; None where that kind of
    hole cannot be made."""
    line = lines[number].rstrip()
    indentation = len(line) - len(line.lstrip())
    if kind is Kind.REST:
        columns = [match.start() for match in _CURSOR.finditer(line) if match.start() > indentation]
        return (rng.choice(columns), number) if columns else None
    if kind is Kind.LINE:
        return indentation, number
    last, most = number, rng.randint(1, 3)
    while last - number < most and last + 1 < len(lines) and lines[last + 1].strip():
        last += 1
    return (indentation, last) if last > number else None


def _tail(text: str, size: int) -> str:
    """The last `size` characters at most, from the start of a line where there is one."""
    if len(text) <= size:
        return text
    cut = text[len(text) - size :]
    _, newline, rest = cut.partition("\n")
    return rest if newline else cut


def _head(text: str, size: int) -> str:
    """The first `size` characters at most, up to the end of a line where there is one."""
    if len(text) <= size:
        return text
    cut = text[:size]
    kept, newline, _ = cut.rpartition("\n")
    return kept + newline if newline else cut


def round_robin(sources: list[Iterator[FimPrompt]], limit: int) -> list[FimPrompt]:
    """Up to `limit` prompts, one of each source in turn until it has no more."""
    prompts: list[FimPrompt] = []
    while sources and len(prompts) < limit:
        alive: list[Iterator[FimPrompt]] = []
        for source in sources:
            if len(prompts) == limit:
                break
            prompt = next(source, None)
            if prompt is not None:
                prompts.append(prompt)
                alive.append(source)
        sources = alive
    return prompts


# --------------------------------------------------------------------------------------- JSON lines


def write(path: Path, prompts: Iterable[FimPrompt]) -> int:
    """Write one JSON object a line; returns how many. A file appears whole or not at all.

    What is there and no file (/dev/stdout, a pipe) is written to, never replaced.
    """
    count = 0
    temporary: Path | None = None
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            goal = path
        else:
            goal = temporary = path.with_name(path.name + ".partial")
        with goal.open("w", encoding="utf-8") as file:
            for prompt in prompts:
                file.write(json.dumps(asdict(prompt), ensure_ascii=False) + "\n")
                count += 1
        if temporary is not None:
            temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from None
    return count


def read(path: Path) -> list[FimPrompt]:
    """Read JSON lines that have `prefix`, `suffix` and `middle`; `path` and `language` where given,
    other fields are left alone. Raises SettingsError naming the line that is wrong."""
    try:
        with path.open("rb") as file:
            prompts = [
                _parse(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip()
            ]
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    if not prompts:
        raise SettingsError(f"{path} holds no prompt")
    return prompts


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """A line's object. Raises SettingsError that begins with `where`."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # Windows writes a mark before the first line
    except UnicodeDecodeError:
        raise SettingsError(f"{where}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise SettingsError(f"{where}: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise SettingsError(f"{where}: {error}") from None
    if not isinstance(row, dict):
        raise SettingsError(f"{where}: an object with prefix, suffix and middle is needed")
    return row


def _parse(line: bytes, where: str) -> FimPrompt:
    row = json_object(line, where)
    for name in ("prefix", "suffix", "middle"):
        if not isinstance(row.get(name), str):
            raise SettingsError(f"{where}: {name} must be a string")
    for name in ("path", "language"):
        if not isinstance(row.get(name, ""), str):
            raise SettingsError(f"{where}: {name} must be a string")
    prompt = FimPrompt(
        row["prefix"], row["suffix"], row["middle"], row.get("path", ""), row.get("language", "")
    )
    if not encodable(prompt):
        raise SettingsError(f"{where}: half of a surrogate pair stands alone, which is no text")
    return prompt


def encodable(prompt: FimPrompt) -> bool:
    """Whether all of it is text: JSON can name half of a surrogate pair, which no tokenizer takes.

    >>> encodable(FimPrompt.example()), encodable(FimPrompt("\\ud800", "", "x"))
    (True, False)
    """
    try:
        "".join((prompt.prefix, prompt.suffix, prompt.middle, prompt.path, prompt.language)).encode()
    except UnicodeEncodeError:
        return False
    return True
