"""Interactions and samples: what was served, what was said of it, and who learns from it.

The life of a row, in its column `use`:

    open ──verdict──▶ labelled ──claim──▶ claimed(run, batch)      trained, unless its version is rejected
                          ▲  │                 │   │
                          │  ├─claim─▶ held    │   └──drop──▶ dropped(what cleaning found)
                          │  │                 └──release──▶ labelled
                          │  └─claim, drop_stale──▶ dropped(stale | cold | surplus | crowd)
                          └── silence is labelled when it is inserted; untrainable rows stay open

`held` rows measure and are never trained on. `surplus` are silent rows beyond the label rate of the shown,
`crowd` those of a user who has had their share of a batch.
What was dropped stays dropped: `release` gives back claimed rows alone. Reasons are an open set of short
words; those of cleaning are in `learning/cleaning.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from onlinerl import config, worth
from onlinerl.records import FinishReason, Interaction, Sample, Verdict, text_hash
from onlinerl.store import feedback, tallies
from onlinerl.store.schema import DROPPED
from onlinerl.store.schema import interactions as table

RATE_WINDOW = 1000
"""Shown answers over which the label rate is taken."""
RATE_SETTLE = 10.0
"""Seconds beyond `rest` that a shown answer gets before it counts as unlabelled: Continue's own clock."""
_CHOICE = table.c.index.label("choice")  # rows are tuples, and those have an `index` of their own
KINDS = ("shown", "silent", "nothing")
"""What an answer can be."""
REASON = 16
"""Most characters of a reason to drop a row, as wide as its column."""
_CHUNK = 500
"""Rows looked at together: below SQLite's limit of bound parameters."""


@dataclass(frozen=True, slots=True)
class InteractionCounts:
    """How a policy's traffic went so far. Made by `counts`, eaten by the trigger, the run and pages."""

    opportunities: int
    """Answers served, silent and cancelled ones included."""
    shown: int
    """Answers with text."""
    silent: int
    """Answers in which the policy chose to show nothing."""
    accepted: int
    rejected: int
    timeout: int
    waiting: int
    """Verdicts about shown answers that a run could claim (resting timeouts included)."""


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """How one version's traffic went. Made by `report`."""

    version: int
    opportunities: int
    shown: int
    silent: int
    accepted: int
    rejected: int
    timeout: int


@dataclass(frozen=True, slots=True)
class Reward:
    """What a sample was trained with. Made by `rewards`, eaten by people."""

    id: str
    index: int
    batch: int
    reward: float
    parts: Mapping[str, float]
    """By source; they add up to `reward`."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one user may have of the batch that is being filled. Made by the run, eaten by `claim`."""

    most: int
    """Samples of one user in the whole batch."""
    have: Mapping[str, int]
    """Samples that the batch holds already, by user."""
    crowd: bool
    """There are so many users that what is beyond is dropped. False: it stays, for a later batch."""


@dataclass(frozen=True, slots=True)
class Judged:
    """When one answer was asked for and judged by hand. Made by `judged`, eaten by cleaning."""

    user: str
    id: str
    at: float
    verdict_at: float


# --------------------------------------------------------------------------------- write and read

# Statements on the path of every request are built once: building one costs as much as running it.
_NAMED = (table.c.id == sa.bindparam("of_id"), table.c.index == sa.bindparam("of_index"))
_FIND = sa.select(table.c.seq).where(*_NAMED)
_GET = sa.select(table).where(*_NAMED)
_INSERT = table.insert()


def insert(c: Connection, interactions: Sequence[Interaction]) -> None:
    """Keep what was served. One that is there already, by (id, index), is left as it is.

    Silent answers get their verdict here. Feedback that came before its interaction joins it now.
    """
    for one in interactions:
        if c.execute(_FIND, {"of_id": one.id, "of_index": one.index}).first() is not None:
            continue
        row = _row(one)
        c.execute(_INSERT, row)
        changes = {"opportunities": 1}
        if row["kind"] != "nothing":
            changes[row["kind"]] = 1
        if one.verdict is not None and one.verdict is not Verdict.SILENT:
            changes[one.verdict.value] = 1
        tallies.add(c, one.policy, one.version, **changes)
        feedback.rejoin(c, one.id, one.index)


