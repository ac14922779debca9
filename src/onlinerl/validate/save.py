"""The final weights as a model folder, usable as a policy's `model`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from onlinerl.errors import ModelError
from onlinerl.weights.header import read_header
from onlinerl.weights.models import INDEX, model_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save(model: Path, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write `tensors` as a copy of the model in `model`: its names, its number formats, its other files.

    The folder appears whole or not at all. Raises ModelError for a format that cannot be written back.
    """
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    out: dict[str, Tensor] = {}
    for name in model_files(model):
        if name.endswith(".safetensors"):
            for place in read_header((model / name).resolve()):
                if place.name not in tensors or place.dtype not in DTYPES:
                    raise ModelError(f"tensor {place.name} ({place.dtype}) cannot be written back")
                out[place.name] = tensors[place.name].detach().to("cpu", DTYPES[place.dtype]).contiguous()
        elif name != INDEX:  # all weights go into one file
            shutil.copyfile(model / name, staging / name)
    save_file(out, staging / "model.safetensors", metadata={"format": "pt"})
    staging.rename(folder)
