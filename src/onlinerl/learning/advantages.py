"""How much better an answer was than what one could expect at its request (ALGORITHMS 4).

In mode `baseline` the expectation is a running mean per context bucket, shrunk towards the bucket above it:

    policy → language → single or multi line (as asked) → user

A bucket keeps decayed counts of accepts, rejects and silences, not a mean: τ may change between runs, and
the mean is recomputed with the current one. Beta(α, β) with forgetting as in SPO (arXiv 2509.13232), with
silence as a third outcome. It is read before the batch enters it, and it knows only what was known at the
request, so that it depends on no action and adds no bias.

In mode `group` it is the mean of the other answers to the same request (GRPO, arXiv 2402.03300), for requests
with several choices and for offline validation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onlinerl.learning.rewards import RewardTable
from onlinerl.records import Sample, Scored, Verdict

PRIOR = 8.0
"""Samples that the bucket above is worth: with so many of its own a bucket's mean is half its own."""
STALE_MARGIN = 0.05
"""By how much the baseline lies below the mean for each version of staleness, at most twice that:
with old data, pushing up what was good is safer than pushing down what was bad (AsymRE, 2506.20520)."""
SMALLEST_STD = 0.1
"""A batch whose advantages vary less than this is not blown up."""
EQUAL = 1e-6
"""Added to a group's standard deviation before it divides, as the seed's trainer does."""
FORGOTTEN = 1e-3
"""A bucket with a smaller count than this is dropped from the state."""


@dataclass(slots=True)
class Counts:
    """Decayed outcomes of a bucket. `other` and `score` hold samples whose reward does not follow from their
    verdict and τ: that came with a number of their own, or whose verdict has a weight."""

    accepted: float = 0.0
    rejected: float = 0.0
    silent: float = 0.0
    bonus: float = 0.0
    """Sum of what came on top of the verdict's number: retention bonuses, the user's own function."""
    other: float = 0.0
    score: float = 0.0

    @property
    def total(self) -> float:
        """Decayed number of samples."""
        return self.accepted + self.rejected + self.silent + self.other

    def reward(self, tau: float) -> float:
        """Sum of the rewards that these outcomes have under τ."""
        return self.accepted * (1.0 - tau) - self.rejected * tau + self.bonus + self.score


