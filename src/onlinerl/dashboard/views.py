"""From the store's records to what a page draws, as JSON. Reads one snapshot; nothing here is anybody's text
but in `interaction`, which is asked for with the admin key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy.engine import Connection

from onlinerl import config, worth
from onlinerl.dashboard.lineage import lanes
from onlinerl.dashboard.past import Past
from onlinerl.dashboard.words import bounds, name, verdict
from onlinerl.records import (
    Decision,
    DecisionKind,
    Experiment,
    ExperimentState,
    Run,
    RunState,
    Step,
    Version,
    VersionState,
)
from onlinerl.store import charts, experiments, interactions, runs, tallies, versions
from onlinerl.store.charts import Served, Slice
from onlinerl.text.templates import TEMPLATES

LISTED = 40
"""Versions on the page; more are in `onlinerl versions list`."""
LINES = 6
"""Versions with a curve of their own."""
PAST = 8
"""Ended experiments, and runs, that are listed."""
CONTEXT = 400
"""Characters of a prompt before the cursor, and a quarter of it after, that are shown."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that can be chosen, and the width of its slices, in seconds."""

    seconds: float
    width: float
    words: str


SPANS: Mapping[str, Span] = {
    "hour": Span(3600, 60, "the last hour"),
    "day": Span(86_400, 900, "the last 24 hours"),
    "week": Span(7 * 86_400, 7200, "the last 7 days"),
}


# ---------------------------------------------------------------------------------------- the board


def board(
    c: Connection, policy: str, settings: config.Policy, span: Span, now: float, past: Past
) -> dict[str, Any]:
    """All of the page that needs no key."""
    until = (math.floor(now / span.width) + 1) * span.width
    since = until - span.seconds
    slices = past.traffic(c, policy=policy, since=since, until=until, width=span.width, now=now)
    feedback = past.statuses(c, since=since, span=span.words)
    known = versions.list_(c, policy)
    live = next((one for one in known if one.state is VersionState.LIVE), None)
    previous = versions.previous(c, policy)
    open_ = experiments.running(c, policy)
    recent = charts.recent_runs(c, policy=policy, limit=PAST)
    counts = interactions.counts(c, policy=policy)
    tau, origin = _tau(settings, open_, recent, counts.accepted, counts.opportunities)
    weight = settings.rewards.timeout_weight
    ended = [
        experiments.get(c, policy, id)
        for id in charts.recent_experiments(c, policy=policy, limit=PAST)
        if open_ is None or id != open_.id
    ]
    shown = open_ or (ended[0] if ended else None)
    return {
        "policy": policy,
        "span": {"since": since, "until": until, "width": span.width, "words": span.words},
        "tau": {"value": tau, "origin": origin},
        "totals": asdict(counts),
        "window": _summary(slices, tau, weight),
        "by_version": {str(id): _summary(mine, tau, weight) for id, mine in _grouped(slices).items()},
        "series": _series(slices, since, span, min(now, until), tau, weight),
        "changes": [asdict(one) for one in charts.changes(c, policy=policy, since=since)],
        "feedback": {status.value: n for status, n in feedback.items()},
        "live": None if live is None else live.id,
        "live_at": None if live is None else live.live_at,
        "previous": None if previous is None else previous.id,
        "versions": _versions(known, tallies.by_version(c, policy)),
        "publish": settings.publish,
        "code": settings.dashboard.code,
        "experiment": None if shown is None else _experiment(c, shown),
        "experiments": [_ended(c, one) for one in ended],
        "runs": [_run(one, now) for one in recent],
        "run": None if not recent else _progress(c, recent[0], now),
    }


def _tau(
    settings: config.Policy, open_: Experiment | None, recent: Sequence[Run], accepted: int, asked: int
) -> tuple[float, str]:
    """The τ that the page's rewards are taken at, one for all versions, and whose it is."""
    if open_ is not None:
        return open_.tau, f"experiment {open_.id}"
    if recent:
        return recent[0].tau, f"run {recent[0].id}"
    return worth.tau(settings, accepted, asked), "a run that starts now"


def tau(c: Connection, policy: str, settings: config.Policy) -> float:
    """The τ that the page's rewards are taken at now."""
    counts = tallies.totals(c, policy)
    recent = charts.recent_runs(c, policy=policy, limit=1)
    open_ = experiments.running(c, policy)
    return _tau(settings, open_, recent, counts["accepted"], counts["opportunities"])[0]


def _grouped(slices: Sequence[Slice]) -> dict[int, list[Slice]]:
    found: dict[int, list[Slice]] = {}
    for one in slices:
        found.setdefault(one.version, []).append(one)
    return dict(sorted(found.items()))


