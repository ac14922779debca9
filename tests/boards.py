"""A policy with a past, for the dashboard's tests: versions, a day of traffic, a run, experiments.

Rows are inserted in bulk, as they would be after the traffic; what they say is drawn with a fixed seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from onlinerl import base
from onlinerl.config import Experiments, Rewards, Settings
from onlinerl.records import (
    Arm,
    Decision,
    DecisionKind,
    Experiment,
    ExperimentState,
    RunState,
    VersionState,
    text_hash,
)
from onlinerl.store import experiments, runs, versions
from onlinerl.store.database import Database
from onlinerl.store.schema import audit, feedback, interactions, tallies
from onlinerl.store.schema import versions as versions_table
from tests.store_helpers import version
from tests.versions import make_version

DAY = 86_400.0
RATES = (0.21, 0.24, 0.26, 0.19, 0.28, 0.31)
"""Accept rate of shown answers by version."""
ANSWERS = (
    (" return", " sum", "(values", ")", " /", " len", "(values", ")"),
    (" for", " key", ",", " value", " in", " self", "._items", ".items", "():"),
    ("with", " open", "(path", ")", " as", " file", ":", "\n        return", " json", ".load", "(file)"),
    ("raise", " ValueError", '(f"', "unknown", " option", " {name!r}", '")'),
    ("if", " not", " isinstance", "(other", ",", " Point", "):", "\n            return", " NotImplemented"),
)  # fmt: skip
PREFIXES = (
    'def mean(values):\n    """Arithmetic mean of at least one number."""\n   ',
    "class Registry:\n    def __init__(self):\n        self._items = {}\n\n    def each(self):\n       ",
    "def load(path):\n    ",
    "def option(name):\n    if name in KNOWN:\n        return KNOWN[name]\n    ",
    "    def __eq__(self, other):\n        ",
)


def lived(settings: Settings, database: Database, *, now: float, weights: bool = True) -> None:
    """Versions 0 to 6: 0 to 2 and 4 were live, 3 was and was taken back, 5 is live, 6 waits.

    weights: with their folders, so that engines can load them.
    """
    if weights:
        base.ensure(settings, "tab", database)
    else:
        with database.write() as c:
            versions.register(c, version(0))
    with database.write() as c:
        if versions.get(c, "tab", 0).state is VersionState.CANDIDATE:
            versions.promote(c, "tab", 0, actor="base model")
    for parent in (0, 1, 2, 2, 4, 5):
        if weights:
            made = make_version(settings, database, parent=parent, scale=1.0 + 1e-4 * (parent + 1))
        else:
            with database.write() as c:
                made = version(versions.next_id(c, "tab"), parent=parent)
                versions.register(c, made)
        if made.id < 6:
            with database.write() as c:
                versions.promote(c, "tab", made.id, actor="experiment" if made.id > 1 else "admin")
                if made.id == 3:
                    versions.rollback(c, "tab", actor="admin")
    # … and all that did not happen in one second
    with database.write() as c:
        for id in range(7):
            at = now - DAY * (0.97 - 0.155 * id)
            c.execute(
                versions_table.update()
                .where(versions_table.c.id == id)
                .values(created_at=at - 600, live_at=sa.case((versions_table.c.live_at.is_not(None), at)))
            )
            rows = c.execute(sa.select(audit.c.seq).where(audit.c.version == id, audit.c.to_state == "live"))
            for place, (seq,) in enumerate(rows.all()):
                moved = at if place == 0 else now - DAY * (0.97 - 0.155 * 3.5)
                c.execute(audit.update().where(audit.c.seq == seq).values(at=moved))


def traffic(database: Database, count: int, *, now: float, seed: int = 0, span: float = DAY) -> None:
    """`count` interactions of the last day, more by day than by night, with verdicts and feedback."""
    draw = np.random.default_rng(seed)
    hours = np.sort(draw.beta(1.6, 1.25, count))
    ats = now - span * 0.995 + hours * span * 0.99
    went_live = [now - DAY * (0.97 - 0.155 * id) for id in range(6)]
    back = now - DAY * (0.97 - 0.155 * 3.5)
    rows: list[dict[str, Any]] = []
    reports: list[dict[str, Any]] = []
    counts: dict[int, dict[str, int]] = {}
    kinds = draw.choice(["shown", "silent", "nothing"], count, p=[0.86, 0.1, 0.04])
    luck, pick = draw.random(count), draw.integers(0, len(ANSWERS), count)
    for n in range(count):
        at, kind = float(ats[n]), str(kinds[n])
        served = max([0, *(id for id, start in enumerate(went_live) if start <= at)])
        if served == 3 and at >= back:
            served = 2
        rate = RATES[served]
        verdict = (
            "silent" if kind == "silent" else None if kind == "nothing"
            else "accepted" if luck[n] < rate else "rejected" if luck[n] < rate + 0.25
            else "timeout" if luck[n] < 0.93 else None
        )  # fmt: skip
        tokens = ANSWERS[pick[n]] if kind == "shown" else ("",) if kind == "silent" else ()
        rows.append(_row(n, at, kind, served, verdict, tokens, PREFIXES[pick[n]], draw))
        mine = counts.setdefault(
            served, dict.fromkeys(("opportunities", "shown", "silent", "accepted", "rejected", "timeout"), 0)
        )
        mine["opportunities"] += 1
        for name in (kind, verdict):
            if name in mine:
                mine[str(name)] += 1
        if verdict in ("accepted", "rejected", "timeout"):
            reports.append(_report(n, at, verdict, draw))
    with database.write() as c:
        for start in range(0, count, 5000):
            c.execute(interactions.insert(), rows[start : start + 5000])
        for start in range(0, len(reports), 5000):
            c.execute(feedback.insert(), reports[start : start + 5000])
        for served, mine in counts.items():
            c.execute(tallies.insert().values(policy="tab", version=served, **mine))


def _row(
    n: int, at: float, kind: str, served: int, verdict: str | None, tokens: Sequence[str], prefix: str,
    draw: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    text = "".join(tokens)
    prompt = f"<|fim_prefix|>{prefix}<|fim_suffix|>\n<|fim_middle|>"
    offsets = np.cumsum([len(token) for token in tokens])
    return {
        "id": f"cmpl-{n:06d}", "index": 0, "policy": "tab", "version": served, "version_end": served,
        "arm": "live" if n % 12 else "explore", "project": "default", "user": f"dev-{n % 40}", "at": at,
        "finished_at": at + 0.05 + 0.012 * len(tokens), "prompt_hash": text_hash(prompt), "suffix_hash": "",
        "temperature": 0.8, "top_p": 0.95, "finish": "stop" if kind != "nothing" else "abort",
        "language": "python", "multiline": "\n" in text, "label": "", "untrainable": "", "displayed": None,
        "verdict": verdict,
        "verdict_source": {None: "", "silent": "server"}.get(verdict, "native"),
        "verdict_at": None if verdict is None else at + 2.0, "score": None, "retained_characters": None,
        "shown_at": None, "kind": kind, "use": "open" if verdict is None else "labelled", "dropped": "",
        "used_at": None, "run": None, "batch": None, "prompt": prompt,
        "prompt_ids": np.arange(40, dtype="<i4").tobytes(), "completion": text,
        "completion_ids": np.arange(len(tokens), dtype="<i4").tobytes(),
        "behavior_logprobs": (-draw.exponential(0.55, len(tokens))).astype("<f4").tobytes(),
        "offsets": offsets.astype("<i4").tobytes(), "propensity": 1.0, "reward": None, "reward_parts": None,
        "experiment": None, "unit": "",
    }  # fmt: skip


def _report(n: int, at: float, verdict: str, draw: np.random.Generator) -> dict[str, Any]:
    status = draw.choice(
        ["matched", "duplicate", "late", "superseded", "unmatched"], p=[0.9, 0.05, 0.01, 0.02, 0.02]
    )
    return {
        "at": at + 2.0, "source": "native", "event": "ignored" if verdict == "timeout" else verdict,
        "status": str(status), "project": "default", "user": f"dev-{n % 40}", "id": f"cmpl-{n:06d}",
        "index": 0, "interaction": None, "deadline": DAY, "displayed_text": None, "accepted_text": None,
        "retained_characters": None, "score": None, "client_id": None, "cached": False, "payload": "{}",
    }  # fmt: skip


def run(settings: Settings, database: Database, *, now: float, batches: int = 64) -> None:
    """An ended run and one that goes on, with its curves."""
    draw = np.random.default_rng(1)
    with database.write() as c:
        for number in range(2):
            made, _ = runs.start(
                c, policy="tab", host="elsewhere", pid=1, settings=settings.policies["tab"].model_dump_json(),
                tau_of=lambda _: 0.121, now=now - 3600 * (4 - 3 * number),
                last_batch=batches if number else 48,
            )  # fmt: skip
            done = 48 if number == 0 else batches * 3 // 4
            for batch in range(1, done + 1):
                runs.add_step(c, run=made.id, batch=batch, at=now, numbers=_numbers(batch, draw))
            made = runs.get(c, "tab", made.id)
            runs.heartbeat(c, made, step=done, now=now + 3600)  # beats as long as the test lasts
            if number == 0:
                runs.finish(c, made, RunState.FINISHED, "48 batches were asked for and are done")


def _numbers(batch: int, draw: np.random.Generator) -> dict[str, float]:
    noise = draw.normal(0, 1, 8)
    return {
        "reward": 0.09 + 0.0014 * batch + 0.02 * noise[0],
        "accepted": 0.24 + 0.0012 * batch + 0.03 * noise[1],
        "silent": 0.12 + 0.02 * noise[2], "kl": 0.004 * batch**0.6 + 0.002 * abs(noise[3]),
        "entropy": 1.4 - 0.004 * batch + 0.03 * noise[4], "gradient_norm": 0.7 + 0.12 * abs(noise[5]),
        "length": 9.0 + 0.4 * noise[6], "show": 0.88 + 0.01 * noise[7], "show_floor": 0.53,
        "clip_fraction": 0.06,
    }  # fmt: skip


def experiment(
    database: Database, *, now: float, stage: int = 3, effect: float = 0.026, looks: int = 120,
    state: ExperimentState | None = None, treatment: int = 6, control: int = 5,
) -> Experiment:  # fmt: skip
    """One whose interval has narrowed over `looks` looks of its stage; ended as `state` says, if it does."""
    plan = Experiments().model_dump(mode="json")
    started = now - 40_000
    with database.write() as c:
        one = experiments.start(
            c, policy="tab", control=Arm("tab", control), treatment=Arm("tab", treatment), plan=plan,
            rewards=Rewards().model_dump(mode="json"), tau=0.121, alpha=0.025, actor="publish: experiment",
            now=started,
        )  # fmt: skip
        one = experiments.begin(c, one, started)
        for number in range(1, stage + 1):
            at = started + number * 6000
            reason = f"no guardrail broke; on to {plan['stages'][number] * 100:.0f} % of users"
            one = experiments.ramp(c, one, Decision(DecisionKind.RAMP, reason, at=at, stage=number), at)
        begun = started + stage * 6000
        for look, at in enumerate(np.linspace(begun + 600, now - 30, looks)):
            experiments.record(
                c,
                one.id,
                Decision(
                    DecisionKind.CONTINUE, "not decided", reading(look, looks, effect), float(at), stage=stage
                ),
            )
        if state is not None:
            kind = {
                ExperimentState.PROMOTED: DecisionKind.PROMOTE,
                ExperimentState.ABORTED: DecisionKind.ABORT,
            }.get(state, DecisionKind.STOP)
            reasons = {ExperimentState.PROMOTED: "better beyond doubt, and no guardrail broke"}
            last = Decision(
                kind, reasons.get(state, "asked for"), reading(looks, looks, effect), now - 20, stage=stage
            )
            one = experiments.finish(c, one, state, last, now - 20)
    return one


def reading(look: int, looks: int, effect: float) -> dict[str, float]:
    """Numbers of a look: the estimate settles, the interval narrows as 1/√n does."""
    share = (look + 4) / (looks + 4)
    half = 0.014 / math.sqrt(share)
    wander = math.sin(look / 3) + 0.6 * math.sin(look / 1.3)
    estimate = effect + 0.004 * wander * (1 - share) / math.sqrt(share)
    return {
        "estimate": estimate, "low": estimate - half, "high": estimate + half,
        "rate/control": 0.118, "rate/treatment": 0.118 + estimate,
        "units/control": round(900 * share), "units/treatment": round(890 * share),
    }  # fmt: skip


def everything(settings: Settings, database: Database, count: int, *, weights: bool = True) -> float:
    """All of it; returns the time that it was made for."""
    now = time.time()
    lived(settings, database, now=now, weights=weights)
    traffic(database, count, now=now)
    run(settings, database, now=now)
    experiment(database, now=now)
    return now
