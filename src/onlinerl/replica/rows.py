"""The key/value cache in rows, and the attention over it.

A forward pass takes all its tokens flattened, `[1, tokens]`: one token of every sequence that decodes,
then the chunks of prompts that are being read. So no token is padding, the matrices are as large as they
can be, and the weights are read from memory once for both. Only the attention knows of sequences: each
owns one row of the cache, which its tokens are written to, and reads that row alone. Sequences come and
go between passes without anything being copied.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from onlinerl.errors import ModelError

ATTENTION = "onlinerl_rows"
"""The name under which transformers' models find `attend`."""

_current = threading.local()
"""The plan of the pass that this thread computes: transformers hands no argument of ours through every
architecture, and two threads may compute at once (one decodes, one checks a new architecture)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence within a pass: a piece of its prompt, or a single new token."""

    row: int
    start: int
    """Position of its first token in the sequence."""
    size: int
    offset: int
    """Index of its first token among the tokens of the pass."""
    causal: bool = False
    """Plainly causal: it starts at position 0."""
    mask: Tensor | None = None
    """Additive, [size, start + size], where it is neither causal nor a single token."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Beginnings of several sequences, one after the other in the pass, attended to as one padded batch."""

    offset: int
    """Index of the first one's first token among the tokens of the pass."""
    size: int
    """Tokens of all of them."""
    longest: int
    rows: Tensor
    """[sequences]"""
    places: Tensor
    """[size] where each token is among sequences × longest."""


PADDED = 1 << 17
"""Tokens, padding included, of a batch of prompts: at 1,536 numbers each in 16 bits 0.4 GB for the queries,
and as much for keys, values and answers each."""


def batched(chunks: Sequence[Chunk], device: torch.device) -> list[Chunk | Prompts]:
    """The same chunks in the same order, with beginnings that follow one another as one batch: for a GPU,
    which computes padding faster than Python launches a handful of kernels for each prompt and layer."""
    made: list[Chunk | Prompts] = []
    run: list[Chunk] = []
    longest = 0

    def close() -> None:
        if len(run) < 2:
            made.extend(run)
        else:
            rows = [chunk.row for chunk in run]
            places = [n * longest + i for n, chunk in enumerate(run) for i in range(chunk.size)]
            made.append(
                Prompts(
                    offset=run[0].offset,
                    size=len(places),
                    longest=longest,
                    rows=torch.tensor(rows, device=device),
                    places=torch.tensor(places, device=device),
                )
            )
        run.clear()

    for chunk in chunks:
        if chunk.start or (len(run) + 1) * max(longest, chunk.size) > PADDED:
            close()
            longest = 0
        if chunk.start:
            made.append(chunk)
        else:
            run.append(chunk)
            longest = max(longest, chunk.size)
    close()
    return made


@dataclass(slots=True)
class Plan:
    """What one pass computes; made once, used by every layer."""

    slots: Tensor
    """[tokens] where each token's key and value go: row × capacity + position."""
    decoding: int = 0
    """The first so many tokens of the pass are one each of sequences that are computed as one batch."""
    low: int = 0
    high: int = 0
    """The rows of the decoding sequences lie in low ≤ row < high."""
    length: int = 0
    """So many positions of those rows are looked at."""
    pick: Tensor | None = None
    """[decoding] their rows less `low`; None when that is 0, 1, 2, …"""
    mask: Tensor | None = None
    """Additive, [high − low, 1, 1, length]."""
    chunks: Sequence[Chunk | Prompts] = ()
    """What follows the first tokens, in the order of their offsets."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's keys and values, each twice: as the slots that are written to, and as the rows that are
    read, without the last slot."""

    keys: Tensor
    """[rows × capacity + 1, heads × width]"""
    values: Tensor
    key_rows: Tensor
    """[rows, capacity, heads, width], the same memory"""
    value_rows: Tensor


