"""How an experiment goes on: looks at its numbers, decides, and writes down what follows.

    waiting candidate ──start──▶ arms load ──begin──▶ looks: abort | ramp | propose | promote | give up

All that it decides is in `experiments.decisions`, all that it changes in `store.experiments`; here is who
looks when. It waits for no engine, and several servers of one store may look at the same experiment: who
comes second finds it moved, and looks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from sqlalchemy.engine import Connection

from onlinerl import config
from onlinerl.config import Settings
from onlinerl.errors import Conflict, NotFound, RequestError, StoreError
from onlinerl.experiments import analysis, guardrails
from onlinerl.experiments.analysis import Reading
from onlinerl.experiments.assignment import CONTROL, TREATMENT
from onlinerl.experiments.decisions import decide
from onlinerl.experiments.guardrails import Guard
from onlinerl.loop.publisher import successor
from onlinerl.observe import EXPERIMENT, EXPERIMENTS, logger
from onlinerl.records import Arm, Decision, DecisionKind, Experiment, ExperimentState
from onlinerl.store import experiments as store
from onlinerl.store import interactions, versions
from onlinerl.store.database import Database
from onlinerl.store.experiments import Habits

LOADING = 600.0
"""Seconds in which engines that serve the control must have loaded the treatment."""
KEPT = 50
"""A look that changes nothing is kept when a stage has grown by one part in so many since the last that was:
close together at first, where the interval narrows fast, and some five hundred in a stage at most."""
REST = 10.0
"""Looks rest so many times as long as the last one took."""
FIXED = frozenset({"holdout"})
"""Settings that are the policy's, and no single experiment's."""

ENDS: Mapping[DecisionKind, ExperimentState] = MappingProxyType(
    {
        DecisionKind.PROMOTE: ExperimentState.PROMOTED,
        DecisionKind.FUTILE: ExperimentState.FUTILE,
        DecisionKind.ABORT: ExperimentState.ABORTED,
        DecisionKind.STOP: ExperimentState.STOPPED,
    }
)
"""State in which a decision leaves an experiment; those that are missing let it go on."""

log = logger(component="promotion")


# ------------------------------------------------------------------------------------------- starting


def arm(settings: Settings, policy: str, name: str | int) -> Arm:
    """The arm that a person names: a version of the policy, `policy@version`, or `upstream:name`.

    Raises RequestError for what is no such name, NotFound for a policy that is not served.
    """
    text = str(name)
    if text.startswith("upstream:"):
        raise RequestError(
            f"{text[:80]} cannot take part: upstream services are not routed to yet; name a version"
        )
    other, at, version = text.rpartition("@")
    other = other if at else policy
    if not (version.isascii() and version.isdecimal() and len(version) < 19):
        raise RequestError(f"{text[:80]!r} is no arm: write a version such as 3, or policy@3")
    if other not in settings.policies:
        raise NotFound(f"there is no policy {other[:80]!r}; there are {', '.join(settings.policies)}")
    return Arm(other, int(version))


def planned(settings: Settings, policy: str, changes: Mapping[str, Any]) -> config.Experiments:
    """The policy's plan with `changes` to it. Raises RequestError that names what is wrong.

    All that a plan holds is numbers, choices and names of users: no code, and no path.
    """
    fixed = sorted(FIXED & changes.keys())
    if fixed:
        raise RequestError(
            f"{fixed[0]} is a setting of the policy, not of one experiment: set "
            f"policies.{policy}.experiments.{fixed[0]}",
            parameter=fixed[0],
        )
    mine = settings.policies[policy].experiments.model_dump(mode="json")
    guards = changes.get("guardrails", {})
    merged = {**mine, **changes}
    if isinstance(guards, Mapping):
        merged["guardrails"] = {**mine["guardrails"], **guards}
    try:
        return config.Experiments.model_validate(merged)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        said = "is no setting of an experiment" if fault["type"] == "extra_forbidden" else fault["msg"]
        raise RequestError(f"plan.{where[:80]}: {said}", parameter="plan") from None


def start(
    c: Connection,
    settings: Settings,
    policy: str,
    *,
    control: Arm | None,
    treatment: Arm,
    plan: config.Experiments,
    actor: str,
    now: float,
) -> Experiment:
    """Start an experiment of the policy; without a `control` against the live version.

    Raises what `store.experiments.start` does.
    """
    mine = settings.policies[policy]
    return store.start(
        c,
        policy=policy,
        control=control or Arm(policy, versions.live(c, policy).id),
        treatment=treatment,
        plan=plan.model_dump(mode="json"),
        rewards=mine.rewards.model_dump(mode="json"),
        tau=interactions.tau(c, policy=policy, settings=mine) if plan.tau == "auto" else plan.tau,
        alpha=analysis.spend(plan.alpha, store.number(c, policy) + 1),
        actor=actor,
        now=now,
    )


def stop(c: Connection, policy: str, id: int, *, actor: str, reason: str, now: float) -> Experiment:
    """End one: its canary is rejected. Raises NotFound, and Conflict for one that has ended."""
    experiment = store.get(c, policy, id)
    decision = Decision(DecisionKind.STOP, reason, at=now, actor=actor, stage=experiment.stage)
    return store.finish(c, experiment, ExperimentState.STOPPED, decision, now)


def confirm(
    c: Connection, policy: str, id: int, *, actor: str, now: float, expect: str | None = None
) -> Experiment:
    """Do what a waiting experiment proposes. Raises NotFound; Conflict where it proposes nothing, or not
    what is expected."""
    experiment = store.get(c, policy, id)
    proposed = store.proposal(c, experiment)
    if expect is not None and proposed.kind.value != expect:
        raise Conflict(f"experiment {id} of {policy} proposes to {proposed.kind}, not to {expect}")
    decision = replace(proposed, at=now, actor=actor, proposed=False)
    return store.finish(c, experiment, ENDS[proposed.kind], decision, now)


# -------------------------------------------------------------------------------------------- looking


@dataclass(frozen=True, slots=True)
class Look:
    """What an experiment's numbers say at one moment. Made by `Looks`, eaten by `Promotion` and people."""

    reading: Reading
    guards: tuple[Guard, ...]
    imbalance: float
    decision: Decision


