"""Prompts to learn from and prompts to test with, from anybody's data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from onlinerl.datasets import copies
from onlinerl.datasets.fim import (
    LONGEST_MIDDLE,
    MARKERS,
    Collection,
    FimPrompt,
    Split,
    collect,
    cut,
    encodable,
    is_test,
    json_object,
    round_robin,
)
from onlinerl.errors import SettingsError
from onlinerl.text import templates


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to learn from and prompts to test with; no file is in both. Made by `load`."""

    train: tuple[FimPrompt, ...]
    test: tuple[FimPrompt, ...]
    skipped: Mapping[str, int]
    """Files (of a folder) or rows (of a JSONL file) left out, by reason."""


FIELDS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("prefix", "suffix", "middle", "path", "language")}
)
"""Which column holds what, where nobody says otherwise. A sixth name, `prompt`, is for a column that has
prefix and suffix between FIM markers; it takes the place of those two."""


def load(
    source: Path | None = None,
    *,
    fields: Mapping[str, str] = FIELDS,
    languages: Sequence[str] = (),
    language: str = "",
    shortest: int = 1,
    longest: int | None = None,
    characters: int = 2048,
    train: int = 3000,
    test: int = 1000,
    seed: int = 0,
    half: bool = False,
) -> Prompts:
    """Prompts of both sides: from a folder of Python, split as `is_test` splits it everywhere, or from a
    JSONL file in anybody's layout.

    fields: columns by what they hold (FIELDS); one within an object is written `meta.path`. languages: others
    are left out; none given means all. language: that of rows which do not say, neither in a column nor by
    the ending of their path. shortest, longest: of the middle, in characters; a folder's are at most
    LONGEST_MIDDLE. characters: prefix and suffix together, cut as `collect` cuts them. half: learn from the
    first half of the libraries (`in_first_half`) and test with the other half; needs paths.

    Rows are split by file too. Where a row has a path, `is_test` decides, as it does for folders and for
    simulated users: a file is on the same side everywhere, about a fifth of them to test with. Rows without a
    path are shared out as `train` to `test`, those together that share eight lines of code in a row
    (`copies.groups`), which finds pieces of one file and copies of it. Two things stay unseen: pieces of a
    long file that do not overlap may be on both sides, with nothing in common but names and style, and so may
    copies of a file under another path. A limit takes evenly from the files. Raises SettingsError when a side
    would be empty; it tells why rows were left out.
    """
    if source is not None and source.is_file():
        rows, skipped = _rows(source, {**FIELDS, **fields}, languages, language, shortest, longest)
        learned, held = _sides(rows, test / (train + test), seed)
        if half:
            if not all(one.path for one in rows):
                raise SettingsError(f"{source}: half of the libraries needs the path of every row")
            learned = [one for one in learned if in_first_half(library(one))]
            held = [one for one in held if not in_first_half(library(one))]
        learned, held = ([cut(one, characters) for one in side] for side in (learned[:train], held[:test]))
    else:
        if languages and "python" not in languages:
            raise SettingsError("a folder gives prompts of Python; for other languages name a JSONL file")

        def side(split: Split, limit: int) -> Collection:
            wanted = split == "train"
            return collect(
                source,
                split=split,
                limit=limit,
                seed=seed,
                characters=characters,
                shortest=shortest,
                longest=min(longest or LONGEST_MIDDLE, LONGEST_MIDDLE),
                only=(lambda path: in_first_half(_library(path)) == wanted) if half else None,
            )

        taught, tested = side("train", train), side("test", test)
        learned, held = [*taught.prompts], [*tested.prompts]
        skipped = Counter(taught.skipped) + Counter(tested.skipped)
    for name, prompts in (("train", learned), ("test", held)):
        if not prompts:
            raise SettingsError(
                f"{source} gives no {name} prompt (left out: {dict(skipped) or 'nothing'}); each file is on "
                "one side, so there must be several"
            )
    return Prompts(tuple(learned), tuple(held), MappingProxyType(dict(skipped)))


def library(prompt: FimPrompt) -> str:
    """The package at the top of the prompt's path, tests of a package included; "" where no path is known.

    >>> [library(FimPrompt("", "", "", path)) for path in ("json/a.py", "test/test_json/b.py", "src/c/d.py")]
    ['json', 'json', 'c']
    """
    return _library(prompt.path)


def _library(path: str) -> str:
    parts = [part for part in PurePosixPath(path.replace("\\", "/")).parts if part not in ("/", ".", "..")]
    while len(parts) > 1 and parts[0] in ("src", "lib", "python", "test", "tests"):
        parts = parts[1:]
    return parts[0].partition(".")[0].removeprefix("test_") if parts else ""


