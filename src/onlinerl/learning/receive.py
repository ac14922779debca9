"""The first worker of a run: claims labelled interactions from the store, batch by batch."""

from __future__ import annotations

import time
from dataclasses import replace

from sqlalchemy.engine import Connection

from onlinerl import config
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import Worker
from onlinerl.learning.control import Control
from onlinerl.records import Sample, Version
from onlinerl.store import interactions, versions

POLL = 0.25
"""Seconds between two looks while there is too little for a batch."""


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


class DataReceiver(Worker[None, Sample]):
    """Streams samples, each marked with the number of the batch that it was claimed for.

    The numbers are in the store too, so that after a kill exactly the batches beyond the last checkpoint
    are given back. A batch is filled before the next one begins. Staleness is looked at when a sample is
    claimed: what is older than `train.staleness` versions against the newest version of this run is left
    alone, and what is that old against the *live* version is dropped for good, and counted.
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
        self.dropped = 0
        """Samples dropped as stale so far."""

    def run(self, input: Channel[None] | None, output: Channel[Sample] | None) -> None:
        """Until nothing is left (or, with `follow`, until the run stops) or the last batch is full."""
        assert output is not None
        number = self.first_batch
        filled = 0
        while not self.control.stopping and (self.last_batch is None or number <= self.last_batch):
            wanted = self.settings.train.batch - filled
            samples = self._claim(number, wanted)
            for sample in samples:
                output.put(replace(sample, batch=number))
            filled += len(samples)
            if filled == self.settings.train.batch:
                number, filled = number + 1, 0
            elif not self.follow:
                return  # fewer than asked for: nothing claimable is left
            elif not samples:
                self.control.sleep(POLL)

    def _claim(self, batch: int, limit: int) -> list[Sample]:
        train = self.settings.train
        run = self.control.run
        now = time.time()
        with self.control.database.read() as c:
            # Most looks of a following run find nothing: they must not take the store's only writer.
            if not interactions.counts(c, policy=self.policy).waiting:
                return []
        with self.control.database.write() as c:
            live = oldest(lineage(c, versions.live(c, self.policy)), train.staleness)
            self.dropped += interactions.drop_stale(
                c, policy=self.policy, run=run.id, min_version=live, now=now
            )
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
            )
