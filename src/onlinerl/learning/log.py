"""What a run leaves behind in its folder and on the terminal: log.jsonl, TensorBoard, a progress bar.

No prompts, no answers. The store has the same numbers (`runs.add_step`); docs/metrics.md explains them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch.utils.tensorboard import SummaryWriter


class RunLog:
    """Writes into a run's folder, appending when a run is resumed.

    `log.jsonl` has one object a line with `event` and `at`: start, resume (what follows repeats the batches
    beyond its `batch`), step (with the ids of its samples), version, warning, end.
    """

    def __init__(self, folder: Path, *, total: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.jsonl"
        torn = _torn(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")  # what follows is no part of that line
        self._board = SummaryWriter(str(folder / "tensorboard"))
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
            )
            self._task = self._progress.add_task("training", total=total, note="")

    def __enter__(self) -> RunLog:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def event(self, name: str, **fields: Any) -> None:
        """One line."""
        line = {"event": name, "at": round(time.time(), 3), **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def step(self, batch: int, numbers: Mapping[str, float], ids: list[str]) -> None:
        """A batch was trained on."""
        rounded = {name: float(f"{value:.6g}") for name, value in numbers.items()}
        self.event("step", batch=batch, **rounded, ids=ids)
        self.scalars(batch, numbers)
        if self._progress is not None and self._task is not None:
            # A batch of which nothing was usable has neither.
            reward = numbers.get("reward", math.nan)
            note = f"step {batch}  reward {reward:+.3f}"
            if "kl" in numbers:  # not every batch's is measured
                note += f"  kl {numbers['kl']:.4f}"
            self._progress.update(self._task, completed=batch, note=note)

    def note(self, words: str) -> None:
        """What is under way, beside the bar, until the next step."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, note=words)

    def scalars(self, batch: int, numbers: Mapping[str, float]) -> None:
        """Into TensorBoard."""
        for name, value in numbers.items():
            self._board.add_scalar(name, value, batch)

    def close(self) -> None:
        """Give everything back."""
        if self._progress is not None:
            self._progress.stop()
        with contextlib.suppress(ValueError):  # closed twice
            self._file.flush()
        self._file.close()
        self._board.close()


def _torn(path: Path) -> bool:
    """Whether a kill or a full disk cut the last line short."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
