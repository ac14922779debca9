"""What is left of learning once the weights are rounded to the number format that they are served in.

Training adds its steps up in fp32. Steps much smaller than what a format tells apart (in bf16 1/512 to 1/256
of a weight) change few of the stored weights or none, and then a new version is the old one by another name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onlinerl.errors import WeightsError

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a number."""


def changed(tensors: Mapping[str, Tensor], stored: Mapping[str, Path]) -> float:
    """Share of the numbers in `tensors` (on the CPU) whose bits are not those in the files, 0 to 1.

    `stored` names for each tensor the safetensors file that has the earlier one of the same shape and number
    format. Reads each once, and holds one at a time. Raises WeightsError for a file that cannot be read.
    """
    of_file: dict[Path, list[str]] = defaultdict(list)
    for name in tensors:
        of_file[stored[name]].append(name)
    different = 0
    for path, names in of_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    new, old = tensors[name], file.get_tensor(name)
                    bits = _BITS[new.element_size()]
                    different += int(torch.count_nonzero(new.view(bits) != old.view(bits)))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"the weights in {path} cannot be read: {error}") from None
    return different / max(1, sum(tensor.numel() for tensor in tensors.values()))


def unchanged(version: str, parent: str, formats: Iterable[torch.dtype], rate: str) -> str:
    """The sentence for whoever wonders why nothing changed. `rate` is the setting of the learning rate."""
    names = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in formats}))
    return (
        f"{version} serves the very weights of {parent}: what was learned since is too small for {names}. "
        "It is kept in fp32, and may show in a later version; to see it sooner "
        f"raise {rate}, or make versions rarer (train.version_every)"
    )