def get(c: Connection, id: str, index: int = 0) -> Interaction | None:
    """One interaction by its name; None when there is none."""
    row = c.execute(_GET, {"of_id": id, "of_index": index}).first()
    return None if row is None else _interaction(row)


def candidates(
    c: Connection,
    *,
    project: str,
    since: float,
    prompt_hash: str | None = None,
    suffix_hash: str | None = None,
    limit: int = 200,
) -> list[Interaction]:
    """Interactions of a project requested at or after `since`, newest first, to be matched by their text."""
    query = sa.select(table).where(table.c.project == project, table.c.at >= since)
    if prompt_hash is not None:
        query = query.where(table.c.prompt_hash == prompt_hash)
    if suffix_hash is not None:
        query = query.where(table.c.suffix_hash == suffix_hash)
    query = query.order_by(table.c.at.desc(), table.c.seq.desc()).limit(limit)
    return [_interaction(row) for row in c.execute(query)]


# --------------------------------------------------------------------------------------- claiming


def claim(
    c: Connection,
    *,
    policy: str,
    run: int,
    batch: int,
    limit: int,
    now: float,
    rest: float,
    min_version: int,
    temperature_floor: float,
    holdout: float,
    share: Share | None = None,
) -> list[Sample]:
    """Take up to `limit` samples for a batch of a run, oldest first; nobody else gets them.

    Passed over and left: versions below `min_version` (`drop_stale` is for those), timeouts that have not
    rested `rest` seconds, silent rows while no shown one is labelled. On the way the rows that will never
    be claimed are marked, so that nobody looks at them again: the share `holdout` is held back, those
    sampled below `temperature_floor` and the surplus of silence are dropped. Of a user who has had their
    `share` the rest is dropped too, or left (None: nobody has a bound).
    """
    rate = label_rate(c, policy=policy, now=now, rest=rest)
    taken: list[int] = []
    held: list[int] = []
    cold: list[int] = []
    surplus: list[int] = []
    crowd: list[int] = []
    said = Counter(share.have if share else ())
    after = 0
    while len(taken) < limit:
        query = (
            sa.select(table.c.seq, table.c.id, _CHOICE, table.c.verdict, table.c.temperature, table.c.user)
            .where(
                table.c.policy == policy,
                table.c.use == "labelled",
                table.c.seq > after,
                table.c.version >= min_version,
                sa.or_(table.c.verdict != Verdict.TIMEOUT.value, table.c.verdict_at <= now - rest),
            )
            .order_by(table.c.seq)
            .limit(_CHUNK)
        )
        if rate is None:
            query = query.where(table.c.verdict != Verdict.SILENT.value)
        rows = c.execute(query).all()
        for row in rows:
            if row.temperature < temperature_floor:
                cold.append(row.seq)
            elif row.verdict == Verdict.SILENT.value and _lot("silent", row.id, row.choice) >= (rate or 0.0):
                surplus.append(row.seq)
            elif _lot("holdout", row.id) < holdout:
                held.append(row.seq)
            elif share is not None and said[row.user] >= share.most:
                if share.crowd:
                    crowd.append(row.seq)
            else:
                taken.append(row.seq)
                said[row.user] += 1
                if len(taken) == limit:
                    break
        if len(rows) < _CHUNK:
            break
        after = rows[-1].seq
    _mark(c, held, use="held", used_at=now)
    _mark(c, cold, use="dropped", dropped="cold", used_at=now, run=run)
    _mark(c, surplus, use="dropped", dropped="surplus", used_at=now, run=run)
    _mark(c, crowd, use="dropped", dropped="crowd", used_at=now, run=run)
    _mark(c, taken, use="claimed", used_at=now, run=run, batch=batch)
    return [_sample(row) for row in _by_seq(c, taken)]


def label_rate(c: Connection, *, policy: str, now: float, rest: float) -> float | None:
    """Share of the recent shown answers that have a verdict; None while there is none.

    Over the newest RATE_WINDOW that had time to be judged; where none had, over the newest.
    """
    for before in (now - rest - RATE_SETTLE, now):
        recent = (
            sa.select(table.c.verdict)
            .where(table.c.policy == policy, table.c.kind == "shown", table.c.at <= before)
            .order_by(table.c.at.desc())
            .limit(RATE_WINDOW)
            .subquery()
        )
        shown, labelled = c.execute(sa.select(sa.func.count(), sa.func.count(recent.c.verdict))).one()
        if labelled:
            return float(labelled / shown)
    return None


