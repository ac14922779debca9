"""Continuous batching: the loop that computes passes and samples tokens, in a thread of its own.

One iteration makes one pass for each version that has work: the next token of every sequence that
decodes, and up to `prefill` prompt tokens of those that are being read. Each version has its rows of
cache to itself; a sequence stays on its version from the first token to the last.
"""

from __future__ import annotations

import math
import random
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onlinerl.errors import EngineFull, OnlineRLError, RequestError, VersionNotLoaded
from onlinerl.records import FinishReason, Generation
from onlinerl.replica.graphs import Asked, Capture, Steps
from onlinerl.replica.model import Skeleton, Weights
from onlinerl.replica.rows import Chunk, Plan, Rows, batched
from onlinerl.replica.sampling import Drawn, draw

CACHE_BYTES = 512 << 20
"""A version's cache starts with as many positions a row as fit in this, and grows when a request needs
more. On CPU it is address space: memory is taken only for what is written."""

SHARED = 16
"""A prefix shorter than this is read again rather than looked for."""

SWITCH_PREFILL = 4
"""Into how many bites `prefill` is cut while more than one version runs."""
LAUNCHES = 64
"""On a GPU, rows for each decoding one over which these are still computed as one batch. By arithmetic: a
row's own kernels (28 layers of six, 5 µs each) take 0.8 ms to launch, and 64 rows that nobody needs (1.5 B
parameters, 500 positions, 0.9 GB) 0.2 ms to read."""
IDLE_PREFILL = 4
"""While nothing decodes, nobody is stalled by a long pass: it takes this many times more prompt tokens."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a sequence; `message` says what went wrong when the reason is ERROR."""

    reason: FinishReason
    message: str = ""


@dataclass(eq=False, slots=True)
class Running:
    """A sequence on its way, from the queue to its end."""

    request: Generation
    limit: int
    """Tokens it may sample."""
    ids: list[int]
    """Prompt and sampled tokens."""
    uniform: random.Random
    row: Row | None = None
    done: int = 0
    """Tokens whose keys and values are in the row."""
    started: float = 0.0
    """When it got its row."""
    context: object = None
    """Whatever the receiver of its tokens needs."""
    prompt: int = field(init=False)
    """Length of the prompt."""

    def __post_init__(self) -> None:
        self.prompt = len(self.request.prompt_ids)