class Baseline:
    """Expected reward by context. `state` and `restore` carry it through checkpoints and runs."""

    def __init__(self, decay: float = 0.99, prior: float = PRIOR) -> None:
        self.decay = decay
        self.prior = prior
        self._buckets: dict[str, Counts] = {}

    @staticmethod
    def path(sample: Sample) -> tuple[str, ...]:
        """Names of the buckets that a sample belongs to, from the widest to the narrowest.

        >>> from types import SimpleNamespace
        >>> Baseline.path(SimpleNamespace(language="python", multiline=False, user="u1"))
        ('', 'python', 'python/single', 'python/single/u1')
        """
        language = sample.language or "-"
        lines = f"{language}/{'multi' if sample.multiline else 'single'}"
        return ("", language, lines, f"{lines}/{sample.user or '-'}")

    def mean(self, sample: Sample, tau: float) -> float:
        """Expected reward at the sample's request, under τ.

        m_k = (Σ rewards of bucket k + prior·m_(k−1)) / (n_k + prior), and m above the widest bucket is 0,
        the reward of silence.
        """
        mean = 0.0
        for name in self.path(sample):
            counts = self._buckets.get(name)
            if counts is not None:
                mean = (counts.reward(tau) + self.prior * mean) / (counts.total + self.prior)
        return mean

    @property
    def silent(self) -> float:
        """Decayed number of silent samples that it has seen."""
        widest = self._buckets.get("")
        return 0.0 if widest is None else widest.silent

    def update(self, samples: Iterable[Scored], table: RewardTable) -> None:
        """Let a batch in: forget a little, then count.

        The mean of the counts is the mean of the rewards, whatever these are made of. Where the verdict's
        number is part of them as it is, the outcome is counted, so that the mean follows τ, and the rest is
        a bonus; a timeout of weight w counts as w rejects and 1−w others. Where it is not (a client's own
        score, a verdict with a weight), the reward is kept as a number. Silence is counted always: its own
        number is 0 under every τ and weight.
        """
        plain = table.weight("verdict") == 1.0
        for name, counts in list(self._buckets.items()):
            for field in ("accepted", "rejected", "silent", "bonus", "other", "score"):
                setattr(counts, field, getattr(counts, field) * self.decay)
            if counts.total < FORGOTTEN:
                del self._buckets[name]
        for scored in samples:
            sample = scored.sample
            for name in self.path(sample):
                counts = self._buckets.setdefault(name, Counts())
                if sample.silent:
                    counts.silent += 1.0
                    counts.bonus += scored.reward
                elif not (plain and table.counts_verdict(sample)):
                    counts.other += 1.0
                    counts.score += scored.reward
                else:
                    accepted = sample.verdict is Verdict.ACCEPTED
                    rejection = table.rejection(sample.verdict, sample.verdict_source)
                    counts.accepted += accepted
                    counts.rejected += rejection
                    counts.other += 1.0 - accepted - rejection
                    more = (number for name, number in scored.parts.items() if name != sample.verdict.value)
                    counts.bonus += sum(more)

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        fields = Counts.__slots__
        return {name: {field: getattr(c, field) for field in fields} for name, c in self._buckets.items()}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Become what `state` says."""
        self._buckets = {name: Counts(**counts) for name, counts in state.items()}


def margin(staleness: int) -> float:
    """What is taken off the baseline for a sample that is so many versions old."""
    return STALE_MARGIN * min(max(staleness, 0), 2)


def advantages(
    batch: Sequence[Scored],
    *,
    mode: str,
    baseline: Baseline,
    table: RewardTable,
    staleness: Sequence[int],
    limit: float,
    silent_expected: bool,
    normalise: bool = True,
    expected: Sequence[float] | None = None,
) -> list[float]:
    """One number a sample. Samples that have no reward (`Scored.fault`) do not belong into `batch`.

    `raw`: the reward itself, the seed's setting (its Monte-Carlo return of one step).

    `baseline`: A = r − (mean of its buckets − margin(staleness)), then A / max(std, 0.1) if `normalise`,
    clipped to ±`limit`; std is that of the batch (population), and the batch's own mean is never taken
    off. Where the policy was silent at times (`silent_expected`) but neither the batch nor the baseline's
    memory holds a silent row, nothing is taken off at all: a mean over shown answers alone would make the
    average shown answer worth 0, as much as silence, whatever τ says. `expected`: the means of its buckets
    (`baseline.mean`), one a sample, where somebody has asked for them already.

    `group`: A = (r − mean) / (std + 1e-6) over the samples of the batch that share their request's id and
    their prompt (a request may bring several); std is that of a sample (n − 1). A group of one, or of equal
    rewards, gives 0: it has nothing to compare. A batch takes what is there in the order of the requests, so
    at its edges a group may be cut in two, and each part is compared within itself; a `train.batch` that is a
    multiple of `n` keeps them whole where every choice is rated.
    """
    rewards = [scored.reward for scored in batch]
    if mode == "raw":
        return rewards
    if mode == "group":
        return _grouped([(scored.sample.id, scored.sample.prompt_ids) for scored in batch], rewards)
    if expected is None:
        expected = [baseline.mean(scored.sample, table.tau) for scored in batch]
    lacks_silent = silent_expected and baseline.silent == 0.0 and not any(s.sample.silent for s in batch)
    raw = [
        reward - (0.0 if lacks_silent else mean - margin(stale))
        for reward, mean, stale in zip(rewards, expected, staleness, strict=True)
    ]
    mean = sum(raw) / max(1, len(raw))
    std = math.sqrt(sum((a - mean) ** 2 for a in raw) / max(1, len(raw)))
    scale = max(std, SMALLEST_STD) if normalise else 1.0
    return [max(-limit, min(limit, a / scale)) for a in raw]


def _grouped(names: Sequence[Hashable], rewards: Sequence[float]) -> list[float]:
    """GRPO's advantage: each reward against those of the same name."""
    groups: dict[Hashable, list[float]] = {}
    for name, reward in zip(names, rewards, strict=True):
        groups.setdefault(name, []).append(reward)
    means = {name: statistics.fmean(group) for name, group in groups.items()}
    stds = {name: statistics.stdev(group) if len(group) > 1 else 0.0 for name, group in groups.items()}
    # A zero over 1e-6 is a zero; rounding in the mean of equal rewards must not become a number.
    return [
        (reward - means[name]) / (stds[name] + EQUAL) if stds[name] > 0.0 else 0.0
        for name, reward in zip(names, rewards, strict=True)
    ]
