"""What a model is worth before anything is learned, kept for the runs beside this one.

Many runs of a study begin with one model, and its held-out prompts, seeds and judges are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onlinerl.datasets.fim import FimPrompt
from onlinerl.validate.evaluate import Scores
from onlinerl.validate.forgetting import Loss


@dataclass(frozen=True, slots=True)
class Start:
    """Made by a course, eaten by it and by later ones that begin alike."""

    scores: Mapping[str, Scores]
    losses: Mapping[str, Loss]


def name(model: Path, prompts: Sequence[FimPrompt], facts: Mapping[str, Any]) -> str:
    """A name for everything that a measurement depends on: the files of `model` (by size and time of change),
    the prompts, and `facts`, which are JSON-able."""
    files = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in sorted(model.iterdir())]
    everything = [str(model.resolve()), files, [asdict(one) for one in prompts], facts]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def read(folder: Path, key: str) -> Start | None:
    """The start of that name, if it was kept. `folder` holds pickles: it is this program's own."""
    try:
        with (folder / key).open("rb") as file:
            found: Start = pickle.load(file)
            return found
    except FileNotFoundError:
        return None


def keep(folder: Path, key: str, start: Start) -> None:
    """Keep it; the file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{key}.{os.getpid()}"
    with partial.open("wb") as file:
        pickle.dump(start, file)
    partial.replace(folder / key)
