"""How answers are written to the client, whole or streamed, and recorded before their last piece leaves."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onlinerl import observe
from onlinerl.errors import EngineError, OnlineRLError, StoreError
from onlinerl.gateway.answers import Answer, Ask, merge
from onlinerl.gateway.bodies import JSONReply, error_body, error_reply
from onlinerl.records import FinishReason
from onlinerl.store import interactions
from onlinerl.store.database import Writer

log = observe.logger(component="gateway")


class Answering(Response, ABC):
    """Samples while it is being sent. Notices that the client left, and always leaves records behind."""

    def __init__(
        self,
        writer: Writer,
        ask: Ask,
        answers: list[Answer],
        model: str | None,
        prompt_tokens: int,
        usage: bool,
    ) -> None:
        self._writer = writer
        self._ask = ask
        self._answers = answers
        self._model = model or ask.route.service.name
        self._created = int(ask.at)
        self._prompt_tokens = prompt_tokens
        self._include_usage = usage
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        policy = self._ask.route.service.name
        observe.OPEN_ANSWERS.labels(policy).inc()
        work = asyncio.create_task(self._answer(scope, receive, send))
        watch = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
            if not work.cancelled():
                work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            # after a cancellation from outside (the server shuts down) too: what was sampled is kept
            await asyncio.gather(work, watch, return_exceptions=True)
            observe.OPEN_ANSWERS.labels(policy).dec()
            observe.PROMPT_TOKENS.labels(policy).inc(self._prompt_tokens)
            observe.SAMPLED_TOKENS.labels(policy).inc(self._sampled())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except EngineError as error:
            begun = any(answer.ids for answer in self._answers)
            policy = self._ask.route.service.name
            observe.ENGINE_FAILURES.labels(policy, "midway" if begun else "before").inc()
            log.warning("engine failed a request", id=self._ask.id, begun=begun, error=str(error))
            if begun or self._ask.route.experiment is not None:
                # One that had not begun is no opportunity, since nobody was given an answer to it. But in an
                # experiment a version that answers nobody must show: there each assigned request counts.
                await self._leave_records()
            await self._fail(error, scope, receive, send)
        except StoreError as error:
            log.error("an interaction could not be kept", id=self._ask.id, error=str(error))
            await self._fail(error, scope, receive, send)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._leave_records()))
            raise

    @abstractmethod
    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sample, record, send."""

    async def _fail(self, error: OnlineRLError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_reply(error)(scope, receive, send)

    async def _record(self, answers: Sequence[Answer]) -> None:
        """Make the answers durable. Raises StoreError."""
        rows = [answer.interaction() for answer in answers]
        await self._writer.submit(partial(_insert, rows))
        for answer, row in zip(answers, rows, strict=True):
            answer.recorded = True
            observe.INTERACTIONS.labels(row.policy, str(row.version), row.finish.value).inc()

    async def _leave_records(self) -> None:
        """Keep what was sampled of answers that did not reach the client whole."""
        rest = [answer for answer in self._answers if not answer.recorded]
        if not rest:
            return
        try:
            await self._record(rest)
        except StoreError as error:
            log.error("an interaction could not be kept", id=self._ask.id, error=str(error))

    def _onlinerl_headers(self) -> dict[str, str]:
        return {
            "x-onlinerl-version": str(self._ask.route.version),
            "x-onlinerl-arm": self._ask.route.arm,
            "x-request-id": self._ask.id,
        }

    def _sampled(self) -> int:
        return sum(len(answer.ids) for answer in self._answers)

    def _usage(self) -> dict[str, int]:
        sampled = self._sampled()
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self._prompt_tokens + sampled,
        }


class Whole(Answering):
    """The answer in one piece."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(merge(self._answers)) as pieces:
            async for _ in pieces:
                pass
        await self._record(self._answers)
        body = {
            "id": self._ask.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "text": answer.text,
                    "index": answer.index,
                    "logprobs": Logprobs(answer).upto(len(answer.text)),
                    "finish_reason": answer.finish,
                }
                for answer in self._answers
            ],
            "usage": self._usage(),
            "system_fingerprint": self._ask.route.fingerprint,
        }
        await JSONReply(body, headers=self._onlinerl_headers())(scope, receive, send)


class Stream(Answering):
    """Server-sent events: one for each token that brings text, one for each choice's end."""

    def __init__(
        self,
        writer: Writer,
        ask: Ask,
        answers: list[Answer],
        model: str | None,
        prompt_tokens: int,
        usage: bool,
    ) -> None:
        super().__init__(writer, ask, answers, model, prompt_tokens, usage)
        self._started = False
        head = {
            "id": ask.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": ask.route.fingerprint,
        }
        # All that stays the same is written once: a token costs only its own text.
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        logprobs = {answer.index: Logprobs(answer) for answer in self._answers}
        wanted = self._ask.top_logprobs is not None
        async with aclosing(merge(self._answers)) as pieces:
            async for answer, piece in pieces:
                if piece is None:
                    await self._record((answer,))
                    await self._event(send, answer.index, "", None, answer.finish)
                else:
                    shown = logprobs[answer.index].upto(len(answer.text)) if wanted else None
                    await self._event(send, answer.index, piece, shown, None)
        if self._include_usage:
            usage = orjson.dumps(self._usage())
            await self._send(send, self._head + b'],"usage":' + usage + b"}\n\n")
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _event(
        self,
        send: Send,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish: FinishReason | None,
    ) -> None:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            orjson.dumps(text),
            b"null" if logprobs is None else orjson.dumps(logprobs),
            b"null" if finish is None else orjson.dumps(finish),
        )
        await self._send(send, self._head + choice + self._tail)

    async def _send(self, send: Send, body: bytes) -> None:
        if not self._started:
            # Not before the first token: until then a failure can still be told by the status.
            self._started = True
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **self._onlinerl_headers(),
            }
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _fail(self, error: OnlineRLError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await super()._fail(error, scope, receive, send)
            return
        # No [DONE] after it: the answer is not whole.
        event = b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": False})


class Logprobs:
    """OpenAI's legacy `logprobs` of one answer, handed out in step with its text.

    `text_offset` counts characters of the answer's text. Tokens that bring no shown text (end of text,
    stop strings) are left out.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._next = 0

    def upto(self, shown: int) -> dict[str, Any] | None:
        """Those of the tokens whose text lies within the first `shown` characters and was not yet told."""
        answer = self._answer
        if answer.ask.top_logprobs is None:
            return None
        codec = answer.ask.route.service.codec
        tokens: list[str] = []
        chosen: list[float] = []
        tops: list[dict[str, float]] = []
        starts: list[int] = []
        while self._next < len(answer.ids):
            place = self._next
            start = answer.offsets[place - 1] if place else 0
            # a stop string may begin inside a token, which then is shown in part
            if start >= shown or (answer.offsets[place] > shown and not answer.ended):
                break
            token = codec.token_text(answer.ids[place])
            logprob = _number(answer.logprobs[place])
            best = {codec.token_text(id): _number(value) for id, value in answer.tops[place]}
            tokens.append(token)
            chosen.append(logprob)
            tops.append({**best, token: logprob})
            starts.append(start)
            self._next += 1
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": starts}


def _number(logprob: float) -> float:
    # JSON has no infinity; OpenAI's own floor
    return max(logprob, -9999.0)


def _insert(rows: Sequence[Any], connection: Any) -> None:
    interactions.insert(connection, rows)


async def _left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
