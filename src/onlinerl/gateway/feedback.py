"""POST /v1/feedback (native) and POST /api/training/submit (Continue, and the seed's fork of it).

Clients' events are read leniently: only what is used must have the right type, all else is optional and
kept as it came. Windows use the server's receive time, never the client's clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection
from starlette.requests import Request
from starlette.responses import Response

from onlinerl import observe
from onlinerl.errors import RequestError
from onlinerl.gateway import joins
from onlinerl.gateway.answers import PROJECT
from onlinerl.gateway.bodies import JSONReply, checked, read_json, sticky
from onlinerl.gateway.service import Services
from onlinerl.records import Event, Feedback, FeedbackStatus, Interaction, text_hash
from onlinerl.store import feedback as feedback_store
from onlinerl.store import interactions
from onlinerl.store.database import Writer

_RESERVED = "cmpl-"
"""Beginning of our own ids: a client that sends one back as its `completionId` is joined by it."""


class NativeFeedback(BaseModel):
    """Body of POST /v1/feedback. Unknown fields are kept with the row."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    id: Annotated[str, Field(min_length=1, max_length=128)]
    """`id` of the completion."""
    index: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Which of its choices."""
    event: Annotated[Event, Field(strict=False)]
    displayed_text: str | None = None
    """What the user saw, where the client cut the answer."""
    accepted_text: str | None = None
    retained_characters: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    at: Any = None
    """Kept, not used."""


class ContinueEvent(BaseModel):
    """What is used of Continue's autocomplete event, of both shapes; the rest is kept with the row."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    accepted: bool | None = None
    prompt: str | None = None
    prefix: str | None = None
    suffix: str | None = None
    completion: str | None = None
    completionId: Annotated[str, Field(max_length=256)] | None = None  # noqa: N815  the wire's name
    cacheHit: Any = None  # noqa: N815
    userId: Any = None  # noqa: N815


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of a piece of feedback."""

    status: FeedbackStatus
    by: str
    """How it was joined: id, client, prompt, text, none."""
    waiting: int = 0
    """Verdicts of the policy that wait to be trained on."""


class FeedbackRoutes:
    """Both endpoints."""

    def __init__(self, services: Services, writer: Writer, *, body_limit: int) -> None:
        self._services = services
        self._writer = writer
        self._limit = body_limit
        self._first = next(iter(services.by_name), "")

    async def native(self, request: Request) -> Response:
        """POST /v1/feedback."""
        body = await read_json(request, self._limit)
        _shallow(body)
        fields = checked(NativeFeedback, body)
        feedback = Feedback(
            source="native",
            event=fields.event,
            at=time.time(),
            project=PROJECT,
            id=fields.id,
            index=fields.index,
            user=sticky(request.headers, fields.user),
            displayed_text=fields.displayed_text,
            accepted_text=fields.accepted_text,
            retained_characters=fields.retained_characters,
            score=fields.score,
            payload=MappingProxyType(body),
        )
        done = await self._keep(feedback, count=False)
        return JSONReply({"status": done.status})

    async def submit(self, request: Request) -> Response:
        """POST /api/training/submit."""
        body = await read_json(request, self._limit)
        _shallow(body)
        feedback = continue_feedback(body, at=time.time(), headers=request.headers)
        done = await self._keep(feedback, count=True)
        return JSONReply(
            {
                "status": "submitted",
                "message": MESSAGES[done.status],
                "queue_position": done.waiting,
                "feedback": done.status,
            }
        )

    async def _keep(self, feedback: Feedback, *, count: bool) -> Recorded:
        done = await self._writer.submit(partial(self._join_and_record, feedback, count))
        observe.FEEDBACK.labels(feedback.source, feedback.event.value, done.status.value).inc()
        observe.JOINS.labels(feedback.source, done.by).inc()
        return done

    def _join_and_record(self, feedback: Feedback, count: bool, connection: Connection) -> Recorded:
        """Find the interaction and keep the feedback, in the writer's transaction."""
        if feedback.id is not None:
            return self._record_by_id(connection, feedback, count)
        found, by, displayed = self._find(connection, feedback)
        if found is not None and displayed is not None:
            # As the store knows it: a beginning of what was served. The client's own text is in the payload.
            feedback = replace(feedback, displayed_text=found.completion[:displayed])
        policy = found.policy if found else self._first
        match = (found.id, found.index) if found else None
        status = feedback_store.record(connection, feedback, match, deadline=self._deadline(policy))
        return Recorded(status, by, self._waiting(connection, policy) if count and found else 0)

    def _record_by_id(self, connection: Connection, feedback: Feedback, count: bool) -> Recorded:
        policy = self._first
        if len(self._services.by_name) > 1 and feedback.id is not None:
            named = interactions.get(connection, feedback.id, feedback.index)
            policy = named.policy if named else policy
        status = feedback_store.record(connection, feedback, None, deadline=self._deadline(policy))
        found = status is not FeedbackStatus.UNMATCHED
        waiting = self._waiting(connection, policy) if count and found else 0
        return Recorded(status, "id" if found else "none", waiting)

    def _deadline(self, policy: str) -> float:
        service = self._services.by_name.get(policy)
        # one that is no longer served has no settings of its own
        return (service or self._services.by_name[self._first]).settings.joins.deadline

    def _waiting(self, connection: Connection, policy: str) -> int:
        return interactions.counts(connection, policy=policy).waiting

    def _find(self, connection: Connection, feedback: Feedback) -> tuple[Interaction | None, str, int | None]:
        """(interaction, how it was found, characters displayed)."""
        if feedback.client_id:
            earlier = feedback_store.matched_before(
                connection, project=feedback.project, client_id=feedback.client_id
            )
            found = interactions.get(connection, *earlier) if earlier else None
            if found is not None:
                text = feedback.displayed_text
                displayed = joins.displayed(found.completion, text) if text else None
                # the id is the client's: it must at least be about the same text
                if text is None or displayed is not None or text in found.completion:
                    return found, "client", displayed
        match = self._match(connection, feedback)
        if match is None:
            return None, "none", None
        return match.interaction, match.by, match.displayed

    def _match(self, connection: Connection, feedback: Feedback) -> joins.Match | None:
        """By the texts."""
        if feedback.displayed_text is None:
            return None

        def near() -> list[Interaction]:
            if feedback.prefix is None or feedback.suffix is None:
                return []
            return self._candidates(connection, feedback, suffix_hash=text_hash(feedback.suffix))

        same = (
            self._candidates(connection, feedback, prompt_hash=text_hash(feedback.prompt))
            if feedback.prompt is not None
            else []
        )
        return joins.find(feedback, same, near, self._parse)

    def _candidates(
        self,
        connection: Connection,
        feedback: Feedback,
        *,
        prompt_hash: str | None = None,
        suffix_hash: str | None = None,
    ) -> list[Interaction]:
        windows = {name: one.settings.joins.window for name, one in self._services.by_name.items()}
        longest = max(windows.values())
        found = interactions.candidates(
            connection,
            project=feedback.project,
            since=feedback.at - longest,
            prompt_hash=prompt_hash,
            suffix_hash=suffix_hash,
        )
        return [one for one in found if one.at >= feedback.at - windows.get(one.policy, longest)]

    def _parse(self, interaction: Interaction) -> tuple[str, str] | None:
        service = self._services.by_name.get(interaction.policy)
        return service.template.parse(interaction.prompt) if service and service.template else None


