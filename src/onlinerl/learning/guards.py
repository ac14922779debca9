"""Bands that every step must keep (ALGORITHMS 7). Pure: numbers in, GuardTripped out."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from onlinerl import config
from onlinerl.errors import GuardTripped
from onlinerl.learning.losses import next_multiplier
from onlinerl.records import Scored, Verdict

VETOED = 0.5
"""Share of vetoed tokens above which the policy has left what was served: the KL, an estimate from those
very tokens, can no longer see it."""
ENOUGH = 8
"""Samples from which on a batch's means are judged; the last batch of a run may be smaller."""
WARM = 5
"""Gradient norms seen before their median says anything."""
NOTHING = 1e-6
"""Gradient norm that is none: rounding where all rewards of a batch are what was expected."""
MEMORY = 50
"""Gradient norms that the median is taken of."""
JUDGED = 16
"""Accepted and refused answers, of each, from which on their mean rewards are compared."""
APART = 6
"""Of each, from which on it is no chance any more (1 in 924) that every accepted answer earned less than
every refused one: a sign that a bug flipped is seen in the first batch."""
EARNED = 256
"""Rewards of accepted answers that are remembered, and as many of refused ones."""


def contradicted(accepted: Sequence[float], refused: Sequence[float]) -> bool:
    """Whether accepted answers earned less than refused ones, beyond chance.

    Either all of them did (APART of each), or their mean lies under that of the refused by more than three
    standard errors of the difference (JUDGED of each). Rewards that have nothing to do with verdicts pass.
    """
    fewest = min(len(accepted), len(refused))
    if fewest >= APART and max(accepted) < min(refused):
        return True
    if fewest < JUDGED:
        return False
    error = math.sqrt(
        statistics.variance(accepted) / len(accepted) + statistics.variance(refused) / len(refused)
    )
    return statistics.fmean(refused) - statistics.fmean(accepted) > 3.0 * error


def most_of_one(trust: config.Trust, active: int, batch: int) -> int | None:
    """Samples of a full batch that one user may have, at least 1; None: any number (ALGORITHMS 10).

    From `trust.crowd` active users on, the larger of `trust.share` and `trust.users` / active of it; before,
    `trust.dominance` of it, so that a batch which is full is one that `dominance` lets pass.
    """
    if trust.owner:
        return None
    share = max(trust.share, trust.users / active) if active >= trust.crowd else trust.dominance
    return max(1, int(min(1.0, share) * batch))


def dominance(users: Sequence[str], limit: float) -> str:
    """Why a batch may not be learned from: one user has more than `limit` of it; "" where none has.

    `users` holds the user of each sample. The user is not named: logs and messages hold no identifiers.
    """
    if not users:
        return ""
    most = max(Counter(users).values())
    if most <= limit * len(users):
        return ""
    return (
        f"trust.dominance: one user gave {most / len(users):.0%} of a batch ({most} of {len(users)} "
        f"samples), more than {limit:.0%}: others must be heard too (requests that name no user count "
        "as one); set trust.owner where that user may teach alone"
    )