def drop_stale(c: Connection, *, policy: str, run: int, min_version: int, now: float) -> int:
    """Drop the labelled rows of versions below `min_version`; returns how many that were.

    They are too old to learn from: the version that made them is too far from what is trained.
    """
    where = (table.c.policy == policy) & (table.c.use == "labelled") & (table.c.version < min_version)
    result = c.execute(
        table.update().where(where).values(use="dropped", dropped="stale", used_at=now, run=run)
    )
    return result.rowcount


def drop(c: Connection, keys: Sequence[tuple[str, int]], *, reason: str, run: int, now: float) -> None:
    """Drop samples, named by (id, index), that the run claimed and will not train on; for good.

    `reason` is a short word, at most REASON characters. Rows that the run does not hold are left alone.
    """
    if not 0 < len(reason) <= REASON:
        raise ValueError(f"a reason to drop a sample has 1 to {REASON} characters, not {reason!r}")
    statement = (
        table.update()
        .where(*_NAMED, table.c.use == "claimed", table.c.run == run)
        .values(use="dropped", dropped=reason, used_at=now, batch=None, reward=None, reward_parts=None)
    )
    if keys:
        c.execute(statement, [{"of_id": id, "of_index": index} for id, index in keys])


def keep_rewards(c: Connection, rewards: Sequence[tuple[str, int, float, Mapping[str, float]]]) -> None:
    """Keep what claimed samples are trained with: (id, index, reward, reward by source) of each.

    Again for the same sample: the later replaces the earlier. Rows that nobody holds are left alone.
    """
    statement = (
        table.update()
        .where(*_NAMED, table.c.use == "claimed")
        .values(reward=sa.bindparam("new_reward"), reward_parts=sa.bindparam("new_parts"))
    )
    if rewards:
        c.execute(
            statement,
            [
                {"of_id": id, "of_index": index, "new_reward": reward, "new_parts": json.dumps(dict(parts))}
                for id, index, reward, parts in rewards
            ],
        )


def rewards(c: Connection, *, run: int) -> list[Reward]:
    """What each sample that a run learned from was trained with, by batch; released ones have none."""
    query = (
        sa.select(table.c.id, _CHOICE, table.c.batch, table.c.reward, table.c.reward_parts)
        .where(table.c.run == run, table.c.use == "claimed", table.c.reward.is_not(None))
        .order_by(table.c.batch, table.c.seq)
    )
    return [
        Reward(row.id, row.choice, row.batch, row.reward, json.loads(row.reward_parts))
        for row in c.execute(query)
    ]


def release(c: Connection, *, run: int, after_batch: int) -> int:
    """Give back what the run claimed for batches beyond `after_batch`; returns how many.

    Their rewards go: nothing that survives was trained with them. What was dropped stays dropped.
    """
    result = c.execute(
        table.update()
        .where(table.c.run == run, table.c.use == "claimed", table.c.batch > after_batch)
        .values(use="labelled", used_at=None, run=None, batch=None, reward=None, reward_parts=None)
    )
    return result.rowcount


def learned(c: Connection, *, policy: str, limit: int) -> list[Sample]:
    """The newest samples that runs hold or trained on, in the order in which they were served: what came
    before, for cleaning. Those that were given back are not among them."""
    newest = (
        sa.select(table.c.seq)
        .where(table.c.policy == policy, table.c.use == "claimed")
        .order_by(table.c.seq.desc())
        .limit(limit)
    )
    return [_sample(row) for row in _by_seq(c, [row.seq for row in c.execute(newest)])]


def judged(c: Connection, *, policy: str, users: Collection[str], since: float, until: float) -> list[Judged]:
    """Answers that were asked for between two times and judged by hand (no timeouts), of some users."""
    query = sa.select(table.c.user, table.c.id, table.c.at, table.c.verdict_at).where(
        table.c.policy == policy,
        table.c.kind == "shown",
        table.c.at.between(since, until),
        table.c.verdict.in_((Verdict.ACCEPTED.value, Verdict.REJECTED.value)),
    )
    wanted = frozenset(users)  # not in the query: they may be more than a statement takes
    return [
        Judged(row.user, row.id, row.at, row.verdict_at) for row in c.execute(query) if row.user in wanted
    ]


