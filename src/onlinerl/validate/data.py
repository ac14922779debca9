"""The prompts: to learn from, and held out by file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onlinerl import config
from onlinerl.datasets import fim, splits
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
    found = splits.load(
        settings.data,
        fields=settings.fields,
        languages=settings.languages,
        language=settings.language,
        shortest=settings.shortest,
        longest=settings.longest,
        characters=settings.characters,
        train=settings.train_prompts,
        test=settings.test_prompts,
        seed=settings.seed if settings.data_seed is None else settings.data_seed,
        half=settings.half,
    )
    test = found.test
    if settings.test is not None:
        test = _elsewhere(settings, settings.test, {one.path for one in found.train if one.path})
        if not test:
            raise SettingsError(f"validation.test: {settings.test} has no prompt of a file that is held out")
    account = {"left_out": dict(found.skipped), **_count("train", found.train), **_count("test", test)}
    return Data(found.train, tuple(test), account)


def _elsewhere(settings: config.Validation, file: Path, learned: Set[str]) -> tuple[FimPrompt, ...]:
    """Prompts of `file` that are not of files in `learned`."""
    rows = [one for one in fim.read(file) if len(one.middle.strip()) >= settings.shortest]
    return tuple(one for one in rows if one.path not in learned)[: settings.test_prompts]


def _count(name: str, prompts: Sequence[FimPrompt]) -> dict[str, int]:
    return {f"{name}_prompts": len(prompts), f"{name}_files": len({one.path for one in prompts})}
