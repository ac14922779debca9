"""POST /admin/v1/policies/{policy}/interactions: answers that were served elsewhere, in batches (mode C).

Whoever serves the policy's weights pushes what was asked and answered: the tokens, their log-probabilities,
the version. Each item is looked at by itself: the good ones are kept, the others refused with a reason. The
same batch again changes nothing. What is too incomplete to learn from is kept and counted all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection
from starlette.requests import Request
from starlette.responses import Response

from onlinerl import observe
from onlinerl.errors import RequestError
from onlinerl.gateway.answers import PROJECT
from onlinerl.gateway.bodies import JSONReply, checked, read_json
from onlinerl.gateway.keys import Gate
from onlinerl.gateway.service import Service
from onlinerl.records import FinishReason, Interaction, text_hash
from onlinerl.store import interactions, versions
from onlinerl.store.database import Writer
from onlinerl.text import templates

ITEMS = 256
"""Most interactions of one request."""
PUSHED = "pushed"
"""The arm of what was served elsewhere: nothing was decided for it here."""

Id = Annotated[int, Field(ge=0, lt=2**31)]
LogProbability = Annotated[float, Field(le=1e-4, allow_inf_nan=False)]  # rounding may lift a certain token's


class PushedInteraction(BaseModel):
    """One answer as it was served."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    id: Annotated[str, Field(min_length=1, max_length=128)]
    """Name that feedback gives; the same again changes nothing."""
    index: Id = 0
    """Which of the request's answers."""
    version: Annotated[int, Field(ge=0, lt=2**63)]
    """The version that sampled it; 0 is the model that the policy began with."""
    prompt: str | None = None
    """Text of the prompt; decoded from `prompt_ids` where it is left out."""
    completion: str | None = None
    """Text as the user got it; decoded from `completion_ids` where it is left out."""
    prompt_ids: list[Id] | None = None
    """Tokens of the prompt, as the engine saw them. Without them it cannot be learned from."""
    completion_ids: list[Id] | None = None
    """Every sampled token, the one that ended the answer included. Without them it cannot be learned from."""
    behavior_logprobs: list[LogProbability | None] | None = None
    """For each of them its natural log-probability under what it was drawn from: after temperature and top-p.
    Without them it cannot be learned from."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    finish: Literal["stop", "length", "abort", "error"] = "stop"
    """How it ended; `abort`: the client left, `error`: the engine failed."""
    user: Annotated[str, Field(max_length=256)] = ""
    """Sticky key of who asked."""
    language: Annotated[str, Field(max_length=64)] = ""
    """Such as python; else told by the prompt, where it names a file."""
    multiline: bool = True
    """False where a stop string forbade a newline."""
    label: Annotated[str, Field(max_length=256)] = ""
    """A label of your own."""
    age: Annotated[float, Field(ge=0, le=30 * 86_400)] = 0.0
    """Seconds ago that it was asked for. Not a time: your clock and the server's need not agree."""
    duration: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Seconds from the request to the answer's end."""