def active_users(c: Connection, *, policy: str, since: float) -> int:
    """Users who judged an answer at or after `since`, timeouts included."""
    query = sa.select(sa.func.count(table.c.user.distinct())).where(
        table.c.policy == policy, table.c.kind == "shown", table.c.verdict_at >= since
    )
    return int(c.execute(query).scalar_one())


def held(c: Connection, *, policy: str, limit: int) -> list[Sample]:
    """The newest of the held-back share, as `claim` set it aside; never trained on."""
    newest = (
        sa.select(table.c.seq)
        .where(table.c.policy == policy, table.c.use == "held")
        .order_by(table.c.seq.desc())
        .limit(limit)
    )
    return [_sample(row) for row in reversed(_by_seq(c, [row.seq for row in c.execute(newest)]))]


# --------------------------------------------------------------------------------------- counting


def counts(c: Connection, *, policy: str) -> InteractionCounts:
    """How the policy's traffic went so far; does not slow down as it grows."""
    totals = tallies.totals(c, policy)
    waiting = c.execute(
        sa.select(sa.func.count())
        .select_from(table)
        .where(table.c.policy == policy, table.c.use == "labelled", table.c.verdict != Verdict.SILENT.value)
    ).scalar_one()
    return InteractionCounts(**totals, waiting=waiting)


def tau(c: Connection, *, policy: str, settings: config.Policy) -> float:
    """τ of a run or an experiment that starts now."""
    totals = tallies.totals(c, policy)
    return worth.tau(settings, totals["accepted"], totals["opportunities"])


def dropped(c: Connection, *, policy: str, run: int | None = None) -> dict[str, int]:
    """How many rows were dropped (by one run), by reason: stale, cold, surplus, and what cleaning says."""
    query = sa.select(table.c.dropped, sa.func.count()).where(table.c.policy == policy, DROPPED)
    if run is not None:
        query = query.where(table.c.run == run)
    return {str(row[0]): int(row[1]) for row in c.execute(query.group_by(table.c.dropped))}


def report(c: Connection, *, policy: str) -> list[VersionCounts]:
    """The counts of each version that served, by version."""
    return [VersionCounts(**row) for row in tallies.by_version(c, policy)]


def accept_window(c: Connection, *, policy: str, window: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(verdicts, accepted) of the last `window` verdicts about shown answers, and of the `window` before."""
    query = (
        sa.select(table.c.verdict)
        .where(table.c.policy == policy, table.c.kind == "shown", table.c.verdict_at.is_not(None))
        .order_by(table.c.verdict_at.desc())
        .limit(2 * window)
    )
    verdicts = [row.verdict == Verdict.ACCEPTED.value for row in c.execute(query)]
    recent, before = verdicts[:window], verdicts[window:]
    return (len(recent), sum(recent)), (len(before), sum(before))


# ------------------------------------------------------------------------------- rows and records


def _lot(salt: str, *parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone; lots with different salts are independent."""
    text = "\0".join((salt, *map(str, parts)))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _untrainable(one: Interaction) -> str:
    if one.untrainable:
        return one.untrainable
    if one.finish is FinishReason.ERROR:
        return "the engine failed"
    if not one.completion_ids:
        return "no tokens"
    if not len(one.completion_ids) == len(one.behavior_logprobs) == len(one.offsets):
        return "tokens without log-probabilities"
    return ""


def _row(one: Interaction) -> dict[str, Any]:
    verdict, source, at = one.verdict, one.verdict_source, one.verdict_at
    untrainable = _untrainable(one)
    if one.silent and verdict is None:
        verdict, source, at = Verdict.SILENT, "server", one.finished_at
    return {
        "id": one.id,
        "index": one.index,
        "policy": one.policy,
        "version": one.version,
        "version_end": one.version_end,
        "arm": one.arm,
        "project": one.project,
        "user": one.user,
        "at": one.at,
        "finished_at": one.finished_at,
        "prompt": one.prompt,
        "prompt_hash": text_hash(one.prompt),
        "suffix_hash": one.suffix_hash,
        "prompt_ids": _ints(one.prompt_ids),
        "completion": one.completion,
        "completion_ids": _ints(one.completion_ids),
        "behavior_logprobs": np.asarray(one.behavior_logprobs, dtype="<f4").tobytes(),
        "offsets": _ints(one.offsets),
        "temperature": one.temperature,
        "top_p": one.top_p,
        "finish": one.finish.value,
        "language": one.language,
        "multiline": one.multiline,
        "label": one.label,
        "untrainable": untrainable,
        "displayed": one.displayed,
        "verdict": None if verdict is None else verdict.value,
        "verdict_source": source,
        "verdict_at": at,
        "score": one.score,
        "retained_characters": one.retained_characters,
        "shown_at": one.shown_at,
        "kind": "shown" if one.completion else "silent" if one.silent else "nothing",
        "use": "labelled" if verdict is not None and not untrainable else "open",
        "dropped": "",
        "propensity": one.propensity,
        "experiment": one.experiment,
        "unit": one.unit,
        "characters": None if one.experiment is None else len(one.completion),
    }


def _ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def _tuple(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, dtype="<i4").tolist())