def in_first_half(name: str) -> bool:
    """Whether a library is of the half that a study of generalisation learns from: by a hash of its name."""
    return is_test(f"library {name}", 0.5)


def _rows(
    source: Path,
    fields: Mapping[str, str],
    languages: Sequence[str],
    language: str,
    shortest: int,
    longest: int | None,
) -> tuple[list[FimPrompt], Counter[str]]:
    """The rows that may be used, uncut, and how many may not, by reason."""
    if unknown := {*fields} - {*FIELDS, "prompt"}:
        raise SettingsError(f"fields: {sorted(unknown)} is none of {[*FIELDS, 'prompt']}")
    kept: dict[FimPrompt, None] = {}
    skipped: Counter[str] = Counter()
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompt = _mapped(json_object(line, f"{source}:{number}"), fields, f"{source}:{number}")
                    if prompt is not None and not prompt.language:
                        prompt = replace(prompt, language=templates.language(prompt.path) or language)
                    reason = _fault(prompt, languages, shortest, longest)
                    if not reason and prompt in kept:
                        reason = "duplicate"
                    if reason or prompt is None:
                        skipped[reason] += 1
                    else:
                        kept[prompt] = None
    except OSError as error:
        raise SettingsError(f"{source} cannot be read: {error.strerror}") from None
    return [*kept], skipped


def _fault(prompt: FimPrompt | None, languages: Sequence[str], shortest: int, longest: int | None) -> str:
    """Why a row is left out; "" when it is not."""
    if prompt is None:
        return "prompt without FIM markers"
    if not encodable(prompt):
        return "broken encoding"
    if languages and prompt.language not in languages:
        return "another language" if prompt.language else "language not known"
    if len(prompt.middle.strip()) < shortest:
        return "middle too short"
    if longest is not None and len(prompt.middle) > longest:
        return "middle too long"
    if MARKERS.search(f"{prompt.prefix}\n{prompt.middle}\n{prompt.suffix}"):
        return "holds FIM markers"
    return ""


def _mapped(row: Mapping[str, Any], fields: Mapping[str, str], where: str) -> FimPrompt | None:
    """The row as a prompt; None where its `prompt` column holds no markers that we know."""

    def text(name: str, *, needed: bool) -> str:
        value: Any = row
        for part in (fields[name],) if fields[name] in row else fields[name].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if name == "middle" and isinstance(value, list) and value:
            value = value[0]  # `solutions`: the first is the author's
        if value is None and not needed:
            return ""
        if not isinstance(value, str):
            raise SettingsError(
                f"{where}: {name} must be a string in {fields[name]!r}; the columns are {sorted(row)}: "
                "say with `fields` which hold what"
            )
        return value

    path, middle = text("path", needed=False), text("middle", needed=True)
    if "prompt" not in fields:
        prefix, suffix = text("prefix", needed=True), text("suffix", needed=True)
    else:
        prompt = text("prompt", needed=True)
        for template in templates.TEMPLATES:
            parts = template.parse(prompt)
            if parts is not None:
                prefix, suffix = parts
                path = path or template.path(prompt)
                break
        else:
            return None
    return FimPrompt(prefix, suffix, middle, path, text("language", needed=False).lower())


def _sides(rows: Sequence[FimPrompt], share: float, seed: int) -> tuple[list[FimPrompt], list[FimPrompt]]:
    """(to learn from, to test with), each in an order that goes round the files, so that any beginning of it
    is taken evenly from all of them."""
    named: dict[str, list[FimPrompt]] = {}
    for row in rows:
        if row.path:
            named.setdefault(row.path, []).append(row)
    sides: tuple[list[list[FimPrompt]], list[list[FimPrompt]]] = ([], [])
    for path, group in named.items():
        sides[is_test(path)].append(group)
    nameless = [row for row in rows if not row.path]
    together: dict[int, list[FimPrompt]] = {}
    numbers = copies.groups([f"{one.prefix}{one.middle}{one.suffix}" for one in nameless])
    for number, row in zip(numbers, nameless, strict=True):
        together.setdefault(number, []).append(row)
    order = [*together.values()]
    random.Random(seed).shuffle(order)
    goal, count = share * len(nameless), 0
    for group in order:
        tests = count + len(group) <= goal
        count += len(group) * tests
        sides[tests].append(group)
    if len(order) > 1 and count == 0:  # every group is larger than the goal
        smallest = min(order, key=len)
        sides[0].remove(smallest)
        sides[1].append(smallest)
    learned, held = (round_robin([iter(group) for group in side], len(rows)) for side in sides)
    return learned, held
