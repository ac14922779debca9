"""The first worker of a run: claims labelled interactions from the store, batch by batch, and leaves out what
is not worth learning from."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy.engine import Connection

from onlinerl import config
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import Worker
from onlinerl.learning import cleaning, guards
from onlinerl.learning.control import Control
from onlinerl.records import Sample, Version
from onlinerl.store import interactions, versions

POLL = 0.25
"""Seconds between two looks while there is too little for a batch."""
PACE = 600.0
"""Seconds before and after a sample in which its user's pace is looked at."""
CENSUS = 60.0
"""Seconds for which the number of active users is taken to stay the same."""


def lineage(c: Connection, version: Version) -> list[int]:
    """Ids of a version and its ancestors, newest first: what it was learned through."""
    chain = [version.id]
    parent = version.parent
    while parent is not None and parent not in chain:
        chain.append(parent)
        found = versions.find(c, version.policy, parent)
        parent = None if found is None else found.parent
    return chain


def oldest(chain: list[int], staleness: int) -> int:
    """The oldest version whose samples may still be trained on. Generations count, not ids: rejected and
    abandoned versions leave gaps."""
    return chain[min(staleness, len(chain) - 1)]


def newest(c: Connection, policy: str, run: int, parent: int) -> Version:
    """The last version that a run made, or its parent."""
    own = [version for version in versions.list_(c, policy) if version.run == run]
    return own[-1] if own else versions.get(c, policy, parent)


def pace_of(c: Connection, policy: str, settings: config.Policy, samples: Sequence[Sample]) -> cleaning.Pace:
    """How fast the users of these samples judge, around the time of the samples."""
    rules, trust = settings.cleaning, settings.trust
    if not samples or trust.owner or (rules.per_minute is None and rules.fastest == 0):
        return cleaning.Pace({}, {}, rules)
    times = [sample.at for sample in samples]
    judged = interactions.judged(
        c,
        policy=policy,
        users={sample.user for sample in samples},
        since=min(times) - PACE,
        until=max(times) + PACE,
    )
    asked: defaultdict[str, dict[str, float]] = defaultdict(dict)
    delays: defaultdict[str, list[float]] = defaultdict(list)
    for one in judged:
        asked[one.user][one.id] = one.at  # the choices of one request were judged together
        delays[one.user].append(one.verdict_at - one.at)
    return cleaning.Pace({user: tuple(ids.values()) for user, ids in asked.items()}, delays, rules)


class Census:
    """How many users are active. Counting reads a week of verdicts, so it is done now and then."""

    def __init__(self, policy: str, trust: config.Trust) -> None:
        self.policy = policy
        self.trust = trust
        self._counted: tuple[float, int] | None = None

    def active(self, c: Connection, now: float) -> int:
        """Users who judged an answer in the last `trust.window` seconds."""
        if self._counted is None or now - self._counted[0] > CENSUS:
            since = now - self.trust.window
            self._counted = (now, interactions.active_users(c, policy=self.policy, since=since))
        return self._counted[1]


class DataReceiver(Worker[None, Sample]):
    """Streams samples, each marked with the number of the batch that it was claimed for.

    The numbers are in the store too, so that after a kill exactly the batches beyond the last checkpoint
    are given back. A batch is filled before the next one begins. Staleness is looked at when a sample is
    claimed: what is older than `train.staleness` versions against the newest version of this run is left
    alone, and what is that old against the *live* version is dropped for good, and counted.

    What `cleaning` finds among the claimed is dropped with its reason, and more is claimed until the batch is
    full. The store is the memory: repetitions are looked for among what this run and
    earlier ones learned from, and the pace of users in all that they judged; so a resumed run decides as the
    one before it did.
    """

    def __init__(
        self,
        control: Control,
        policy: str,
        settings: config.Policy,
        *,
        first_batch: int,
        last_batch: int | None,
        follow: bool,
    ) -> None:
        self.control = control
        self.policy = policy
        self.settings = settings
        self.first_batch = first_batch
        self.last_batch = last_batch
        self.follow = follow
        self._recent = cleaning.Recent(settings.cleaning)
        self._census = Census(policy, settings.trust)

    def run(self, input: Channel[None] | None, output: Channel[Sample] | None) -> None:
        """Until nothing is left (or, with `follow`, until the run stops) or the last batch is full."""
        assert output is not None
        number = self.first_batch
        have: Counter[str] = Counter()
        """Samples of the batch, by user."""
        self._remember()
        while not self.control.stopping and (self.last_batch is None or number <= self.last_batch):
            wanted = self.settings.train.batch - have.total()
            claimed = self._claim(number, wanted, have)
            samples = self._clean(claimed)
            for sample in samples:
                output.put(replace(sample, batch=number))
            have.update(sample.user for sample in samples)
            if len(samples) == wanted:
                number += 1
                have.clear()
            elif len(claimed) == wanted:
                continue  # there may be more where those that were left out came from
            elif not self.follow:
                return  # fewer than asked for: nothing claimable is left
            elif not samples:
                self.control.sleep(POLL)

    def _claim(self, batch: int, limit: int, have: Counter[str]) -> list[Sample]:
        train = self.settings.train
        run = self.control.run
        now = time.time()
        with self.control.database.read() as c:
            # Most looks of a following run find nothing: they must not take the store's only writer.
            if not interactions.counts(c, policy=self.policy).waiting:
                return []
            share = self._share(c, have, now)
        with self.control.write() as c:
            live = oldest(lineage(c, versions.live(c, self.policy)), train.staleness)
            interactions.drop_stale(c, policy=self.policy, run=run.id, min_version=live, now=now)
            current = newest(c, self.policy, run.id, run.parent)
            return interactions.claim(
                c,
                policy=self.policy,
                run=run.id,
                batch=batch,
                limit=limit,
                now=now,
                rest=self.settings.joins.rest,
                min_version=oldest(lineage(c, current), train.staleness),
                temperature_floor=train.temperature_floor,
                holdout=train.holdout,
                share=share,
            )

    def _share(self, c: Connection, have: Counter[str], now: float) -> interactions.Share | None:
        trust = self.settings.trust
        if trust.owner:
            return None
        active = self._census.active(c, now)
        most = guards.most_of_one(trust, active, self.settings.train.batch)
        return None if most is None else interactions.Share(most, have, crowd=active >= trust.crowd)

    # --------------------------------------------------------------------------------------- cleaning

    def _remember(self) -> None:
        """What was learned from lately, by this run and others: a restart forgets no repetition."""
        if self._recent.needed:
            with self.control.database.read() as c:
                window = self.settings.cleaning.window
                for sample in interactions.learned(c, policy=self.policy, limit=window):
                    self._recent.add(sample)

    def _clean(self, samples: list[Sample]) -> list[Sample]:
        """Those that are worth learning from; the others are dropped with their reason."""
        if not samples:
            return []
        with self.control.database.read() as c:
            pace = pace_of(c, self.policy, self.settings, samples)
        kept, left_out = cleaning.sift(samples, self.settings.cleaning, pace, self._recent)
        if left_out:
            now = time.time()
            with self.control.write() as c:
                for reason, those in left_out.items():
                    keys = [(sample.id, sample.index) for sample in those]
                    interactions.drop(c, keys, reason=reason, run=self.control.run.id, now=now)
        return kept
