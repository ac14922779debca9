"""One answer while it is sampled: tokens in, text that may be shown out, an `Interaction` at the end.

Completions (and later chat) share this; they differ in how they write it to the client.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from onlinerl import observe
from onlinerl.errors import EngineError
from onlinerl.gateway.service import Route
from onlinerl.records import Finish, FinishReason, Generation, Interaction, Token
from onlinerl.text.codec import Codec

PROJECT = "default"
"""Of all requests, until keys tell projects apart."""


class Stops:
    """Finds stop strings in a stream of text, and holds back what may be the beginning of one.

    The one that is complete first wins, wherever the pieces are cut.

    >>> stops = Stops(("END",))
    >>> stops.feed("a E"), stops.feed("N"), stops.feed("x"), stops.found
    ('a ', '', 'ENx', False)
    >>> stops.feed("1END2"), stops.found
    ('1', True)
    """

    __slots__ = ("_held", "_prefixes", "_reach", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._reach = max((len(stop) - 1 for stop in stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """Text that is certainly no part of a stop string; after `found` there is no more."""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        for length in range(min(self._reach, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                self._held = text[-length:]
                return text[:-length]
        self._held = ""
        return text

    def end(self) -> str:
        """What was held back and turned out to be text."""
        rest, self._held = self._held, ""
        return rest


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as ids."""

    text: str
    ids: tuple[int, ...]
    suffix_hash: str = ""
    language: str = ""
    path: str = ""
    """Of the file that the cursor is in, where the prompt tells it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants, the same for all answers of one request."""

    id: str
    route: Route
    at: float
    """Receive time, seconds since the epoch."""
    started: float
    """Receive time on the monotonic clock."""
    user: str
    label: str
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    top_logprobs: int | None
    project: str = PROJECT
    stop_ids: tuple[int, ...] = field(init=False)
    texts: tuple[str, ...] = field(init=False)
    """The stop strings that must be looked for in the text."""

    def __post_init__(self) -> None:
        codec = self.route.service.codec
        # A stop string that is one special token never shows up in the text, since those are hidden.
        ids = (codec.added[stop] for stop in self.stops if stop in codec.added)
        object.__setattr__(self, "stop_ids", tuple(dict.fromkeys((*codec.eos_ids, *ids))))
        object.__setattr__(self, "texts", tuple(stop for stop in self.stops if stop not in codec.added))


def new_id(kind: str = "cmpl") -> str:
    """An interaction's id: not guessable, since it is all that feedback needs."""
    return f"{kind}-{secrets.token_hex(16)}"


