"""How many tokens fit into a GPU's memory at once, and whether activations must be computed again for it.

What a forward pass keeps for its backward pass grows with the tokens of the row. How fast is measured on
the model itself (`PolicyModel.footprint`), since it depends on its shape, on what is frozen, and on whether
layers are compiled. Everything else is counted:

    room = SHARE × (free − gradients and Adam's moments still to come − logits)
    tokens = room / bytes kept per token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

SHARE = 0.8
"""Of what is free: the rest is for the gradients of activations and for gaps between blocks."""
ROW = 32_768
"""Tokens of a row beyond which a GPU computes no faster."""
PLENTY = 4_096
"""Tokens of a row below which a large GPU has too little to do: rather compute activations again. It is also
what a CPU gets, which is as fast with any row."""
LOGIT = 32
"""Bytes that each logit costs while its loss and gradient are computed: fp32 copies of the logits, of their
softmax and of both gradients."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a forward pass keeps for backward, per token of its row."""

    kept: float
    recomputed: float
    """With `recompute`: the input of each layer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch goes through the model."""

    row: int
    """Tokens of one microbatch; a longer sample stands alone."""
    recompute: bool


def plan(
    room: float,
    footprint: Footprint,
    *,
    longest: int,
    tokens: int,
    microbatch: int | Literal["auto"],
    recompute: bool | Literal["auto"],
) -> Plan:
    """Fill `room` (bytes) with a batch of `tokens` tokens whose longest sample has `longest`.

    Activations are kept if that leaves rows of the size asked for, or of PLENTY tokens where none was, and
    computed again otherwise, which costs a third more. A microbatch that was asked for is what it gets.
    """
    wanted = max(longest, min(tokens, PLENTY if microbatch == "auto" else microbatch))
    if recompute == "auto":
        recompute = room < wanted * footprint.kept
    if microbatch != "auto":
        return Plan(microbatch, recompute)
    fits = int(max(0.0, room) / max(1.0, footprint.recomputed if recompute else footprint.kept))
    return Plan(max(1, longest, min(ROW, fits)), recompute)


def free(device: torch.device) -> int:
    """Bytes of a GPU that this process could take: what nobody has, and what its allocator keeps unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