class Bands:
    """The guards and the show rate's multiplier, with what they remember of the run's start."""

    def __init__(self, guards: config.Guards, silence: config.Silence) -> None:
        self.guards = guards
        self.silence = silence
        self.entropy: float | None = None
        """Mean entropy per token in the run's first batch."""
        self.length: float | None = None
        """Mean tokens of an answer with text in the run's first batch."""
        self.norms: list[float] = []
        self.multiplier = 0.0
        """λ of the show rate's floor."""
        self.violations = 0
        """Batches in a row with a show rate under the floor."""
        self.faults: list[str] = []
        """Why the last samples got no reward; "" for those that got one."""
        self.accepted: list[float] = []
        """Rewards of the last accepted answers."""
        self.refused: list[float] = []
        """Rewards of the last answers that were rejected by hand or timed out."""

    def rewards(self, batch: Sequence[Scored]) -> None:
        """Before a batch is learned from: most samples must have a reward, and rewards must not contradict
        the verdicts."""
        self.faults = [*self.faults, *(scored.fault for scored in batch)][-max(ENOUGH, len(batch)) :]
        faults = [fault for fault in self.faults if fault]
        if len(self.faults) >= ENOUGH and len(faults) > len(self.faults) / 2:
            raise GuardTripped(
                f"{len(faults)} of the last {len(self.faults)} samples got no reward; the last time, "
                f"{faults[-1]}"
            )
        for scored in batch:
            if scored.fault or scored.sample.silent:
                continue
            earned = self.accepted if scored.sample.verdict is Verdict.ACCEPTED else self.refused
            earned.append(scored.reward)
        self.accepted, self.refused = self.accepted[-EARNED:], self.refused[-EARNED:]
        if self.guards.contradiction and contradicted(self.accepted, self.refused):
            raise GuardTripped(
                "the rewards contradict the verdicts: accepted answers earned "
                f"{statistics.fmean(self.accepted):+.2g} on average and rejected ones "
                f"{statistics.fmean(self.refused):+.2g}: look at rewards.function and rewards.weights "
                "(guards.contradiction)"
            )

    def gradient(self, norm: float, loss: float) -> None:
        """Before an optimiser step. A NaN must not reach the weights.

        A step without any gradient says nothing of their size: no answer of its batch earned another reward
        than expected, as where nobody accepted anything. It is not remembered.
        """
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise GuardTripped(
                f"the loss ({loss:g}) or the gradient norm ({norm:g}) is not a number: nothing was written"
            )
        if norm <= NOTHING:
            return
        if len(self.norms) >= WARM:
            median = statistics.median(self.norms)
            if norm > self.guards.gradient * median:
                raise GuardTripped(
                    f"guards.gradient: the gradient norm {norm:.3g} is above {self.guards.gradient:g} times "
                    f"its running median {median:.3g}"
                )
        self.norms = [*self.norms[1 - MEMORY :], norm]

    def batch(self, numbers: Mapping[str, float], samples: int) -> None:
        """After a batch. Uses kl and entropy of `numbers`, and length, clip_fraction, veto_fraction if there.

        A number that is none trips always, and so does a policy that moved too far; the other means trip only
        from ENOUGH samples on.
        """
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise GuardTripped(f"{name} is not a number ({value}): nothing was written")
        length = numbers.get("length")
        guards = self.guards
        # Few samples can move the weights as far as many: how far they moved is judged always.
        if numbers.get("veto_fraction", 0.0) > VETOED:
            raise GuardTripped(
                f"train.veto: {numbers['veto_fraction']:.2f} of the tokens are in answers that the policy "
                "would never give any more"
            )
        if numbers.get("kl", 0.0) > guards.kl:
            raise GuardTripped(
                f"guards.kl: the KL per token to the last promoted version is {numbers['kl']:.3g}, "
                f"above {guards.kl:g}"
            )
        if samples < ENOUGH:
            return
        if self.entropy is None:
            self.entropy = numbers["entropy"]
        if self.length is None and length:
            self.length = length
        if numbers["entropy"] < guards.entropy * self.entropy:
            raise GuardTripped(
                f"guards.entropy: the entropy per token is {numbers['entropy']:.3g}, under "
                f"{guards.entropy:g} times that of the run's start, {self.entropy:.3g}"
            )
        if length and self.length:
            if length < guards.length_low * self.length:
                raise GuardTripped(
                    f"guards.length_low: answers have {length:.1f} tokens, under {guards.length_low:g} times "
                    f"those of the run's start, {self.length:.1f}"
                )
            if length > guards.length_high * self.length:
                raise GuardTripped(
                    f"guards.length_high: answers have {length:.1f} tokens, above "
                    f"{guards.length_high:g} times those of the run's start, {self.length:.1f}"
                )
        if numbers.get("clip_fraction", 0.0) > guards.clip_fraction:
            raise GuardTripped(
                f"guards.clip_fraction: {numbers['clip_fraction']:.2f} of the tokens were clipped, above "
                f"{guards.clip_fraction:g}"
            )

    def show(self, show: float, floor: float) -> None:
        """After a batch: its show rate and the floor on the same prompts. Moves λ; halts after `patience`."""
        self.multiplier = next_multiplier(self.multiplier, show, floor, self.silence.step)
        self.violations = self.violations + 1 if show < floor else 0
        if self.violations >= self.silence.patience:
            raise GuardTripped(
                f"silence.floor: the show rate was under its floor in {self.violations} batches in a row "
                f"(now {show:.2f}, floor {floor:.2f})"
            )

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "entropy": self.entropy,
            "length": self.length,
            "norms": self.norms,
            "multiplier": self.multiplier,
            "violations": self.violations,
            "faults": self.faults,
            "accepted": self.accepted,
            "refused": self.refused,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` says."""
        self.entropy = state["entropy"]
        self.length = state["length"]
        self.norms = list(state["norms"])
        self.multiplier = state["multiplier"]
        self.violations = state["violations"]
        self.faults = list(state["faults"])
        self.accepted = list(state["accepted"])
        self.refused = list(state["refused"])