def _floats(blob: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(blob, dtype="<f4").tolist())


def _interaction(row: Row[Any]) -> Interaction:
    return Interaction(
        id=row.id,
        index=row._mapping["index"],
        policy=row.policy,
        version=row.version,
        version_end=row.version_end,
        arm=row.arm,
        project=row.project,
        user=row.user,
        at=row.at,
        finished_at=row.finished_at,
        prompt=row.prompt,
        prompt_ids=_tuple(row.prompt_ids),
        completion=row.completion,
        completion_ids=_tuple(row.completion_ids),
        behavior_logprobs=_floats(row.behavior_logprobs),
        offsets=_tuple(row.offsets),
        temperature=row.temperature,
        top_p=row.top_p,
        finish=FinishReason(row.finish),
        language=row.language,
        multiline=row.multiline,
        label=row.label,
        untrainable=row.untrainable,
        displayed=row.displayed,
        verdict=None if row.verdict is None else Verdict(row.verdict),
        verdict_source=row.verdict_source,
        verdict_at=row.verdict_at,
        score=row.score,
        retained_characters=row.retained_characters,
        shown_at=row.shown_at,
        suffix_hash=row.suffix_hash,
        propensity=row.propensity,
        experiment=row.experiment,
        unit=row.unit,
    )


def _sample(row: Row[Any]) -> Sample:
    one = _interaction(row)
    if one.verdict is None:
        raise AssertionError(f"interaction {one.id} is {row.use} without a verdict")
    return Sample(
        id=one.id,
        index=one.index,
        policy=one.policy,
        version=one.version,
        project=one.project,
        user=one.user,
        at=one.at,
        prompt_ids=one.prompt_ids,
        completion_ids=one.completion_ids,
        behavior_logprobs=one.behavior_logprobs,
        loss_mask=one.loss_mask(),
        temperature=one.temperature,
        top_p=one.top_p,
        language=one.language,
        multiline=one.multiline,
        verdict=one.verdict,
        verdict_source=one.verdict_source,
        completion=one.completion,
        score=one.score,
        retained_characters=one.retained_characters,
        prompt=one.prompt,
        arm=one.arm,
    )


def _chunks(numbers: Sequence[int]) -> Iterable[Sequence[int]]:
    for start in range(0, len(numbers), _CHUNK):
        yield numbers[start : start + _CHUNK]


def _mark(c: Connection, numbers: Sequence[int], **values: object) -> None:
    for chunk in _chunks(numbers):
        c.execute(table.update().where(table.c.seq.in_(chunk)).values(**values))


def _by_seq(c: Connection, numbers: Sequence[int]) -> list[Row[Any]]:
    """The rows with these numbers, in ascending order."""
    rows: list[Row[Any]] = []
    for chunk in _chunks(sorted(numbers)):
        rows += c.execute(sa.select(table).where(table.c.seq.in_(chunk)).order_by(table.c.seq))
    return rows
