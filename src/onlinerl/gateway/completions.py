"""POST /v1/completions: OpenAI's legacy completions over the live version of a policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onlinerl import observe
from onlinerl.errors import EngineError, OnlineRLError, RequestError, StoreError
from onlinerl.gateway import templates
from onlinerl.gateway.answers import Answer, Ask, Prompt, merge, new_id
from onlinerl.gateway.bodies import JSONReply, checked, error_body, error_reply, read_json, sticky
from onlinerl.gateway.service import Service, Services
from onlinerl.records import FinishReason, text_hash
from onlinerl.store import interactions
from onlinerl.store.database import Writer

log = observe.logger(component="gateway")

CHOICES = 128
"""Most sequences of one request."""
STOPS = 16
STOP_LENGTH = 256
"""Most characters of a stop string."""
_THREAD = 20_000
"""Prompts of more characters are tokenised in a thread, so that they delay nobody's tokens."""
_SHRINKING = 4
"""Normalisers (NFC, spaces) may make a text so many times shorter before it is cut into tokens."""

HARMLESS: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "logit_bias": lambda value: value == {},
    "top_k": lambda value: value in (0, -1),
    "min_p": lambda value: value == 0,
    "metadata": lambda value: isinstance(value, dict),
    "store": lambda value: value is False,
}
"""Fields that clients send whose value asks for nothing; any other value is refused."""


class CompletionRequest(BaseModel):
    """Body of POST /v1/completions. null means absent; fields that would be ignored are refused."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    model: Annotated[str, Field(max_length=512)] | None = None
    """A policy, an alias of it, or `policy@version`; any name where there is one policy."""
    prompt: Any = Field(
        default=None,
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        },
    )
    """A text, texts, token ids, or lists of token ids."""
    suffix: str | None = None
    """Text after the cursor: the prompt is put into the model's fill-in-the-middle template."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest answer; clamped to what the context leaves."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only the same as `n`."""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    """`{"include_usage": true}`."""
    stop: str | Annotated[list[str], Field(max_length=STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    """Only false."""
    user: Annotated[str, Field(max_length=256)] | None = None


class Completions:
    """The endpoint."""

    def __init__(self, services: Services, writer: Writer, *, body_limit: int) -> None:
        self._services = services
        self._writer = writer
        self._limit = body_limit

    async def create(self, request: Request) -> Response:
        """Check the request and return the answer, which samples when it is sent."""
        at, started = time.time(), time.monotonic()
        body = checked(CompletionRequest, await read_json(request, self._limit))
        _refuse(body)
        service, _ = self._services.find(body.model)
        prompts = await _prompts(service, body)
        if len(prompts) * body.n > CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n={body.n} make {len(prompts) * body.n} answers, "
                f"at most {CHOICES} are served in one request",
                parameter="n",
            )
        for prompt in prompts:
            _fits(service, len(prompt.ids))
        usage = _include_usage(body)
        stops = _stops(body.stop)
        sampling = service.settings.sampling
        ask = Ask(
            id=new_id(),
            route=await self._services.route(body.model),
            at=at,
            started=started,
            user=sticky(request.headers, body.user),
            label=request.headers.get("x-project-id", "")[:256],
            max_tokens=sampling.max_tokens if body.max_tokens is None else body.max_tokens,
            temperature=sampling.temperature if body.temperature is None else body.temperature,
            top_p=sampling.top_p if body.top_p is None else body.top_p,
            seed=body.seed,
            stops=stops,
            top_logprobs=body.logprobs,
        )
        answers = [
            Answer(ask, prompt, place * body.n + sibling, sibling)
            for place, prompt in enumerate(prompts)
            for sibling in range(body.n)
        ]
        prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        writing = _Stream if body.stream else _Whole
        return writing(self._writer, ask, answers, body.model, prompt_tokens, usage)


class _Answering(Response):
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
            if begun:
                # One that had not begun is no opportunity: nobody was given an answer to it.
                await self._leave_records()
            await self._fail(error, scope, receive, send)
        except StoreError as error:
            log.error("an interaction could not be kept", id=self._ask.id, error=str(error))
            await self._fail(error, scope, receive, send)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._leave_records()))
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

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


class _Whole(_Answering):
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
                    "logprobs": _Logprobs(answer).upto(len(answer.text)),
                    "finish_reason": answer.finish,
                }
                for answer in self._answers
            ],
            "usage": self._usage(),
            "system_fingerprint": self._ask.route.fingerprint,
        }
        await JSONReply(body, headers=self._onlinerl_headers())(scope, receive, send)


class _Stream(_Answering):
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
        logprobs = {answer.index: _Logprobs(answer) for answer in self._answers}
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