class Rows(Cache):
    """Keys and values of all layers for one version.

    Grows in both directions by doubling; growing copies, which is why it is not done by the token. After the
    rows comes one slot that nobody reads (`scratch`): there goes what a pass of fixed shape computes for the
    rows that it has to take along.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.store: list[Layer] = []

    @property
    def scratch(self) -> int:
        """The slot that nobody reads."""
        return self.rows * self.capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values `[1, heads, tokens, width]`; give back the whole layer's,
        `[rows, capacity, heads, width]`, which only `attend` knows how to read."""
        plan: Plan = _current.plan
        while len(self.store) <= layer_idx:
            made = []
            for states in (key_states, value_states):
                heads, width = states.shape[1], states.shape[3]
                flat = _zeros(states, self.rows * self.capacity + 1, heads * width)
                made.append((flat, self._as_rows(flat, heads, width)))
            (keys, key_rows), (values, value_rows) = made
            self.store.append(Layer(keys, values, key_rows, value_rows))
        layer = self.store[layer_idx]
        tokens = key_states.shape[2]
        layer.keys.index_copy_(0, plan.slots, key_states[0].transpose(0, 1).reshape(tokens, -1))
        layer.values.index_copy_(0, plan.slots, value_states[0].transpose(0, 1).reshape(tokens, -1))
        return layer.key_rows, layer.value_rows

    def _as_rows(self, flat: Tensor, heads: int, width: int) -> Tensor:
        return flat[:-1].view(self.rows, self.capacity, heads, width)

    def grow(self, rows: int, capacity: int) -> None:
        """Make room; what is there stays."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        old_rows, old_capacity = self.rows, self.capacity
        self.rows, self.capacity = max(rows, old_rows), max(capacity, old_capacity)
        for index, layer in enumerate(self.store):
            moved = []
            for old in (layer.key_rows, layer.value_rows):
                heads, width = old.shape[2:]
                flat = _zeros(old, self.rows * self.capacity + 1, heads * width)
                new = self._as_rows(flat, heads, width)
                new[:old_rows, :old_capacity] = old
                moved.append((flat, new))
            (keys, key_rows), (values, value_rows) = moved
            self.store[index] = Layer(keys, values, key_rows, value_rows)

    def clear(self) -> None:
        """Zeros everywhere, in place: what a broken version left there would poison masked sums."""
        for layer in self.store:
            layer.keys.zero_()
            layer.values.zero_()

    @property
    def width(self) -> int:
        """Numbers kept for one position of one row, in all layers; 0 before the first pass."""
        return sum(layer.keys.shape[1] + layer.values.shape[1] for layer in self.store)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another one."""
        for layer in self.store:
            for tensor in (layer.key_rows, layer.value_rows):
                tensor[target, :length] = tensor[source, :length]


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros, not whatever was there: a masked NaN still poisons the sum over values.

    On CPU they are mapped memory, which takes a page only when it is written to; torch writes its zeros.
    (NumPy's asks for huge pages: the first pass of a new version then waits for 32 MB to be cleared.)
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    raw = mmap.mmap(-1, math.prod(shape) * like.element_size())
    return torch.frombuffer(raw, dtype=like.dtype).view(shape)


@contextmanager
def using(plan: Plan) -> Iterator[None]:
    """Make `plan` the plan of the passes that this thread computes inside the block."""
    _current.plan = plan
    try:
        yield
    finally:
        _current.plan = None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over `Rows`: query `[1, heads, tokens, width]`, key and value as
    `Rows.update` returned them; returns `[1, tokens, heads, width]`.

    Query heads that share a key/value head (GQA) are batched as the queries of that head, so keys and
    values are never repeated in memory.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise ModelError(
                f"this model's attention uses {name}, which the embedded engine does not compute"
            )
    plan: Plan = _current.plan
    heads, tokens = query.shape[1], query.shape[2]
    shared, width = key.shape[2], value.shape[3]
    group = heads // shared
    parts: list[Tensor] = []
    count = plan.decoding
    if count:
        asked = query[0, :, :count].transpose(0, 1)
        if plan.pick is not None:
            spread = query.new_zeros(plan.high - plan.low, heads, query.shape[3])
            asked = spread.index_copy_(0, plan.pick, asked)
        answer = F.scaled_dot_product_attention(
            asked.reshape(-1, shared, group, query.shape[3]),
            key[plan.low : plan.high, : plan.length].transpose(1, 2),
            value[plan.low : plan.high, : plan.length].transpose(1, 2),
            attn_mask=plan.mask,
            scale=scaling,
        ).reshape(-1, heads, width)
        parts.append(answer if plan.pick is None else answer.index_select(0, plan.pick))
    for chunk in plan.chunks:
        if isinstance(chunk, Prompts):
            parts.append(_attend_prompts(chunk, query, key, value, scaling))
            continue
        end = chunk.start + chunk.size
        asked = query[0, :, chunk.offset : chunk.offset + chunk.size]
        keys = key[chunk.row, :end].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        values = value[chunk.row, :end].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        answer = F.scaled_dot_product_attention(
            asked.reshape(shared, group, chunk.size, -1),
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.causal,
            scale=scaling,
        )
        parts.append(answer.reshape(heads, chunk.size, width).transpose(0, 1))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.reshape(1, tokens, heads, width), None


def _attend_prompts(
    prompts: Prompts, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """`[prompts.size, heads, width]`. Past a prompt's end a row may hold anything finite: causality hides
    it from the prompt's own tokens, and nobody reads what the padding gets."""
    heads, shared = query.shape[1], key.shape[2]
    count, longest = prompts.rows.shape[0], prompts.longest
    asked = query[0, :, prompts.offset : prompts.offset + prompts.size].transpose(0, 1)
    padded = query.new_zeros(count * longest, heads, query.shape[3]).index_copy_(0, prompts.places, asked)
    keys, values = (
        whole[:, :longest]
        .index_select(0, prompts.rows)
        .transpose(1, 2)
        .unsqueeze(2)
        .expand(-1, -1, heads // shared, -1, -1)
        .reshape(count, heads, longest, -1)
        for whole in (key, value)
    )
    answer = F.scaled_dot_product_attention(
        padded.view(count, longest, heads, -1).transpose(1, 2), keys, values, is_causal=True, scale=scaling
    )
    answer = answer.transpose(1, 2).reshape(count * longest, heads, -1)
    return answer.index_select(0, prompts.places)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
