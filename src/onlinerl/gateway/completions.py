"""POST /v1/completions: OpenAI's legacy completions over the live version of a policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from onlinerl.errors import RequestError
from onlinerl.experiments.assignment import EXPLORE
from onlinerl.gateway import arms
from onlinerl.gateway.answers import PROJECT, Answer, Ask, Prompt, new_id
from onlinerl.gateway.bodies import checked, read_json, sticky
from onlinerl.gateway.replies import Stream, Whole
from onlinerl.gateway.service import Route, Service, Services
from onlinerl.records import text_hash
from onlinerl.store.database import Writer
from onlinerl.text import templates

CHOICES = 128
"""Most sequences of one request."""
PATH = 256
"""Most characters, the last ones, of a path that tells file sessions apart."""
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
        id, user = new_id(), sticky(request.headers, body.user)
        label = request.headers.get("x-project-id", "")[:256]
        asked = arms.Asked(
            id=id,
            user=user,
            project=label or PROJECT,
            path=prompts[0].path[-PATH:],
            at=at,
            repeatable=body.seed is not None or body.temperature == 0,
        )
        live = await self._services.route(body.model)
        route = arms.draw(live, asked, self._services)
        if route.service is not service:
            route, prompts = await _translated(route, live, prompts, body)
        temperature, top_p = _sampling(route, body)
        sampling = route.service.settings.sampling
        ask = Ask(
            id=id,
            route=route,
            at=at,
            started=started,
            user=user,
            label=label,
            max_tokens=sampling.max_tokens if body.max_tokens is None else body.max_tokens,
            temperature=temperature,
            top_p=top_p,
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
        writing = Stream if body.stream else Whole
        return writing(self._writer, ask, answers, body.model, prompt_tokens, usage)


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


async def _translated(
    route: Route, live: Route, prompts: list[Prompt], body: CompletionRequest
) -> tuple[Route, list[Prompt]]:
    """The prompts for the other policy that the arm is of, in its template and tokens.

    Where they cannot be put so, or do not fit, live serves them as they are; the arm stays in the record.
    """
    try:
        moved = [await _moved(prompt, live.service, route.service) for prompt in prompts]
    except RequestError:
        return replace(route, service=live.service, version=live.version), prompts
    return route, moved


async def _moved(prompt: Prompt, here: Service, there: Service) -> Prompt:
    """One prompt of a policy as another one's. Raises RequestError where that is not possible."""
    parts = here.template.parse(prompt.text) if here.template and here.template != there.template else None
    moved = await (
        _text_prompt(there, prompt.text, None) if parts is None else _text_prompt(there, parts[0], parts[1])
    )
    _fits(there, len(moved.ids))
    return moved


def _sampling(route: Route, body: CompletionRequest) -> tuple[float, float]:
    """(temperature, top-p): as the request asks, else as the policy does; 1 and 1 where it explores."""
    if route.arm == EXPLORE:
        return 1.0, 1.0
    default = route.service.settings.sampling
    return (
        default.temperature if body.temperature is None else body.temperature,
        default.top_p if body.top_p is None else body.top_p,
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
    path = service.template.path(text) if service.template else ""
    return Prompt(
        text=text,
        ids=tuple(ids),
        suffix_hash=text_hash(parts[1]) if parts else "",
        language=templates.language(path),
        path=path,
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