class _Logprobs:
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


def _refuse(body: CompletionRequest) -> None:
    """Raise RequestError for what would be silently ignored."""
    extra = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    refused = sorted(name for name, value in extra.items() if not HARMLESS.get(name, lambda _: False)(value))
    if refused:
        known = [name for name in refused if name in HARMLESS]
        names = ", ".join(name[:64] for name in refused[:8])
        reason = "with this value is not supported" if known == refused else "is not supported"
        raise RequestError(f"{names} {reason}: it would change the answer", parameter=refused[0][:64])
    if body.echo:
        raise RequestError("echo is not supported: the prompt is never repeated", parameter="echo")
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError(
            f"best_of={body.best_of} is not supported unless it equals n={body.n}", parameter="best_of"
        )


def _include_usage(body: CompletionRequest) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise RequestError("stream_options goes with stream=true only", parameter="stream_options")
    unknown = sorted(name for name, value in options.items() if name != "include_usage" and value)
    if unknown:
        raise RequestError(f"stream_options.{unknown[0][:64]} is not supported", parameter="stream_options")
    usage = options.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        raise RequestError("stream_options.include_usage must be true or false", parameter="stream_options")
    return bool(usage)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for one in stops:
        if not one or len(one) > STOP_LENGTH:
            raise RequestError(
                f"a stop string must have 1 to {STOP_LENGTH} characters, one has {len(one)}", parameter="stop"
            )
    return stops


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    """The request's prompts. Raises RequestError for what is not one of the four forms."""
    value = body.prompt
    if value is None:
        raise RequestError("prompt must be given", parameter="prompt")
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, list):
        raise RequestError("prompt must be a text, a list of texts, or token ids", parameter="prompt")
    elif value and all(type(item) is int for item in value):
        value = [value]
    if not value:
        raise RequestError("prompt is empty: give at least one token", parameter="prompt")
    if len(value) > CHOICES:
        raise RequestError(
            f"{len(value)} prompts were given, at most {CHOICES} are served in one request",
            parameter="prompt",
        )
    prompts = []
    for item in value:
        if isinstance(item, str):
            prompts.append(await _text_prompt(service, item, body.suffix))
        elif isinstance(item, list) and all(type(id) is int for id in item):
            if body.suffix is not None:
                raise RequestError("suffix goes with a text prompt, not with token ids", parameter="suffix")
            prompts.append(_id_prompt(service, item))
        else:
            raise RequestError(
                "prompt must be a text, a list of texts, token ids, or lists of token ids", parameter="prompt"
            )
    return prompts


async def _text_prompt(service: Service, text: str, suffix: str | None) -> Prompt:
    if suffix is not None:
        if service.template is None:
            raise RequestError(
                f"the model of {service.name!r} knows no fill-in-the-middle markers, so suffix is of no use; "
                "send the whole text as prompt",
                parameter="suffix",
            )
        text = service.template.render(text, suffix)
    elif not text:
        raise RequestError("prompt is empty: give at least one token", parameter="prompt")
    if len(text) > service.context * service.codec.longest * _SHRINKING:
        # no need to tokenise it to know that
        raise RequestError(
            f"the prompt has {len(text)} characters, far beyond the context of {service.context} tokens",
            parameter="prompt",
            code="context_length_exceeded",
        )
    if len(text) > _THREAD:
        ids = await asyncio.to_thread(service.codec.encode, text)
    else:
        ids = service.codec.encode(text)
    return _prompt(service, text, ids)


def _id_prompt(service: Service, ids: list[int]) -> Prompt:
    wrong = next((id for id in ids if not 0 <= id < service.codec.size), None)
    if wrong is not None:
        raise RequestError(
            f"token id {wrong} is outside of the vocabulary (0 to {service.codec.size - 1})",
            parameter="prompt",
        )
    _fits(service, len(ids))
    return _prompt(service, service.codec.decode(ids), ids)


def _prompt(service: Service, text: str, ids: Sequence[int]) -> Prompt:
    parts = service.template.parse(text) if service.template else None
    return Prompt(
        text=text,
        ids=tuple(ids),
        suffix_hash=text_hash(parts[1]) if parts else "",
        language=templates.language(service.template.path(text)) if service.template else "",
    )


def _fits(service: Service, length: int) -> None:
    if not length:
        raise RequestError("prompt is empty: give at least one token", parameter="prompt")
    if length >= service.context:
        raise RequestError(
            f"the prompt has {length} tokens; the context holds {service.context}, "
            "and at least one must be left for the answer",
            parameter="prompt",
            code="context_length_exceeded",
        )
