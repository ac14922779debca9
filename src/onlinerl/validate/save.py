"""The final weights as a model folder, usable as a policy's `model`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from onlinerl.errors import ModelError, RunError, SettingsError
from onlinerl.learning.rounding import changed
from onlinerl.weights.header import read_header
from onlinerl.weights.models import INDEX, model_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, made at once: whether it can be is known before hours of
    learning. It is gone afterwards. Raises SettingsError when it cannot be made."""
    staging = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise SettingsError(f"validation.save: {staging} cannot be made: {error.strerror}") from None
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_writable(model: Path, names: Collection[str]) -> None:
    """Raise ModelError when `save` could not write tensors of these `names` as a copy of `model`."""
    _stored(model, names)


def save(model: Path, tensors: Mapping[str, Tensor], staging: Path, folder: Path) -> float:
    """Write `tensors` as a copy of the model in `model`: its names, its number formats, its other files.

    `staging` (of `staged`) becomes `folder`, which appears whole or not at all. Returns what share of its
    weights is not as in `model`. Raises RunError when that fails, and ModelError as `check_writable` does.
    """
    try:
        share = _write(model, tensors, staging)
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        raise RunError(f"validation.save: {folder} cannot be written: {error}") from None
    return share


def _write(model: Path, tensors: Mapping[str, Tensor], staging: Path) -> float:
    stored = _stored(model, tensors.keys())
    out = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name, (dtype, _) in stored.items()}
    for name in model_files(model):
        if not name.endswith(".safetensors") and name != INDEX:  # all weights go into one file
            shutil.copyfile(model / name, staging / name)
    save_file(out, staging / "model.safetensors", metadata={"format": "pt"})
    return changed(out, {name: path for name, (_, path) in stored.items()})


def _stored(model: Path, names: Collection[str]) -> dict[str, tuple[torch.dtype, Path]]:
    """Number format and file of each tensor of `model`."""
    found: dict[str, tuple[torch.dtype, Path]] = {}
    for file in model_files(model):
        if not file.endswith(".safetensors"):
            continue
        path = (model / file).resolve()
        for place in read_header(path):
            if place.name not in names or place.dtype not in DTYPES:
                raise ModelError(
                    f"validation.save: tensor {place.name} ({place.dtype}) cannot be written back"
                )
            found[place.name] = DTYPES[place.dtype], path
    return found
