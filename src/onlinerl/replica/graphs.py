"""Decoding passes of fixed shapes: all they read and write stays in place, so that a GPU can repeat one as a
CUDA graph.

A decoding step of a small model costs a GPU little and the CPU much: hundreds of kernels, each launched by
Python. A graph launches all of them at once. It repeats the very same work on the very same memory, so

- the rows are the first 16, 64, 256, … of the cache, whichever of them decode. The others are taken along:
  they write into a slot that nobody reads (`Rows.scratch`) and look at one position of their own row;
- 256, 512, 1024, … positions of each row are looked at, those past a row's own length masked;
- tokens, positions, temperatures and uniform numbers come in one buffer, in one transfer, and the drawn
  tokens and their log-probabilities leave in another one. Slots, mask and sampling are part of the graph.

The pass is the same function whether it was captured or not, and which shape a step has depends on its rows
alone: so answers do not depend on what was captured when. A shape is captured the AFTER-th time it is asked
for, since a capture costs several eager passes; when one fails, that is logged once, and passes stay eager.

CUDA graphs rather than torch.compile: that would compile for tens of seconds for each shape in each process,
need a C++ and a Triton tool chain where this is deployed, and start anew for modules whose tensors are
exchanged, to save little more, since launches are what costs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onlinerl.replica.model import Skeleton, Weights
from onlinerl.replica.rows import Plan, Rows
from onlinerl.replica.sampling import draw_whole

FEWEST_ROWS = 16
MORE_ROWS = 4
"""Rows are counted in 16, 64, 256, …: a row that is computed in vain costs less than another graph."""
SHORTEST = 256
"""Positions are counted in 256, 512, 1024, …"""
AFTER = 8
"""Passes of a shape until it is captured. A capture costs about four eager passes."""
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError)
"""What a failed capture raises: CUDA's errors (out of memory is one) are RuntimeErrors."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None], object], tuple[Replay, object]]
"""A pass, and the memory pool to share (None: a new one) → what repeats the pass, and the pool. It may
compute the pass any number of times meanwhile: that changes nothing."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a pass: rows from the first on, and positions of each that are looked at."""

    rows: int
    length: int


class Asked(NamedTuple):
    """One row's share in a step. A tuple: hundreds are made for each step."""

    row: int
    token: int
    """The last one, whose successor is drawn."""
    position: int
    """Where its key and value go."""
    temperature: float
    uniform: float
    """In [0, 1)."""


def shape_of(high: int, longest: int, rows: int, capacity: int) -> Shape:
    """The shape of a step whose rows are below `high` and at most `longest` positions long, in a cache of
    `rows` with `capacity` positions."""
    count, length = FEWEST_ROWS, SHORTEST
    while count < high:
        count *= MORE_ROWS
    while length < longest:
        length *= 2
    return Shape(min(count, rows), min(length, capacity))