class Looks:
    """Looks at experiments, and remembers what is the same at each look: what users did before."""

    def __init__(self) -> None:
        self._habits: tuple[int, Habits] | None = None
        self._last: tuple[Experiment, float, Look] | None = None

    def at(self, c: Connection, experiment: Experiment, now: float, *, within: float = 0.0) -> Look:
        """Read the present stage of one that has begun; a look of the last `within` seconds will do.

        It reads all that was asked in the stage: half a second of work for 300,000 answers.
        """
        if self._last is not None and self._last[0] == experiment and now - self._last[1] < within:
            return self._last[2]
        if self._habits is None or self._habits[0] != experiment.id:
            self._habits = experiment.id, store.habits(c, experiment)
        arms = store.observations(c, experiment, now, before=self._habits[1])
        control, treatment = arms[CONTROL], arms[TREATMENT]
        plan = config.Experiments.model_validate(dict(experiment.plan))
        reading = analysis.read(control, treatment, alpha=experiment.alpha, tuned=plan.tuned)
        guards = guardrails.watch(control, treatment, plan)
        p = float(analysis.imbalance((control.units, treatment.units), experiment.share))
        found = Look(reading, guards, p, decide(experiment, reading, guards, p, now))
        self._last = experiment, now, found
        return found


def now(c: Connection, experiment: Experiment) -> Look | None:
    """A look at this moment; None for one that has not begun, or has ended."""
    if not experiment.begun or experiment.state not in store.OPEN:
        return None
    return Looks().at(c, experiment, time.time())