@dataclass(eq=False, slots=True)
class Row:
    """One row of a version's cache. Once its sequence is gone, it serves prompts that begin alike."""

    index: int
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values it holds, while no sequence uses it."""
    sequence: Running | None = None
    used: int = 0
    """When it was last taken: the least recently used one is given away first."""


Event = tuple[Running, Drawn | End]


class Group:
    """One version: its weights, its rows and the sequences that run on it."""

    def __init__(
        self,
        version: int,
        skeleton: Skeleton,
        weights: Weights,
        concurrency: int,
        capture: Capture | None = None,
    ) -> None:
        """With `capture`, passes that only decode have fixed shapes, which it captures; see `graphs`."""
        self.version = version
        self.skeleton = skeleton
        self.weights = weights
        self.waiting = 0
        self.leaving = False
        """Takes no new requests: forgotten when the last sequence ends."""
        fits = CACHE_BYTES // max(1, concurrency * skeleton.width * skeleton.dtype.itemsize)
        # In sixteens: GPU kernels want aligned masks.
        self._cache = Rows(concurrency, min(skeleton.context, max(512, fits // 16 * 16)))
        self._rows = [Row(index) for index in range(concurrency)]
        self._free = list(self._rows)
        self._clock = 0
        self.decoding: list[Running] = []
        """Ordered by row."""
        self.reading: list[Running] = []
        """In the order of arrival."""
        self._positions = torch.arange(skeleton.context, device=skeleton.device)
        self._dtype = skeleton.dtype
        self.batched = skeleton.device.type != "cpu"
        """Prompts that are read in one pass are attended to as one padded batch."""
        self.steps = None if capture is None else Steps(skeleton, weights, self._cache, capture)
        """Passes of fixed shapes. A group that has them is worth keeping when its version goes."""

    def renew(self, version: int, weights: Weights) -> None:
        """Become the group of another version, whose `weights` have taken the place of the old ones: what was
        captured stays valid. Only for a group that no decoder holds and nothing runs on."""
        assert self.idle
        self.version, self.weights, self.leaving = version, weights, False
        if self.steps is not None:
            self.steps.weights = weights
        for row in self._rows:
            row.ids = []  # keys and values of the old weights
        with torch.inference_mode():
            self._cache.clear()

    @property
    def running(self) -> int:
        """Sequences that own a row."""
        return len(self.decoding) + len(self.reading)

    @property
    def idle(self) -> bool:
        """Nothing runs on it or waits for it."""
        return not self.running and not self.waiting

    def admit(self, sequence: Running) -> None:
        """Give `sequence` a row; one that already holds the beginning of its prompt, if there is one."""
        needed = min(self.skeleton.context, sequence.prompt + sequence.limit)
        if needed > self._cache.capacity:
            self._cache.grow(0, min(self.skeleton.context, max(needed, 2 * self._cache.capacity)))
            if self.steps is not None:
                self.steps.invalidate()
        # A prompt's last token is always computed: the first answer token is drawn from its logits.
        prompt = sequence.ids[: sequence.prompt - 1]
        head = prompt[:SHARED]
        best, shared, source = None, 0, None
        if len(head) == SHARED:
            for row in self._free:
                if row.ids[:SHARED] == head and (length := _common(row.ids, prompt)) > shared:
                    best, shared = row, length
            for other in self.decoding + self.reading:
                if other.done > shared and other.ids[:SHARED] == head:
                    length = min(other.done, _common(other.ids, prompt))
                    if length >= SHARED and length > shared:
                        source, shared = other.row, length
        if best is None or source is not None:
            best = min(self._free, key=lambda row: row.used)
        if source is not None:
            self._cache.copy_row(source.index, best.index, shared)
        self._free.remove(best)
        self._clock += 1
        best.used, best.sequence, best.ids = self._clock, sequence, []
        sequence.row, sequence.done = best, shared
        self.reading.append(sequence)

    def release(self, sequence: Running) -> None:
        """Take the row back at once."""
        (self.decoding if sequence in self.decoding else self.reading).remove(sequence)
        row = sequence.row
        assert row is not None
        row.ids, row.sequence = sequence.ids[: sequence.done], None
        self._free.append(row)

    def step(self, budget: int) -> tuple[list[Event], int]:
        """One pass, at most `budget` prompt tokens in it; returns what came of it and how many they were."""
        decoding = self.decoding
        if self.steps is not None and decoding and (not self.reading or budget <= 0):
            return self._step(self.steps), 0
        tokens = [sequence.ids[-1] for sequence in decoding]
        positions = [sequence.done for sequence in decoding]
        rows = [sequence.row.index for sequence in decoding if sequence.row is not None]
        capacity = self._cache.capacity
        slots = [row * capacity + position for row, position in zip(rows, positions, strict=True)]
        keep = list(range(len(decoding)))
        drawing = list(decoding)
        plan = Plan(slots=self._positions)
        chunks = self._plan_decoding(plan, rows, positions)
        read = 0
        for sequence in self.reading:
            size = min(sequence.prompt - sequence.done, budget - read)
            if size <= 0:
                break
            start, row = sequence.done, sequence.row
            assert row is not None
            chunks.append(self._chunk(row.index, start, size, len(tokens)))
            tokens += sequence.ids[start : start + size]
            positions += range(start, start + size)
            slots += range(row.index * capacity + start, row.index * capacity + start + size)
            sequence.done += size
            read += size
            if sequence.done == sequence.prompt:
                keep.append(len(tokens) - 1)
                drawing.append(sequence)
        plan.chunks = batched(chunks, self.skeleton.device) if self.batched else chunks
        plan.slots = torch.tensor(slots, device=self.skeleton.device)
        logits = self.skeleton.forward(self.weights, tokens, positions, keep or [0], self._cache, plan)
        if not drawing:
            return [], read
        for sequence in decoding:
            sequence.done += 1
        return self._sample(logits, drawing), read

    def _plan_decoding(self, plan: Plan, rows: Sequence[int], positions: Sequence[int]) -> list[Chunk]:
        """One batch over the rows from the lowest to the highest; row by row, as chunks, where they lie far
        apart."""
        count = len(rows)
        if not count:
            return []
        device = self.skeleton.device
        low, high = rows[0], rows[-1] + 1
        if high - low > (2 * count if device.type == "cpu" else LAUNCHES * count):
            return [
                Chunk(row, position, 1, offset)
                for offset, (row, position) in enumerate(zip(rows, positions, strict=True))
            ]
        plan.decoding, plan.low, plan.high = count, low, high
        plan.length = max(positions) + 1
        if high - low > count:
            plan.pick = torch.tensor([row - low for row in rows], device=device)
        if high - low > count or min(positions) + 1 < plan.length:
            # Rounded up: GPU kernels want aligned masks.
            plan.length = min(self._cache.capacity, -(-plan.length // 16) * 16)
            lengths = [1] * (high - low)
            for row, position in zip(rows, positions, strict=True):
                lengths[row - low] = position + 1
            outside = self._positions[: plan.length] >= torch.tensor(lengths, device=device)[:, None]
            mask = torch.zeros(outside.shape, device=device, dtype=self._dtype)
            plan.mask = mask.masked_fill_(outside, float("-inf"))[:, None, None]
        return []

    def _chunk(self, row: int, start: int, size: int, offset: int) -> Chunk:
        if start == 0 or size == 1:
            return Chunk(row, start, size, offset, causal=size > 1)
        end = start + size
        outside = self._positions[:end] > self._positions[start:end, None]
        mask = torch.zeros(outside.shape, device=self.skeleton.device, dtype=self._dtype)
        return Chunk(row, start, size, offset, mask=mask.masked_fill_(outside, float("-inf")))

    def _step(self, steps: Steps) -> list[Event]:
        """A pass of fixed shape, which only decodes."""
        decoding = list(self.decoding)
        asked = [
            Asked(
                _row(sequence),
                sequence.ids[-1],
                sequence.done,
                sequence.request.temperature,
                sequence.uniform.random(),
            )
            for sequence in decoding
        ]
        pairs = steps.step(asked)
        for sequence in decoding:
            sequence.done += 1
        if any(s.request.top_logprobs or s.request.top_p < 1 for s in decoding):
            uniforms = [one.uniform for one in asked]
            return self._sample(steps.logits([one.row for one in asked]), decoding, uniforms)
        return self._settle(decoding, [Drawn(int(token), logprob) for token, logprob in pairs])

    def _sample(
        self, logits: Tensor, drawing: Sequence[Running], uniforms: Sequence[float] | None = None
    ) -> list[Event]:
        requests = [sequence.request for sequence in drawing]
        drawn = draw(
            logits,
            [request.temperature for request in requests],
            [request.top_p for request in requests],
            uniforms or [sequence.uniform.random() for sequence in drawing],
            [request.top_logprobs for request in requests],
        )
        return self._settle(drawing, drawn)

    def _settle(self, drawing: Sequence[Running], drawn: Sequence[Drawn]) -> list[Event]:
        """Append what was drawn; end who is at the end."""
        events: list[Event] = []
        for sequence, token in zip(drawing, drawn, strict=True):
            if not math.isfinite(token.logprob):
                self.release(sequence)
                message = f"version {self.version} gives no finite probabilities for this prompt"
                events.append((sequence, End(FinishReason.ERROR, message)))
                continue
            if len(sequence.ids) == sequence.prompt:
                self.reading.remove(sequence)
                insort(self.decoding, sequence, key=_row)
            sequence.ids.append(token.token)
            events.append((sequence, token))
            if token.token in sequence.request.stop_ids:
                self.release(sequence)
                events.append((sequence, End(FinishReason.STOP)))
            elif len(sequence.ids) - sequence.prompt >= sequence.limit:
                self.release(sequence)
                events.append((sequence, End(FinishReason.LENGTH)))
        return events


def _row(sequence: Running) -> int:
    assert sequence.row is not None
    return sequence.row.index


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:SHARED] != b[:SHARED]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Decoder(threading.Thread):
    """The loop. `submit`, `abort`, `add`, `forget` and the counts may be called from any thread."""

    def __init__(
        self,
        *,
        concurrency: int,
        queue: int,
        prefill: int,
        threads: int,
        deliver: Callable[[list[Event]], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`deliver` gets each iteration's events, `crashed` what broke the loop; both in its thread."""
        super().__init__(name="decoder", daemon=True)
        self._concurrency = concurrency
        self._queue = queue
        self._prefill = prefill
        self._threads = threads
        self._deliver = deliver
        self._crashed = crashed
        self._groups: dict[int, Group] = {}
        self._spare: Group | None = None
        self._waiting: deque[Running] = deque()
        self._aborted: list[Running] = []
        self._changed = threading.Condition()
        self._closing = False
        self._turn = 0
        self._duration = 0.5
        """Seconds from a row to the end, running mean: what a full queue tells its clients to wait."""

    # ------------------------------------------------------------------------ from other threads

    def submit(self, request: Generation, context: object) -> Running:
        """Queue a request. Raises VersionNotLoaded, RequestError (prompt), EngineFull (queue full)."""
        with self._changed:
            group = self._groups.get(request.version)
            if group is None or group.leaving:
                raise VersionNotLoaded(f"version {request.version} is not loaded here")
            length, limit = len(request.prompt_ids), group.skeleton.context
            if length == 0:
                raise RequestError("the prompt is empty", parameter="prompt")
            if length >= limit:
                raise RequestError(
                    f"the prompt has {length} tokens, which leaves no room in the context of {limit}",
                    parameter="prompt",
                )
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < group.skeleton.vocabulary:
                raise RequestError(
                    f"token ids must be from 0 to {group.skeleton.vocabulary - 1}", parameter="prompt"
                )
            if len(self._waiting) >= self._queue:
                rounds = len(self._waiting) / self._concurrency
                raise EngineFull(
                    f"{len(self._waiting)} requests wait already",
                    retry_after=round(max(0.1, rounds * self._duration), 2),
                )
            sequence = Running(
                request=request,
                limit=min(request.max_tokens, limit - length),
                ids=list(request.prompt_ids),
                uniform=random.Random(request.seed),
                context=context,
            )
            group.waiting += 1
            self._waiting.append(sequence)
            self._changed.notify()
            return sequence

    def submit_all(self, requests: Sequence[tuple[Generation, object]]) -> list[Running]:
        """Queue requests with their contexts, none of which starts before the last one is queued: so the same
        requests share the same passes every time. Raises as `submit`; then none is left in the queue."""
        with self._changed:
            queued: list[Running] = []
            try:
                for request, context in requests:
                    queued.append(self.submit(request, context))
            except OnlineRLError:
                self._aborted += queued
                raise
            return queued

    def abort(self, sequence: Running) -> None:
        """End a sequence before its next token; nothing more is delivered for it but its end."""
        with self._changed:
            self._aborted.append(sequence)
            self._changed.notify()

    def add(self, group: Group) -> None:
        """Make a version servable."""
        with self._changed:
            self._groups[group.version] = group

    def keep(self, version: int) -> bool:
        """Whether the version is there; one that was about to be forgotten stays."""
        with self._changed:
            group = self._groups.get(version)
            if group is not None:
                group.leaving = False
            return group is not None

    def forget(self, version: int) -> bool:
        """Take no more requests for a version; True once it is gone, its last sequence having ended."""
        with self._changed:
            group = self._groups.get(version)
            if group is None:
                return True
            group.leaving = True
            self._changed.notify()
            return False

    def take_spare(self, skeleton: Skeleton) -> Group | None:
        """The group of a version that was forgotten, to be renewed: nothing runs on it, and nobody else gets
        it. None where there is none of this skeleton."""
        with self._changed:
            spare, self._spare = self._spare, None
            return spare if spare is not None and spare.skeleton is skeleton else None

    def give_spare(self, group: Group) -> None:
        """Keep a group that belongs to no version for `take_spare`."""
        with self._changed:
            self._spare = group

    def counts(self) -> tuple[frozenset[int], int, int, int]:
        """Versions that take requests, sequences running, sequences waiting, versions in memory."""
        with self._changed:
            versions = frozenset(v for v, group in self._groups.items() if not group.leaving)
            running = sum(group.running for group in self._groups.values())
            return versions, running, len(self._waiting), len(self._groups)

    def close(self) -> None:
        """End the loop after the pass at hand."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    # ------------------------------------------------------------------------------- in its thread

    def run(self) -> None:
        """The loop; ends on `close`, or hands whatever broke it to `crashed`."""
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._wait():
                    self._iterate()
        except BaseException as error:  # noqa: BLE001 - the process must not live on without its loop
            self._crashed(error)

    def _wait(self) -> bool:
        with self._changed:
            while not self._closing:
                if (
                    self._waiting
                    or self._aborted
                    or any(g.running or g.leaving for g in self._groups.values())
                ):
                    return True
                self._changed.wait()
            return False

    def _iterate(self) -> None:
        events: list[Event] = []
        with self._changed:
            self._end_aborted(events)
            self._admit()
            groups = [group for group in self._groups.values() if group.running]
        busy = any(group.decoding for group in groups)
        budget = self._prefill if busy else IDLE_PREFILL * self._prefill
        if busy and len(groups) > 1:
            # A version that just came has no prompt in its cache yet, and each version costs a pass of its
            # own: while both run, prompts are read in smaller bites, so that nobody's tokens are late.
            budget = max(1, budget // SWITCH_PREFILL)
        # Turn and turn about, so that the prompts of one version never starve those of another.
        self._turn += 1
        first = self._turn % max(1, len(groups))
        for group in groups[first:] + groups[:first]:
            if group.decoding or budget > 0:
                made, read = group.step(budget)
                budget -= read
                events += made
        for sequence, event in events:
            if isinstance(event, End) and event.reason is not FinishReason.ABORT:
                self._duration += 0.1 * (time.monotonic() - sequence.started - self._duration)
        if events:
            self._deliver(events)
        with self._changed:
            for version in [
                v for v, g in self._groups.items() if g.leaving and not g.running and not g.waiting
            ]:
                group = self._groups.pop(version)
                if group.steps is not None:
                    self._spare = group

    def _end_aborted(self, events: list[Event]) -> None:
        for sequence in self._aborted:
            group = self._groups.get(sequence.request.version)
            if sequence.row is not None and sequence.row.sequence is sequence and group is not None:
                group.release(sequence)
            elif sequence in self._waiting and group is not None:
                self._waiting.remove(sequence)
                group.waiting -= 1
            else:
                continue
            events.append((sequence, End(FinishReason.ABORT)))
        self._aborted.clear()

    def _admit(self) -> None:
        room = self._concurrency - sum(group.running for group in self._groups.values())
        while self._waiting and room > 0:
            sequence = self._waiting.popleft()
            group = self._groups[sequence.request.version]
            group.waiting -= 1
            group.admit(sequence)
            sequence.started = time.monotonic()
            room -= 1


__all__ = ["Decoder", "End", "Event", "Group", "Running"]
