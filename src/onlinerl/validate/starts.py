"""What a model is worth before anything is learned, kept for the runs beside this one.

Many runs of a study begin with one model, and its held-out prompts, seeds and judges are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
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
    """By `greedy` and `sampled`."""
    losses: Mapping[str, Loss]


def name(model: Path, prompts: Sequence[FimPrompt], facts: Mapping[str, Any]) -> str:
    """A name for everything that a measurement depends on: the files of `model` (by size and time of change),
    the prompts, and `facts`, which are JSON-able."""
    files = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in sorted(model.iterdir())]
    everything = [str(model.resolve()), files, [asdict(one) for one in prompts], facts]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def read(folder: Path, key: str, prompts: Sequence[FimPrompt]) -> Start | None:
    """The start of that name and of these prompts, if it was kept."""
    try:
        tree = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    scores = {
        how: Scores(
            tuple(prompts),
            {column: tuple(values) for column, values in one["columns"].items()},
            examples=tuple((completion, author) for completion, author in one["examples"]),
        )
        for how, one in tree["scores"].items()
    }
    return Start(scores, {which: Loss(*loss) for which, loss in tree["losses"].items()})


def keep(folder: Path, key: str, start: Start) -> None:
    """Keep it, if no judge failed: an endpoint that is down may be up for the next run. The file appears
    whole or not at all."""
    if any(one.faults for one in start.scores.values()):
        return
    tree = {
        "scores": {
            how: {"columns": dict(one.columns), "examples": one.examples} for how, one in start.scores.items()
        },
        "losses": dict(start.losses),
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{key}.{os.getpid()}"
    partial.write_text(json.dumps(tree), encoding="utf-8")
    partial.replace(folder / f"{key}.json")