class Steps:
    """The decoding passes of one set of weights on one cache. For one thread, in inference mode."""

    def __init__(self, skeleton: Skeleton, weights: Weights, cache: Rows, capture: Capture | None) -> None:
        """`capture` None: every pass is eager."""
        self.weights = weights
        """May be exchanged, for the same tensors with other contents; what is captured stays valid then."""
        self._skeleton = skeleton
        self._cache = cache
        self._capture = capture
        device = skeleton.device
        self._pinned = torch.zeros(
            cache.rows, len(_IDLE), dtype=torch.double, pin_memory=device.type == "cuda"
        )
        self._given = torch.zeros(cache.rows, len(_IDLE), dtype=torch.double, device=device)
        self._drawn = torch.zeros(cache.rows, 2, dtype=torch.double, device=device)
        self._logits = torch.zeros(cache.rows, skeleton.vocabulary, dtype=skeleton.dtype, device=device)
        self._positions = torch.arange(skeleton.context, device=device)
        self._rows = torch.arange(cache.rows, device=device)
        self._seen: dict[Shape, int] = {}
        self._replays: dict[Shape, Replay] = {}
        self._pool: object = None

    @property
    def captured(self) -> frozenset[Shape]:
        """Shapes that are repeated instead of computed."""
        return frozenset(self._replays)

    def invalidate(self) -> None:
        """The cache has moved: what was captured writes to where it was. Call it before the next step."""
        self._replays.clear()
        self._seen.clear()
        # The memory goes with the last graph of a pool, and such a pool must not be used again.
        self._pool = None

    def step(self, asked: Sequence[Asked]) -> list[list[float]]:
        """Compute one token for each, in the given order: pairs of token and log-probability, as if every
        top_p were 1. Their keys and values are then in the cache."""
        cache = self._cache
        shape = shape_of(
            1 + max(one.row for one in asked),
            1 + max(one.position for one in asked),
            cache.rows,
            cache.capacity,
        )
        facts = [_IDLE] * shape.rows
        for one in asked:
            facts[one.row] = (one.token, one.position, one.temperature, one.uniform, 1)
        pinned, given = self._pinned[: shape.rows], self._given[: shape.rows]
        pinned.copy_(torch.tensor(facts, dtype=torch.double))
        # The host's side is not written again before this step's result has been waited for.
        given.copy_(pinned, non_blocking=True)
        replay = self._replays.get(shape)
        if replay is None:
            replay = self._first(shape)
        replay()
        drawn: list[list[float]] = self._drawn[: shape.rows].tolist()
        return [drawn[one.row] for one in asked]

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Of the last step, `[len(rows), vocabulary]` in float32."""
        return self._logits[torch.tensor(rows, device=self._logits.device)].float()

    def compute(self, shape: Shape) -> None:
        """The pass itself: from the buffers to the buffers, nothing read on the host."""
        given = self._given[: shape.rows]
        positions = given[:, 1].long()
        slots = self._rows[: shape.rows] * self._cache.capacity + positions
        slots.masked_fill_(given[:, 4] == 0, self._cache.scratch)
        outside = self._positions[: shape.length] > positions[:, None]
        mask = torch.zeros(outside.shape, device=given.device, dtype=self._skeleton.dtype)
        plan = Plan(
            slots=slots,
            decoding=shape.rows,
            high=shape.rows,
            length=shape.length,
            mask=mask.masked_fill_(outside, float("-inf"))[:, None, None],
        )
        logits = self._skeleton.compute(
            self.weights, given[:, 0].long()[None], positions[None], self._cache, plan
        )
        self._logits[: shape.rows].copy_(logits)
        self._drawn[: shape.rows].copy_(draw_whole(logits, given[:, 2], given[:, 3]))

    def _first(self, shape: Shape) -> Replay:
        """What computes a shape that has not been captured; captures it when it is time."""

        def eager() -> None:
            self.compute(shape)

        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._capture is None or seen < AFTER:
            return eager
        try:
            replay, self._pool = self._capture(eager, self._pool)
        except FAULTS as fault:
            log.warning("CUDA graphs are off, decoding is slower: a capture failed: %s", fault)
            self._capture = None
            return eager
        self._replays[shape] = replay
        return replay


_IDLE = (0.0, 0.0, 1.0, 0.0, 0.0)
"""What a row gets that does not decode: token, position, temperature, uniform number, whether it decodes."""


def capture_cuda(compute: Callable[[], None], pool: object) -> tuple[Replay, object]:
    """Record `compute` as a CUDA graph, on a stream of its own after a warm-up there.

    Not `torch.cuda.graph`: it gives the whole process's cached memory back to the driver at each capture, and
    forbids other threads, which load weights meanwhile, to allocate any.
    """
    main, stream = torch.cuda.current_stream(), _stream()
    stream.wait_stream(main)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    with torch.cuda.stream(stream):
        compute()  # kernels are loaded and workspaces taken here, which a capture may not do
        torch.cuda.synchronize()
        # What the collector would free may itself ask the driver for what a capture forbids.
        gc.disable()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                compute()
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
    main.wait_stream(stream)
    return graph.replay, graph.pool()


_streams: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """One for all captures on a device: libraries keep a workspace for each stream they have seen."""
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _streams[device]
