"""The prompts: to learn from, and held out by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onlinerl import config
from onlinerl.datasets import fim
from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Data:
    """Prompts of both splits and an account of them. No file is in both."""

    train: tuple[FimPrompt, ...]
    test: tuple[FimPrompt, ...]
    account: Mapping[str, Any]
    """For the report."""


def load(settings: config.Validation) -> Data:
    """Read the prompts. Raises SettingsError when a split has none."""
    if settings.data is not None and settings.data.is_file():
        rows = [one for one in fim.read(settings.data) if len(one.middle.strip()) >= settings.shortest]
        sides: dict[bool, list[FimPrompt]] = {True: [], False: []}
        for row in rows:
            # Rows without a path are files of their own.
            sides[fim.is_test(row.path or row.prefix)].append(row)
        train, test = sides[False][: settings.train_prompts], sides[True][: settings.test_prompts]
        account: dict[str, Any] = {"rows": len(rows)}
    else:
        learned, held = (
            _collect(settings, "train", settings.train_prompts),
            _collect(settings, "test", settings.test_prompts),
        )
        train, test = [*learned.prompts], [*held.prompts]
        account = {"skipped_files": dict(Counter(learned.skipped) + Counter(held.skipped))}
    if settings.test is not None:
        test = _elsewhere(settings, settings.test, {one.path for one in train if one.path})
    for name, side in (("train", train), ("test", test)):
        if not side:
            raise SettingsError(f"validation.data gives no {name} prompt")
    return Data(tuple(train), tuple(test), {**account, **_count("train", train), **_count("test", test)})


def _collect(settings: config.Validation, split: fim.Split, limit: int) -> fim.Collection:
    return fim.collect(
        settings.data,
        split=split,
        limit=limit,
        seed=settings.seed,
        characters=settings.characters,
        shortest=settings.shortest,
    )


def _elsewhere(settings: config.Validation, file: Path, learned: Set[str]) -> list[FimPrompt]:
    """Prompts of `file` that are not of files in `learned`."""
    rows = [one for one in fim.read(file) if len(one.middle.strip()) >= settings.shortest]
    return [one for one in rows if one.path not in learned][: settings.test_prompts]


def _count(name: str, prompts: Sequence[FimPrompt]) -> dict[str, int]:
    return {f"{name}_prompts": len(prompts), f"{name}_files": len({one.path for one in prompts})}