MESSAGES: Mapping[FeedbackStatus, str] = {
    FeedbackStatus.MATCHED: "recorded, and joined to the completion that was served",
    FeedbackStatus.DUPLICATE: "recorded; it says again what is known",
    FeedbackStatus.LATE: "recorded; the completion was already trained on, or is too old",
    FeedbackStatus.SUPERSEDED: "recorded; a stronger verdict on the same completion stands",
    FeedbackStatus.UNMATCHED: "recorded; no completion that was served fits it",
}


def continue_feedback(body: Mapping[str, Any], *, at: float, headers: Mapping[str, str]) -> Feedback:
    """A Continue event as Feedback: the upstream envelope `{name, data, …}` or the fork's flat object.

    Continue tells no shown from ignored: `accepted: false` comes when its clock ran out (10 s). Events
    other than autocomplete (edit outcomes) are kept with their verdict, and joined to nothing.
    Raises RequestError for what carries nothing to learn from.
    """
    data = body.get("data")
    if isinstance(data, dict) and "name" in body:
        source, name = "continue", body["name"]
        if not isinstance(name, str):
            raise RequestError("name must be the event's name", parameter="name")
    elif "data" in body and "name" in body:
        raise RequestError("data must be a JSON object", parameter="data")
    else:
        source, name, data = "fork", "autocomplete", dict(body)
        if not isinstance(body.get("accepted"), bool):
            raise RequestError(
                "neither Continue's envelope {name, data} nor a flat event with accepted: true or false",
                parameter="accepted",
            )
    event = checked(ContinueEvent, data)
    if event.accepted is None and name != "autocomplete":
        raise RequestError(
            f"the event {name[:64]!r} carries no verdict: accepted is missing", parameter="data"
        )
    kind = {True: Event.ACCEPTED, False: Event.IGNORED, None: Event.SHOWN}[event.accepted]
    user = event.userId if isinstance(event.userId, str) else ""
    feedback = Feedback(
        source=source,
        event=kind,
        at=at,
        project=PROJECT,
        user=headers.get("x-user-id", "").strip()[:256] or user[:256] or sticky(headers, None),
        client_id=event.completionId or None,
        payload=MappingProxyType(dict(body)),
    )
    if name != "autocomplete":
        return replace(feedback, client_id=None)
    ours = event.completionId or ""
    return replace(
        feedback,
        id=ours if ours.startswith(_RESERVED) else None,
        prompt=event.prompt,
        prefix=event.prefix,
        suffix=event.suffix,
        displayed_text=event.completion,
        accepted_text=event.completion if event.accepted else None,
        cached=event.cacheHit is True,
    )


def _shallow(body: Mapping[str, Any]) -> None:
    """Raise RequestError for nesting that nothing downstream could write again."""
    try:
        orjson.dumps(body)
    except TypeError:
        raise RequestError("the body is nested too deeply") from None