def _summary(slices: Sequence[Slice], tau: float, weight: float) -> dict[str, float | None]:
    """Counts of some slices together, the accept rate of shown answers, the reward per opportunity."""
    total = {
        key: sum(getattr(one, key) for one in slices)
        for key in ("opportunities", "shown", "silent", "accepted", "rejected", "timeout", "mute")
    }
    return {**total, "rate": _rate(total), "reward": _reward(total, tau, weight)}


def _rate(counts: Mapping[str, int]) -> float | None:
    return counts["accepted"] / counts["shown"] if counts["shown"] else None


def _reward(counts: Mapping[str, int], tau: float, weight: float) -> float | None:
    """By verdicts alone: accept 1−τ, reject −τ, timeout its weight of that, all else 0."""
    if not counts["opportunities"]:
        return None
    refused = counts["rejected"] + counts["mute"] + weight * (counts["timeout"] - counts["mute"])
    return (counts["accepted"] * (1.0 - tau) - refused * tau) / counts["opportunities"]


def _series(
    slices: Sequence[Slice], since: float, span: Span, now: float, tau: float, weight: float
) -> dict[str, Any]:
    """Curves of the newest versions with traffic, on one axis of slices that ends now."""
    number = max(1, math.ceil((now - since) / span.width))
    starts = [since + place * span.width for place in range(number)]
    lines = []
    for id, mine in list(_grouped(slices).items())[-LINES:]:
        at = {round((one.start - since) / span.width): asdict(one) for one in mine}
        lines.append(
            {
                "version": id,
                "rate": [_rate(at[place]) if place in at else None for place in range(number)],
                "reward": [
                    _reward(at[place], tau, weight) if place in at else None for place in range(number)
                ],
                "shown": [at[place]["shown"] if place in at else 0 for place in range(number)],
            }
        )
    return {"at": starts, "lines": lines}


# ----------------------------------------------------------------------------------------- versions


