"""/admin/v1/policies/{policy}/experiments: for those who hold the admin key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection
from starlette.requests import Request
from starlette.responses import Response

from onlinerl import config
from onlinerl.config import Settings
from onlinerl.gateway.admin import ACTOR
from onlinerl.gateway.bodies import JSONReply, checked, read_json
from onlinerl.gateway.keys import Gate
from onlinerl.loop import promotion
from onlinerl.loop.promotion import Looks
from onlinerl.records import Arm, Experiment
from onlinerl.store import experiments
from onlinerl.store.database import Database, Writer

T = TypeVar("T")


class Start(BaseModel):
    """Body of POST …/experiments."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    treatment: int | Annotated[str, Field(max_length=256)]
    """The version to be tried: its number, or `policy@version` where it is another policy's."""
    control: int | Annotated[str, Field(max_length=256)] | None = None
    """What it is tried against; the live version if left out."""
    plan: dict[str, Any] = {}
    """Settings of `policies.NAME.experiments` that hold for this one alone."""


class Stop(BaseModel):
    """Body of POST …/experiments/{id}/stop, which may be left out."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    reason: Annotated[str, Field(min_length=1, max_length=400)] = "stopped by a person"
    """Why, in a sentence."""


class Confirm(BaseModel):
    """Body of POST …/experiments/{id}/confirm, which may be left out."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    decision: Literal["promote", "futile"] | None = None
    """What is to be confirmed; anything else is a 409."""


class Experiments:
    """The endpoints. Every one of them checks the key first."""

    def __init__(
        self, gate: Gate, writer: Writer, database: Database, settings: Settings, *, body_limit: int
    ) -> None:
        self._gate = gate
        self._writer = writer
        self._database = database
        self._settings = settings
        self._limit = body_limit
        self._looks: dict[str, Looks] = {}

    async def list_(self, request: Request) -> Response:
        """GET …/experiments, oldest first."""
        policy = self._gate.policy(request).name
        found = await self._read(lambda c: experiments.list_(c, policy))
        return JSONReply([one.describe() for one in found])

    async def show(self, request: Request) -> Response:
        """GET …/experiments/{id}: with its decisions, and what its numbers say now."""
        policy = self._gate.policy(request).name
        id = self._gate.number(request, "experiment")
        looks = self._looks.setdefault(policy, Looks())
        return JSONReply(await self._read(lambda c: _told(c, policy, id, looks)))

    async def start(self, request: Request) -> Response:
        """POST …/experiments."""
        policy = self._gate.policy(request).name
        body = checked(Start, await read_json(request, self._limit))
        plan = promotion.planned(self._settings, policy, body.plan)
        control = None if body.control is None else promotion.arm(self._settings, policy, body.control)
        treatment = promotion.arm(self._settings, policy, body.treatment)
        begin = partial(self._start, policy=policy, control=control, treatment=treatment, plan=plan)
        made = await self._writer.submit(begin)
        where = f"/admin/v1/policies/{policy}/experiments/{made.id}"
        return JSONReply(made.describe(), 201, {"location": where})

    def _start(
        self, c: Connection, *, policy: str, control: Arm | None, treatment: Arm, plan: config.Experiments
    ) -> Experiment:
        return promotion.start(
            c,
            self._settings,
            policy,
            control=control,
            treatment=treatment,
            plan=plan,
            actor=ACTOR,
            now=time.time(),
        )

    async def stop(self, request: Request) -> Response:
        """POST …/experiments/{id}/stop."""
        policy = self._gate.policy(request).name
        id = self._gate.number(request, "experiment")
        body = checked(Stop, await self._optional(request))
        end = partial(promotion.stop, policy=policy, id=id, actor=ACTOR, reason=body.reason, now=time.time())
        return JSONReply((await self._writer.submit(end)).describe())

    async def confirm(self, request: Request) -> Response:
        """POST …/experiments/{id}/confirm."""
        policy = self._gate.policy(request).name
        body = checked(Confirm, await self._optional(request))
        do = partial(
            promotion.confirm,
            policy=policy,
            id=self._gate.number(request, "experiment"),
            actor=ACTOR,
            expect=body.decision,
            now=time.time(),
        )
        return JSONReply((await self._writer.submit(do)).describe())

    async def _optional(self, request: Request) -> dict[str, Any]:
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return {}
        return await read_json(request, self._limit)

    async def _read(self, what: Callable[[Connection], T]) -> T:
        def read() -> T:
            with self._database.read() as c:
                return what(c)

        return await asyncio.to_thread(read)


def _told(c: Connection, policy: str, id: int, looks: Looks) -> dict[str, Any]:
    experiment = experiments.get(c, policy, id)
    now = None
    if experiment.begun and experiment.state in experiments.OPEN:
        found = looks.at(c, experiment, time.time(), within=experiment.plan["interval"])
        now = found.decision.describe()
    decisions = [one.describe() for one in experiments.decisions(c, id)]
    return {**experiment.describe(), "now": now, "decisions": decisions}
