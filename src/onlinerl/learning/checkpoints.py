"""Checkpoints of a run: fp32 weights, optimiser state and a JSON of everything else.

A checkpoint is a folder named after its batch. It is written under another name, every file forced to
disk, then renamed: a kill at any instant leaves either a whole one or none. Safetensors only, no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from onlinerl.errors import RunError

KEEP = 2
_STATE, _WEIGHTS, _OPTIMIZER = "state.json", "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a run stood after a batch. Made and eaten by the Trainer."""

    batch: int
    state: Mapping[str, Any]
    folder: Path

    def weights(self) -> dict[str, Tensor]:
        """fp32, by name. Raises RunError."""
        return self._read(_WEIGHTS)

    def optimizer(self) -> dict[str, Tensor]:
        """Moments, by `{parameter}/{moment}`. Raises RunError."""
        return self._read(_OPTIMIZER)

    def _read(self, name: str) -> dict[str, Tensor]:
        try:
            tensors: dict[str, Tensor] = load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the checkpoint {self.folder} cannot be read: {error}") from None
        return tensors


class Checkpoints:
    """The checkpoints in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        batch: int,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        pinned: int | None = None,
    ) -> None:
        """Write one and remove those before the last KEEP, but never that of batch `pinned`.

        Raises RunError when the disk refuses; what was there before still is.
        """
        target = self.folder / f"{batch:08d}"
        staging = self.folder / f".{batch:08d}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in weights.items()}, staging / _WEIGHTS
            )
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in optimizer.items()}, staging / _OPTIMIZER
            )
            (staging / _STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
            for path in staging.iterdir():
                sync(path)
            sync(staging)
            self._remove(batch)  # same batch again: the end of a run, or one that was resumed
            staging.rename(target)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise RunError(f"the checkpoint {target} cannot be written: {error}") from None
        self.prune(pinned)

    def amend(self, batch: int, state: Mapping[str, Any]) -> None:
        """Replace the JSON of a checkpoint, in one step; the tensors stay. Raises RunError."""
        target = self.folder / f"{batch:08d}" / _STATE
        fresh = target.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
            sync(fresh)
            fresh.replace(target)
            sync(target.parent)
        except OSError as error:
            raise RunError(f"the checkpoint {target.parent} cannot be written: {error}") from None

    def prune(self, pinned: int | None = None, keep: int = KEEP) -> None:
        """Remove all but the last `keep` and the one of batch `pinned`, and what a kill left behind."""
        batches = self.batches()
        for batch in batches[: max(0, len(batches) - keep)]:
            if batch != pinned:
                self._remove(batch)
        for leftover in self.folder.glob(".*.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, batch: int) -> None:
        """Out of sight in one step, and only then file by file: a kill leaves no half of a checkpoint."""
        target, gone = self.folder / f"{batch:08d}", self.folder / f".{batch:08d}.old"
        shutil.rmtree(gone, ignore_errors=True)
        if target.exists():
            target.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def batches(self) -> list[int]:
        """Batches with a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def latest(self) -> Checkpoint | None:
        """The last one; None: there is none."""
        batches = self.batches()
        return self.read(batches[-1]) if batches else None

    def read(self, batch: int) -> Checkpoint:
        """That of a batch. Raises RunError."""
        folder = self.folder / f"{batch:08d}"
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"the checkpoint {folder} cannot be read: {error}") from None
        return Checkpoint(batch, state, folder)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
