"""One update of a policy: what training, online and offline, makes of a batch of scored samples."""

from __future__ import annotations

from collections.abc import Sequence

from onlinerl.learning.advantages import Baseline, advantages
from onlinerl.learning.guards import Bands
from onlinerl.learning.learner import Learner
from onlinerl.learning.rewards import RewardTable
from onlinerl.records import Scored


def update(
    learner: Learner,
    batch: Sequence[Scored],
    number: int,
    *,
    baseline: Baseline,
    table: RewardTable,
    bands: Bands,
    staleness: Sequence[int],
    silent_expected: bool,
) -> dict[str, float]:
    """Advantages, then the optimiser steps, then the batch enters the baseline. Returns the step's metrics,
    with the means of `staleness` (versions, one a sample) and of what the baseline expected.

    `batch`: not empty, every sample with a reward. `silent_expected`: as `advantages` has it. Raises
    GuardTripped as `Learner.step` does; the baseline has then not seen the batch.
    """
    train = learner.train
    expected = [baseline.mean(scored.sample, table.tau) for scored in batch]
    advantage = advantages(
        batch,
        mode=train.mode,
        baseline=baseline,
        table=table,
        staleness=staleness,
        limit=train.advantage_limit,
        silent_expected=silent_expected,
        normalise=train.normalise,
        expected=expected,
    )
    numbers = learner.step(batch, advantage, bands, number)
    numbers["staleness"] = sum(staleness) / len(staleness)
    numbers["baseline"] = sum(expected) / len(expected)
    baseline.update(batch, table)
    return numbers
