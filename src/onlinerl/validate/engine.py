"""The embedded engine in this process: the same decoding loop and sampling as `onlinerl replica`, no socket.

Its versions come from folders, as everywhere, or straight from the trainer's memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onlinerl import config
from onlinerl.engines.base import EngineStatus
from onlinerl.errors import EngineError
from onlinerl.records import Finish, FinishReason, Generation, Token, Version
from onlinerl.replica.decoder import Decoder, End, Event
from onlinerl.replica.sampling import Drawn
from onlinerl.replica.versions import Versions

PREFILL = {"cpu": 2048, "cuda": 32768}
"""Prompt tokens in one pass: nobody waits for a token here, so large passes are the fastest."""
CONCURRENCY = {"cpu": 32, "cuda": 256}
"""Sequences decoded together, at least."""
LEVELS = 127
"""Of int8 on each side of 0."""
LOOK = 1.0
"""Seconds between two looks at whether the decoding loop still lives."""

Receive = Callable[[Drawn | End], None]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence. Made by `LocalEngine.sample`."""

    ids: tuple[int, ...]
    """The end-of-text token included."""
    logprobs: tuple[float, ...]
    """Behaviour log-probabilities, as `records.Token` has them."""
    reason: FinishReason


class LocalEngine:
    """One engine of one policy; implements `engines.base.Engine`, and `sample` for whole batches."""

    name = "local"

    def __init__(self, settings: config.Engine, *, batch: int, threads: int, quantise: bool = False) -> None:
        kind = "cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu"
        settings = settings.model_copy(
            update={
                "concurrency": max(batch, settings.concurrency, CONCURRENCY[kind]),
                "prefill": max(settings.prefill, PREFILL[kind]),
            }
        )
        self.settings = settings
        """What it was asked for, with the sizes that it has."""
        self._quantise = quantise
        self._failure: BaseException | None = None
        self._broken = threading.Event()
        self._decoder = Decoder(
            concurrency=settings.concurrency,
            queue=2**31,  # whoever samples batches waits for all of them anyway
            prefill=settings.prefill,
            threads=threads,
            deliver=_deliver,
            crashed=self._crash,
        )
        self._versions = Versions(settings, self._decoder, threads)
        self._decoder.start()

    # -------------------------------------------------------------------------------------- versions

    def read(self, version: int, folder: Path) -> None:
        """Load a version from a folder. Raises WeightsError, ModelError, EngineError."""
        self._versions.load(version, str(folder), "")

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make `version` servable from the trainer's tensors, by their names in a model file; they are
        copied. The first version must have come from a folder. Raises WeightsError, EngineError."""
        if self._quantise:
            linear = self._versions.linear_weights()
            tensors = {n: int8_round_trip(t) if n in linear else t for n, t in tensors.items()}
        self._versions.put(version, tensors)

    def forget(self, version: int) -> None:
        """Free a version."""
        self._versions.unload(version)

    @property
    def context(self) -> int:
        """Longest prompt plus answer, in tokens; 0 before the first version."""
        return self._versions.context

    # -------------------------------------------------------------------------------------- sampling

    def sample(self, requests: Sequence[Generation]) -> list[Rollout]:
        """Sample all of them, in the given order; the same requests and seeds give the same rollouts.

        Raises RequestError and VersionNotLoaded as `generate` does (then nothing was sampled), EngineError
        when a version gives no finite probabilities or the loop broke.
        """
        if not requests:
            return []
        box = _Box(len(requests))
        self._decoder.submit_all(
            [(request, _Place(box, place).receive) for place, request in enumerate(requests)]
        )
        while not box.done.wait(LOOK):
            if self._broken.is_set():
                raise EngineError(f"the decoding loop broke: {self._failure}") from self._failure
        return [place.rollout() for place in box.places]

    async def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """One sequence, token by token; see `engines.base.Engine`."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Drawn | End] = asyncio.Queue()

        def receive(item: Drawn | End) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        sequence = self._decoder.submit(request, receive)
        try:
            while True:
                try:
                    item = await asyncio.wait_for(queue.get(), LOOK)
                except TimeoutError:
                    if self._broken.is_set():
                        raise EngineError(f"the decoding loop broke: {self._failure}") from self._failure
                    continue
                if isinstance(item, End):
                    if item.reason is FinishReason.ERROR:
                        raise EngineError(item.message)
                    yield Finish(item.reason)
                    return
                yield Token(item.token, item.logprob, request.version, item.top)
        finally:
            self._decoder.abort(sequence)  # does nothing where it has ended

    async def status(self) -> EngineStatus:
        """What it holds and does."""
        versions, running, waiting, _ = self._decoder.counts()
        return EngineStatus(versions, running, waiting, self.context)

    async def load(self, version: Version) -> None:
        """A version from its folder, its digests checked."""
        await asyncio.to_thread(self._versions.load, version.id, version.url, version.digest)

    async def unload(self, version: int) -> None:
        """Free a version; its sequences end first."""
        await asyncio.to_thread(self._versions.unload, version)

    async def close(self) -> None:
        """End the loop."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """End the loop after the pass at hand."""
        self._decoder.close()
        self._decoder.join()

    def _crash(self, error: BaseException) -> None:
        self._failure = error
        self._broken.set()


def int8_round_trip(weight: Tensor) -> Tensor:
    """`weight` [out, in] as an int8 engine has it: each row in steps of its largest absolute value / 127."""
    weight = weight.detach().float()
    step = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LEVELS
    return torch.round(weight / step).clamp(-LEVELS, LEVELS) * step


def _deliver(events: list[Event]) -> None:
    for sequence, item in events:
        receive: Receive = sequence.context  # type: ignore[assignment]  # both kinds of request give one
        receive(item)


class _Box:
    """Collects what comes of a batch. Filled in the decoder's thread."""

    def __init__(self, count: int) -> None:
        self.places: list[_Place] = []
        self.open = count
        self.done = threading.Event()


class _Place:
    """One sequence of a batch."""

    __slots__ = ("box", "end", "ids", "logprobs")

    def __init__(self, box: _Box, place: int) -> None:
        self.box = box
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.end: End | None = None
        assert place == len(box.places)
        box.places.append(self)

    def receive(self, item: Drawn | End) -> None:
        if isinstance(item, Drawn):
            self.ids.append(item.token)
            self.logprobs.append(item.logprob)
            return
        self.end = item
        self.box.open -= 1
        if not self.box.open:
            self.box.done.set()

    def rollout(self) -> Rollout:
        assert self.end is not None
        if self.end.reason is FinishReason.ERROR:
            raise EngineError(self.end.message)
        return Rollout(tuple(self.ids), tuple(self.logprobs), self.end.reason)