class Envelope(BaseModel):
    """Body of POST …/interactions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    interactions: Annotated[list[Any], Field(min_length=1, max_length=ITEMS)]
    """At most 256, each as PushedInteraction describes it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of one item."""

    id: str | None
    index: int
    status: Literal["recorded", "duplicate", "refused"]
    reason: str = ""
    """Why it was refused, or why it cannot be learned from; "" where neither."""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {"id": self.id, "index": self.index, "status": self.status, "reason": self.reason}


class Intake:
    """The endpoint."""

    def __init__(self, gate: Gate, writer: Writer, *, body_limit: int) -> None:
        self._gate = gate
        self._writer = writer
        self._limit = body_limit

    async def push(self, request: Request) -> Response:
        """POST …/interactions: the answer leaves once all that it calls recorded is on disk."""
        service = self._gate.policy(request)
        at = time.time()
        items = checked(Envelope, await read_json(request, self._limit)).interactions
        # Decoding hundreds of answers takes longer than anybody's token may wait.
        read = await asyncio.to_thread(lambda: [_read(service, item, at) for item in items])
        taken = await self._writer.submit(partial(_keep, read))
        for one in taken:
            observe.PUSHED.labels(service.name, one.status).inc()
        return JSONReply({"results": [one.describe() for one in taken]})


def _keep(read: Sequence[Interaction | Taken], c: Connection) -> list[Taken]:
    taken = []
    for one in read:
        if isinstance(one, Taken):
            taken.append(one)
            continue
        known = interactions.get(c, one.id, one.index)
        if known is not None and _told(known) == _told(one):
            taken.append(Taken(one.id, one.index, "duplicate", known.untrainable))
        elif known is not None:
            reason = "another interaction has this id and index"
            taken.append(Taken(one.id, one.index, "refused", reason))
        elif versions.find(c, one.policy, one.version) is None:
            reason = f"version: the policy {one.policy} has no version {one.version}"
            taken.append(Taken(one.id, one.index, "refused", reason))
        else:
            interactions.insert(c, [one])
            taken.append(Taken(one.id, one.index, "recorded", one.untrainable))
    return taken


def _told(one: Interaction) -> tuple[object, ...]:
    """What must be equal where two items are the same."""
    return one.policy, one.version, one.prompt_ids, one.completion_ids, one.prompt, one.completion


def _read(service: Service, item: Any, at: float) -> Interaction | Taken:
    """One item as a record, or why it is refused."""
    fields = item if isinstance(item, dict) else {}
    id, index = fields.get("id"), fields.get("index")
    name = (id[:128] if isinstance(id, str) else None, index if type(index) is int else 0)
    if not isinstance(item, dict):
        return Taken(*name, "refused", "it must be a JSON object")
    try:
        return _record(service, checked(PushedInteraction, item), at)
    except RequestError as error:  # isolated: one bad item must not cost the good ones
        return Taken(*name, "refused", str(error))


def _record(service: Service, one: PushedInteraction, at: float) -> Interaction:
    """Raises RequestError for what contradicts itself or can be of no use at all."""
    prompt_ids, ids = tuple(one.prompt_ids or ()), tuple(one.completion_ids or ())
    wrong = next((id for id in (*prompt_ids, *ids) if id >= service.codec.size), None)
    if wrong is not None:
        raise RequestError(
            f"token id {wrong} is outside of the vocabulary (0 to {service.codec.size - 1}): "
            "is it another model's?"
        )
    if one.prompt is None and not prompt_ids:
        raise RequestError("prompt: give the prompt's text or its prompt_ids")
    if one.completion is None and one.completion_ids is None:
        raise RequestError("completion: give the answer's text or its completion_ids")
    logprobs = one.behavior_logprobs
    if logprobs is not None and len(logprobs) != len(ids):
        raise RequestError(
            f"behavior_logprobs: {len(logprobs)} of them for {len(ids)} completion_ids; each token has one"
        )
    text, offsets = _decode(service, prompt_ids, ids)
    completion = text if one.completion is None else one.completion
    prompt = service.codec.decode(prompt_ids) if one.prompt is None else one.prompt
    known = tuple(value for value in logprobs or () if value is not None)
    if one.finish == "error":
        untrainable = "the engine failed"
    elif not prompt_ids or not ids:
        untrainable = "no token ids"
    elif len(known) < len(ids):
        untrainable = "no log-probabilities"
    elif not text.startswith(completion):
        untrainable = "text and token ids do not agree"
    elif len(prompt_ids) + len(ids) > service.context:
        untrainable = "longer than the model's context"
    else:
        untrainable = ""
    parts = service.template.parse(prompt) if service.template else None
    language = one.language
    if not language and service.template:
        language = templates.language(service.template.path(prompt))
    asked = at - one.age
    return Interaction(
        id=one.id,
        index=one.index,
        policy=service.name,
        version=one.version,
        version_end=one.version,
        arm=PUSHED,
        project=PROJECT,
        user=one.user,
        at=asked,
        finished_at=asked + one.duration,
        prompt=prompt,
        prompt_ids=prompt_ids,
        completion=completion,
        completion_ids=ids,
        behavior_logprobs=known,
        offsets=tuple(min(offset, len(completion)) for offset in offsets),
        temperature=one.temperature,
        top_p=one.top_p,
        finish=FinishReason(one.finish),
        language=language,
        multiline=one.multiline,
        label=one.label,
        untrainable=untrainable,
        suffix_hash=text_hash(parts[1]) if parts else "",
    )


def _decode(service: Service, prompt_ids: Sequence[int], ids: Sequence[int]) -> tuple[str, list[int]]:
    """The answer's text as a client of the gateway would see it, and its length after each token."""
    decoder = service.codec.decoder(prompt_ids)
    text, offsets = "", []
    for number, id in enumerate(ids):
        # Only what ends an answer ends it: in the middle the same token is hidden, as any special one.
        text += decoder.push(id)
        if number == len(ids) - 1:
            text += decoder.end()
        offsets.append(len(text))
    return text, offsets
