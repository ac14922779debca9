"""Where a run computes, in which number format, with how many threads."""

from __future__ import annotations

import os

import torch

from onlinerl import config
from onlinerl.errors import ModelError


def device_of(train: config.Train) -> torch.device:
    """Where to compute. Raises ModelError for CUDA where there is none."""
    available = torch.cuda.is_available()
    if train.device == "cuda" and not available:
        raise ModelError("train.device is cuda, but torch sees no GPU: set it to auto or cpu")
    return torch.device("cuda" if available and train.device != "cpu" else "cpu")


def dtype_of(train: config.Train, device: torch.device) -> torch.dtype:
    """Number format of the matrix products."""
    if train.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[train.dtype]


def threads_of(train: config.Train) -> int:
    """Torch threads: the setting, else half of the cores that this process may use."""
    if train.threads is not None:
        return train.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)