def _versions(known: Sequence[Version], counted: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Newest first, each with all that it ever served and its place in the drawing."""
    counts = {row["version"]: row for row in counted}
    chosen = list(reversed(known))[:LISTED]
    rows = []
    for one, knot in zip(chosen, lanes([(one.id, one.parent) for one in chosen]), strict=True):
        mine = counts.get(one.id)
        rows.append(
            {
                "id": one.id,
                "state": one.state.value,
                "parent": one.parent,
                "run": one.run,
                "created_at": one.created_at,
                "live_at": one.live_at,
                "collected": one.collected_at is not None,
                "opportunities": mine["opportunities"] if mine else 0,
                "rate": _rate(mine) if mine else None,
                "knot": asdict(knot),
            }
        )
    return rows


# -------------------------------------------------------------------------------------- experiments


def _head(experiment: Experiment, reading: Decision | None) -> dict[str, Any]:
    return {
        "id": experiment.id,
        "state": experiment.state.value,
        "control": name(experiment.control, experiment.policy),
        "treatment": name(experiment.treatment, experiment.policy),
        "created_at": experiment.created_at,
        "ended_at": experiment.ended_at,
        "actor": experiment.actor,
        "words": asdict(verdict(experiment, reading)),
    }


def _ended(c: Connection, experiment: Experiment) -> dict[str, Any]:
    return _head(experiment, charts.last_reading(c, experiment.id))


def _experiment(c: Connection, experiment: Experiment) -> dict[str, Any]:
    """One with its history: the interval at each look of its last stage, and all that was decided."""
    found = charts.readings(c, experiment.id)
    current = [one for one in found if one.stage == experiment.stage and bounds(one) is not None]
    last = current[-1] if current else None
    return {
        **_head(experiment, last),
        "tau": experiment.tau,
        "alpha": experiment.alpha,
        "stage": experiment.stage,
        "stages": list(experiment.plan["stages"]),
        "goal": experiment.plan.get("goal", "better"),
        "margin": experiment.plan.get("margin", 0.0),
        "looks": [
            {"at": one.at, **{key: one.numbers[key] for key in ("estimate", "low", "high")}}
            for one in current
        ],
        "numbers": _finite(next((one.numbers for one in reversed(found) if one.numbers), {})),
        "asks": _proposed(experiment, found),
        "history": [
            {"at": one.at, "kind": one.kind.value, "actor": one.actor, "reason": one.reason,
             "stage": one.stage, "proposed": one.proposed}
            for one in found
            if one.kind is not DecisionKind.CONTINUE
        ],
    }  # fmt: skip


def _proposed(experiment: Experiment, found: Sequence[Decision]) -> str | None:
    """What a person is asked to confirm: the newest proposal of one that waits."""
    if experiment.state is not ExperimentState.WAITING:
        return None
    return next((one.kind.value for one in reversed(found) if one.proposed), None)


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


# --------------------------------------------------------------------------------------------- runs


def _run(run: Run, now: float) -> dict[str, Any]:
    lost = run.state in (RunState.RUNNING, RunState.PAUSED) and not runs.alive(run, now)
    return {
        "id": run.id,
        "state": "lost" if lost else run.state.value,
        "parent": run.parent,
        "created_at": run.created_at,
        "step": run.step,
        "last_batch": run.last_batch,
        "tau": run.tau,
        "wish": run.wish,
        "message": run.message,
        "follow": run.follow,
    }


def _progress(c: Connection, run: Run, now: float) -> dict[str, Any]:
    """The newest run with its curves, and where its last batch lies within the guards' bands."""
    steps = charts.progress(c, run.id)
    policy = config.Policy.model_validate_json(runs.settings(c, run.id))
    names = ("reward", "accepted", "silent", "kl", "entropy", "gradient_norm")
    return {
        **_run(run, now),
        "batches": [one.batch for one in steps],
        "curves": {key: [one.numbers.get(key) for one in steps] for key in names},
        "last": _finite(steps[-1].numbers) if steps else {},
        "guards": guards(policy, steps),
    }


def guards(policy: config.Policy, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Each guard with its value in the last batch and the band it must keep, in the guard's own unit.

    Entropy and length are held against the run's first batch and the gradient against the median of the
    batches before, as `learning/guards.py` does; with thinned steps that median is an estimate.
    """
    if not steps:
        return []
    first, last, bands = steps[0].numbers, steps[-1].numbers, policy.train.guards
    norms = sorted(one.numbers["gradient_norm"] for one in steps[:-1] if "gradient_norm" in one.numbers)
    median = norms[len(norms) // 2] if norms else None
    found: list[tuple[str, str, float | None, float | None]] = [
        ("kl", "distance from the last promoted version (KL per token)", None, bands.kl),
        ("entropy", "how undecided it is (entropy)", _times(first.get("entropy"), bands.entropy), None),
        (
            "length",
            "length of its answers, in tokens",
            _times(first.get("length"), bands.length_low),
            _times(first.get("length"), bands.length_high),
        ),
        ("show", "how often it shows an answer", last.get("show_floor"), None),
        ("clip_fraction", "share of clipped tokens", None, bands.clip_fraction),
        ("gradient_norm", "gradient norm", None, _times(median, bands.gradient)),
    ]
    return [
        {"name": key, "words": words, "value": last[key], "low": low, "high": high}
        for key, words, low, high in found
        if key in last and math.isfinite(last[key])
    ]


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# ------------------------------------------------------------------------------------- interactions


def interaction(one: Served, *, tau: float, weight: float, code: bool) -> dict[str, Any]:
    """One answer with its tokens. code: whether its text may be seen; without, tokens are lengths alone."""
    starts = (0, *one.offsets[:-1])
    shown = len(one.completion) if one.displayed is None else one.displayed
    tokens = [
        {
            "text": one.completion[start:end] if code else "",
            "size": end - start,
            "logprob": round(logprob, 3),
            "seen": start < shown or one.displayed is None,
        }
        for start, end, logprob in zip(starts, one.offsets, one.logprobs, strict=False)
    ]
    before, after = _around(one.prompt) if code else ("", "")
    return {
        "id": one.id,
        "index": one.index,
        "at": one.at,
        "seconds": one.finished_at - one.at,
        "version": one.version,
        "arm": one.arm,
        "experiment": one.experiment,
        "user": one.user,
        "project": one.project,
        "language": one.language,
        "finish": one.finish,
        "verdict": one.verdict,
        "source": one.verdict_source,
        "verdict_at": one.verdict_at,
        "use": one.dropped or one.untrainable or one.use,
        "run": one.run,
        **worth_of(one, tau, weight),
        "before": before,
        "after": after,
        "tokens": tokens,
    }


def worth_of(one: Served, tau: float, weight: float) -> dict[str, Any]:
    """The reward that a run trained with, else what its verdict is worth at the page's τ."""
    if one.reward is not None:
        return {"reward": one.reward, "trained": True}
    if one.kind != "shown" or one.verdict is None:
        return {"reward": 0.0 if one.verdict == "silent" else None, "trained": False}
    lost = weight if one.verdict == "timeout" and one.verdict_source not in worth.ONLY_TIMEOUTS else 1.0
    return {"reward": 1.0 - tau if one.verdict == "accepted" else -tau * lost, "trained": False}


def _around(prompt: str) -> tuple[str, str]:
    """What stands before and after the cursor, cut to what a page shows."""
    for template in TEMPLATES:
        parts = template.parse(prompt)
        if parts is not None:
            return parts[0][-CONTEXT:], parts[1][: CONTEXT // 4]
    return prompt[-CONTEXT:], ""
