"""Attention within each sample of a packed row, and blind across samples, in transformers' own interface.

A dense block-diagonal mask over the row would cost its square, so attention sees other shapes than the rest
of the model: one sample a line (`packed_attention`, anywhere), or the row as it is with the samples' bounds
(`flash_attention`, on a GPU). `batches.PolicyModel` tries on its own model which of them is right.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from onlinerl.errors import ModelError

PACKED, FLASH = "onlinerl_packed", "onlinerl_varlen"  # a name with "flash" in it would be transformers' own
STEP, WASTE = 128, 1.25
"""On a GPU lines are as long as a multiple of STEP, so that few shapes occur, for each of which cuDNN plans
anew. They are attended to as lines where that is at most WASTE times the pairs of tokens that the samples
have: torch's kernel for lines is about twice as fast as the one for a row of samples."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples of a packed row lie. Made by `lay_out`, eaten by the attention functions."""

    lines: Tensor
    """[n, L]: for each sample the positions of its tokens in the row, 0 beyond its end."""
    real: Tensor
    """[n, L]: whether a place of `lines` is a token."""
    inside: Tensor
    """[N]: for each position of the row its place in `lines`, flattened."""
    bounds: Tensor
    """[n + 1] int32: where each sample begins in the row, and where the last one ends."""
    longest: int
    """Tokens of the longest sample; L, or up to STEP less on a GPU."""
    even: bool
    """Whether the samples are of so like length that attention by lines wastes little."""

    def to(self, device: torch.device) -> Layout:
        """On another device."""
        return replace(
            self,
            lines=self.lines.to(device),
            real=self.real.to(device),
            inside=self.inside.to(device),
            bounds=self.bounds.to(device),
        )


def lay_out(lengths: Sequence[int], device: torch.device) -> Layout:
    """The layout of samples of these lengths, one after another."""
    longest = max(lengths)
    width = longest if device.type == "cpu" else -(-longest // STEP) * STEP
    # One line alone would be a shape of its own to the compiler.
    even = len(lengths) > 1 and len(lengths) * width**2 <= WASTE * sum(size**2 for size in lengths)
    sizes = torch.tensor(lengths)[:, None]
    steps = torch.arange(width)[None]
    begins = sizes.cumsum(0) - sizes
    real = steps < sizes
    bounds = torch.cat([begins[:1, 0], sizes.cumsum(0)[:, 0]]).int()
    lines = torch.where(real, begins + steps, 0)
    return Layout(lines, real, real.flatten().nonzero()[:, 0], bounds, longest, even).to(device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of a packed row; transformers' attention interface.

    query [1, H, N, D], key and value [1, H_kv, N, D] → [1, N, H, D]. Lines are padded on the right, where
    causality hides them from every real token.
    """
    if packing is None:
        raise ModelError("the model does not hand `packing` on to its attention")
    samples, length = packing.lines.shape
    groups = query.shape[1] // key.shape[1]

    def unpack(tensor: Tensor) -> Tensor:
        lined = tensor[0].index_select(1, packing.lines.flatten())
        return lined.view(tensor.shape[1], samples, length, tensor.shape[3]).transpose(0, 1)

    query, key, value = unpack(query), unpack(key), unpack(value)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    out = out.transpose(1, 2).flatten(0, 1).index_select(0, packing.inside)
    return out[None].contiguous(), None


def _varlen() -> Callable[..., Tensor] | None:
    """torch's causal attention for packed sequences; None: this torch has none. Its arguments are young and
    differ between versions."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    found: Callable[..., Any] = functools.partial(varlen_attn, **options)
    return found


varlen = _varlen()


def flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What `packed_attention` does, in half precision on a GPU: no key is repeated, and nothing is padded.

    Samples of about the same length (`Layout.even`) are attended to as lines after all, by the fastest kernel
    that torch has for them.
    """
    if packing is None or varlen is None:
        raise ModelError("the model does not hand `packing` on to its attention")
    # The rotary embedding is computed in fp32, the kernel wants what it gets from the value's projection.
    query, key, value = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))
    if packing.even:
        return _lined(query, key, value, packing, scaling)[None], None
    rows = [tensor.contiguous() for tensor in (query, key, value)]
    bounds, longest = packing.bounds, packing.longest
    out = varlen(rows[0], rows[1], rows[2], bounds, bounds, longest, longest, scale=scaling)
    return out[None], None


class _Spread(torch.autograd.Function):
    """[N, …] → [n·L, …]: the tokens of a row at their places in lines. Its gradient is `_Gathered`, and the
    other way round: what index_select does by itself adds up, token by token, what is written once."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, lines: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return row.index_select(0, lines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Beyond a sample's end gradients are zero: no token sees what is there.
        (inside,) = ctx.saved_tensors
        return grad.index_select(0, inside), None, None


class _Gathered(torch.autograd.Function):
    """[n·L, …] → [N, …]."""

    @staticmethod
    def forward(ctx: Any, lined: Tensor, lines: Tensor, real: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(lines, real)
        return lined.index_select(0, inside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        lines, real = ctx.saved_tensors
        spread = grad.index_select(0, lines)
        return torch.where(real[:, None, None], spread, torch.zeros_like(spread)), None, None, None


def _lined(query: Tensor, key: Tensor, value: Tensor, packing: Layout, scaling: float | None) -> Tensor:
    """Attention by lines: [N, H, D] → the same."""
    samples, length = packing.lines.shape
    lines = packing.lines.flatten()

    def line(row: Tensor) -> Tensor:
        lined: Tensor = _Spread.apply(row, lines, packing.inside)  # type: ignore[no-untyped-call]
        return lined.view(samples, length, *row.shape[1:]).transpose(1, 2)

    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        line(query), line(key), line(value), is_causal=True, scale=scaling, enable_gqa=grouped
    )
    out = out.transpose(1, 2).flatten(0, 1)
    back: Tensor = _Gathered.apply(out, lines, packing.real.flatten(), packing.inside)  # type: ignore[no-untyped-call]
    return back


for _name, _function in ((PACKED, packed_attention), (FLASH, flash_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, lambda *_args, **_kwargs: None)