class Promotion:
    """Takes a policy's experiments forward: `run()` until cancelled, or `tick()` by hand."""

    def __init__(
        self,
        policy: str,
        settings: Settings,
        database: Database,
        *,
        holds: Callable[[Arm], bool] = lambda _: True,
        fault: Callable[[Arm], str | None] = lambda _: None,
    ) -> None:
        """holds: whether a request for the arm would find an engine now; fault: why it never will."""
        self.policy = policy
        self._settings = settings
        self._database = database
        self._holds = holds
        self._fault = fault
        self._looks = Looks()
        self._pause = settings.policies[policy].experiments.interval

    async def run(self) -> None:
        """Look every `interval` seconds."""
        while True:
            started = time.monotonic()
            try:
                await self.tick(time.time())
            except (StoreError, Conflict, NotFound) as error:
                # isolated: the disk may be free again at the next look; what a person moved stays so
                log.warning("no look at the experiment", policy=self.policy, error=str(error))
            await asyncio.sleep(max(self._pause, REST * (time.monotonic() - started)))

    async def tick(self, now: float) -> None:
        """One look at time `now`."""
        await asyncio.to_thread(self._look, now)

    def _look(self, now: float) -> None:
        with self._database.read() as c:
            experiment = store.running(c, self.policy)
        EXPERIMENT.labels(self.policy).set(0 if experiment is None else experiment.id)
        mine = self._settings.policies[self.policy].experiments
        self._pause = mine.interval if experiment is None else experiment.plan["interval"]
        if experiment is None:
            self._start(now)
        elif why := self._unservable(experiment, now):
            self._act(experiment, Decision(DecisionKind.ABORT, why, at=now, stage=experiment.stage), now)
        elif experiment.begun:
            self._follow(experiment, now)
        else:
            self._begin(experiment, now)

    # ---------------------------------------------------------------------------------- at its start

    def _start(self, now: float) -> None:
        """Let the newest candidate that may follow the live version prove itself."""
        if self._settings.policies[self.policy].publish != "experiment":
            return
        with self._database.read() as c:
            candidate = successor({version.id: version for version in versions.list_(c, self.policy)})
        if candidate is None:
            return
        treatment = Arm(self.policy, candidate.id)
        why = self._fault(treatment)
        if why is not None:
            log.warning("no experiment", policy=self.policy, version=candidate.id, reason=why)
            return
        with self._database.write() as c:
            started = start(
                c,
                self._settings,
                self.policy,
                control=None,
                treatment=treatment,
                plan=self._settings.policies[self.policy].experiments,
                actor="promotion",
                now=now,
            )
        log.info("experiment", policy=self.policy, id=started.id, treatment=treatment.name)

    def _begin(self, experiment: Experiment, now: float) -> None:
        """Start its clock once both arms can be served here. Until then nobody is assigned."""
        if self._holds(experiment.control) and self._holds(experiment.treatment):
            with self._database.write() as c:
                store.begin(c, experiment, now)
            log.info("experiment begins", policy=self.policy, id=experiment.id)

    def _unservable(self, experiment: Experiment, now: float) -> str:
        """Why an arm never will be served; "" where nothing is known against them."""
        for one in (experiment.control, experiment.treatment):
            why = self._fault(one)
            if why is not None:
                return f"{one.name} cannot be served: {why}"
        late = not experiment.begun and now - experiment.created_at > LOADING
        # Engines that serve nothing at all are another trouble, and none of the version's.
        if late and self._holds(experiment.control) and not self._holds(experiment.treatment):
            return f"{experiment.treatment.name} could not be loaded within {LOADING:.0f} s"
        return ""

    # ------------------------------------------------------------------------------------- on its way

    def _follow(self, experiment: Experiment, now: float) -> None:
        with self._database.read() as c:
            decision = self._looks.at(c, experiment, now).decision
            last = store.last(c, experiment.id)
        if decision.kind is DecisionKind.CONTINUE:
            rest = max(self._pause, (now - experiment.stage_at) / KEPT)
            if last.stage == experiment.stage and now - last.at < rest:
                return
        self._act(experiment, decision, now)

    def _act(self, experiment: Experiment, decision: Decision, now: float) -> None:
        """Write a decision and what follows from it."""
        with self._database.write() as c:
            if decision.proposed:
                store.wait(c, experiment, decision)
            elif decision.kind is DecisionKind.RAMP:
                store.ramp(c, experiment, decision, now)
            elif decision.kind in ENDS:
                store.finish(c, experiment, ENDS[decision.kind], decision, now)
            else:
                store.record(c, experiment.id, decision)
                return
        EXPERIMENTS.labels(self.policy, decision.kind.value).inc()
        log.info(
            "experiment decided",
            policy=self.policy,
            id=experiment.id,
            decision=decision.kind.value,
            proposed=decision.proposed,
            reason=decision.reason,
        )
