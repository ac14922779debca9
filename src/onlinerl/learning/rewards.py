"""From verdict to number (ALGORITHMS 3), and the worker that does it inside a run.

Accept 1−τ, reject −τ, silent 0. τ is the accept rate at which showing and staying silent are worth the
same: above it showing pays, below it silence does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onlinerl import config
from onlinerl.flow.channel import Channel
from onlinerl.flow.worker import Worker
from onlinerl.records import Sample, Scored, Verdict

ONLY_TIMEOUTS = frozenset({"continue", "fork"})
"""Sources that cannot report an explicit reject: every one of theirs is a timeout. Weighing it less would
move the break-even point away from τ, so it weighs 1."""


def auto_tau(accepted: int, opportunities: int, limit: float) -> float:
    """Half of the accepts per *opportunity* (silent and cancelled ones included), at most `limit`.

    Per shown answer it would ratchet: the more silent the policy, the higher its accept rate, the higher τ.
    Without any opportunity there is nothing to halve: 0, which never pays silence.
    """
    if opportunities <= 0:
        return 0.0
    return min(limit, 0.5 * accepted / opportunities)


@dataclass(frozen=True, slots=True)
class RewardTable:
    """The rule of one run; τ is held from its start to its end."""

    tau: float
    timeout_weight: float = 0.5
    retention_bonus: float = 0.0

    @classmethod
    def of(cls, settings: config.Rewards, tau: float) -> RewardTable:
        """The rule that `settings` describe, with the run's τ."""
        return cls(tau, settings.timeout_weight, settings.retention_bonus)

    def rejection(self, verdict: Verdict, source: str) -> float:
        """How much of a reject this verdict is: 1 explicit, `timeout_weight` or 1 a timeout, else 0."""
        if verdict is Verdict.REJECTED:
            return 1.0
        if verdict is Verdict.TIMEOUT:
            return 1.0 if source in ONLY_TIMEOUTS else self.timeout_weight
        return 0.0

    def parts(self, sample: Sample) -> Mapping[str, float]:
        """Reward by source; the sum is the reward. A client's own `score` takes the verdict's place."""
        if sample.score is not None:
            return {"score": sample.score}
        if sample.verdict is Verdict.SILENT:
            return {"silent": 0.0}
        if sample.verdict is Verdict.ACCEPTED:
            parts = {"accepted": 1.0 - self.tau}
            if self.retention_bonus and sample.retained_characters is not None and sample.completion:
                share = min(1.0, sample.retained_characters / len(sample.completion))
                parts["retained"] = self.retention_bonus * share
            return parts
        return {sample.verdict.value: -self.tau * self.rejection(sample.verdict, sample.verdict_source)}

    def score(self, sample: Sample) -> Scored:
        """The sample with its reward."""
        parts = self.parts(sample)
        return Scored(sample, sum(parts.values()), parts)


class ComputeReward(Worker[Sample, Scored]):
    """Samples in, scored samples out, in the same order."""

    def __init__(self, table: RewardTable) -> None:
        self.table = table

    def run(self, input: Channel[Sample] | None, output: Channel[Scored] | None) -> None:
        """Until the input ends."""
        assert input is not None
        assert output is not None
        for sample in input:
            output.put(self.table.score(sample))