class Answer:
    """One choice of a request. Iterate `pieces()`, then read the rest."""

    def __init__(self, ask: Ask, prompt: Prompt, index: int, sibling: int) -> None:
        """index: place among the request's choices; sibling: place among those of the same prompt."""
        service = ask.route.service
        self.ask = ask
        self.prompt = prompt
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[tuple[tuple[int, float], ...]] = []
        self.offsets: list[int] = []
        """Decoded characters after each token, text behind a stop string included."""
        self.text = ""
        """What may be shown so far: certainly before any stop string."""
        self.finish: FinishReason | None = None
        self.recorded = False
        self._decoded: list[str] = []
        self._length = 0
        self._version = ask.route.version
        self._version_end = ask.route.version
        self._codec: Codec = service.codec
        self._decoder = service.codec.decoder(prompt.ids)
        self._stops = Stops(ask.texts)
        self._last = ask.started
        seed = None if ask.seed is None else (ask.seed + sibling) % 2**63
        self.generation = Generation(
            id=f"{ask.id}:{index}",
            policy=service.name,
            version=ask.route.version,
            prompt_ids=prompt.ids,
            max_tokens=min(ask.max_tokens, service.context - len(prompt.ids)),
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=seed,
            stop_ids=ask.stop_ids,
            top_logprobs=ask.top_logprobs or 0,
        )
        self._first_token = observe.FIRST_TOKEN.labels(service.name)
        self._gap = observe.TOKEN_GAP.labels(service.name)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Text as it becomes certain, one piece a token at most; sets `finish`.

        Raises EngineError as the engine does. Closing it aborts the generation.
        """
        stream = self.ask.route.service.pool.generate(self.generation)
        try:
            async for item in stream:
                if isinstance(item, Finish):
                    self.finish = item.reason
                    break
                piece = self._take(item)
                if piece:
                    self.text += piece
                    yield piece
                if self._stops.found:
                    self.finish = FinishReason.STOP
                    break
            else:
                raise EngineError("the engine ended a stream without saying why")
        except EngineError:
            self.finish = FinishReason.ERROR
            raise
        finally:
            await stream.aclose()
        if self.finish is FinishReason.ERROR:
            raise EngineError("the engine reported an error in mid-stream")
        rest = self._close()
        if rest:
            self.text += rest
            yield rest

    def _take(self, token: Token) -> str:
        now = time.monotonic()
        if self.ids:
            self._gap.observe(now - self._last)
        else:
            self._first_token.observe(now - self._last)
            self._version = token.version
        self._last = now
        self._version_end = token.version
        self.ids.append(token.id)
        self.logprobs.append(token.logprob)
        self.tops.append(token.top)
        text = "" if token.id in self.ask.stop_ids else self._decoder.push(token.id)
        if text:
            self._decoded.append(text)
            self._length += len(text)
        self.offsets.append(self._length)
        return self._stops.feed(text) if text else ""

    def _close(self) -> str:
        if self._stops.found:
            return ""
        text = self._decoder.end()
        if text:
            self._decoded.append(text)
            self._length += len(text)
            self.offsets[-1] = self._length
            text = self._stops.feed(text)
            if self._stops.found:
                self.finish = FinishReason.STOP
                return text
        return text + self._stops.end()

    @property
    def ended(self) -> bool:
        """Whether it came to an end that is the model's or the limit's, not an accident."""
        return self.finish in (FinishReason.STOP, FinishReason.LENGTH)

    def interaction(self) -> Interaction:
        """The record. For one that was cut off, the text is all that was sampled: the client saw a part."""
        ask = self.ask
        completion = self.text if self.ended else "".join(self._decoded)
        if not self.ids:
            untrainable = "no token was sampled"
        elif not all(map(math.isfinite, self.logprobs)):
            untrainable = "the engine reported no log-probabilities"
        else:
            untrainable = ""
        return Interaction(
            id=ask.id,
            index=self.index,
            policy=ask.route.service.name,
            version=self._version,
            version_end=self._version_end,
            arm=ask.route.arm,
            project=ask.project,
            user=ask.user,
            at=ask.at,
            finished_at=max(ask.at, time.time()),
            prompt=self.prompt.text,
            prompt_ids=self.prompt.ids,
            completion=completion,
            completion_ids=tuple(self.ids),
            behavior_logprobs=tuple(self.logprobs),
            offsets=tuple(min(offset, len(completion)) for offset in self.offsets),
            temperature=ask.temperature,
            top_p=ask.top_p,
            finish=self.finish or FinishReason.ABORT,
            language=self.prompt.language,
            multiline="\n" not in ask.stops and "\r\n" not in ask.stops,
            label=ask.label,
            untrainable=untrainable,
            suffix_hash=self.prompt.suffix_hash,
            propensity=ask.route.propensity,
            experiment=ask.route.experiment,
            unit=ask.route.unit,
        )


async def merge(answers: Sequence[Answer]) -> AsyncGenerator[tuple[Answer, str | None], None]:
    """All answers at once: (answer, piece) as they come, (answer, None) at the end of each.

    The first error of any of them is raised, and the others are aborted, as they are on closing.
    """
    if len(answers) == 1:
        pieces = answers[0].pieces()
        try:
            async for piece in pieces:
                yield answers[0], piece
        finally:
            await pieces.aclose()
        yield answers[0], None
        return
    queue: asyncio.Queue[tuple[Answer, str | None] | BaseException] = asyncio.Queue()

    async def read(answer: Answer) -> None:
        pieces = answer.pieces()
        try:
            async for piece in pieces:
                queue.put_nowait((answer, piece))
        finally:
            await pieces.aclose()
        queue.put_nowait((answer, None))

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(answer)) for answer in answers]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        running = len(answers)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            running -= item[1] is None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
