"""Who says what an answer is worth: a judge by a score, simulated users by their verdicts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onlinerl import config
from onlinerl.datasets.users import TASTES, Taste, User, cohorts
from onlinerl.errors import JudgeError, SettingsError
from onlinerl.learning.judges import HIGHEST, Judge
from onlinerl.records import Sample, Verdict
from onlinerl.validate.rollouts import Answer

TOLERATED = 0.5
"""Share of a draw that a judge may fail on; beyond it there is nothing to learn from."""
GOOD = HIGHEST / 2
"""A judge's verdict: half of the points or more is an accept."""


class Rater(Protocol):
    """Turns answers into samples."""

    left_out: Counter[str]
    """Answers that became no sample, by reason."""

    async def rate(self, answers: Sequence[Answer]) -> list[Sample]:
        """Samples of those that were rated, in their order. Raises JudgeError."""
        ...


@dataclass(slots=True)
class JudgeRater:
    """A judge's points, a tenth of them as the sample's score; what it fails on is left out and counted."""

    judge: Judge
    policy: str
    left_out: Counter[str] = field(default_factory=Counter)

    async def rate(self, answers: Sequence[Answer]) -> list[Sample]:
        """Raises JudgeError when more than half of the answers could not be judged."""
        judgements = await self.judge.judge([(one.prompt, one.completion) for one in answers])
        samples: list[Sample] = []
        reason = ""
        for answer, judgement in zip(answers, judgements, strict=True):
            if judgement.score is None:
                reason = judgement.reason
                continue
            verdict = Verdict.ACCEPTED if judgement.score >= GOOD else Verdict.REJECTED
            samples.append(
                answer.sample(
                    self.policy,
                    user="",
                    verdict=Verdict.SILENT if answer.silent else verdict,
                    source="judge",
                    score=judgement.score / HIGHEST,
                )
            )
        failed = len(answers) - len(samples)
        self.left_out["judge failed"] += failed
        if failed > TOLERATED * len(answers):
            raise JudgeError(
                f"the judge {self.judge.name} failed on {failed} of {len(answers)} completions; the last "
                f"time: {reason or 'it gave no reason'}"
            )
        return samples


class UserRater:
    """Simulated users accept with the probability that their taste gives; nobody sees a silent answer.

    The noise, in the order in which it happens to a shown answer: nobody rates it; nobody gets round to it,
    and the client's clock runs out; its verdict comes as the opposite.
    """

    def __init__(self, settings: config.Validation, policy: str) -> None:
        self.settings = settings
        self.policy = policy
        self.users = users_of(settings)
        self.left_out: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        """Opportunities, accepted, shown and rated so far."""
        self._rng = random.Random(f"{settings.seed}/users")

    async def rate(self, answers: Sequence[Answer]) -> list[Sample]:
        """Draws the same number of random values whatever the answers say."""
        return [sample for answer in answers if (sample := self._rate(answer)) is not None]

    def _rate(self, answer: Answer) -> Sample | None:
        settings = self.settings
        missing, clock, flipping, liking = (self._rng.random() for _ in range(4))
        user = self.users[(self.seen["opportunities"] // settings.group) % len(self.users)]
        self.seen["opportunities"] += 1
        if answer.silent:
            # The server labels silence by itself, while shown answers wait for somebody to rate them: drawn
            # at the label rate of the shown, as the online system draws them.
            rate = self.seen["rated"] / self.seen["shown"] if self.seen["shown"] else 1.0
            if settings.silent == "rated" and missing >= rate:
                self.left_out["surplus silent"] += 1
                return None
            return answer.sample(self.policy, user=user.name, verdict=Verdict.SILENT, source="server")
        self.seen["shown"] += 1
        if missing < settings.noise_missing:
            self.left_out["not rated"] += 1
            return None
        self.seen["rated"] += 1
        if clock < settings.noise_timeout:
            return answer.sample(self.policy, user=user.name, verdict=Verdict.TIMEOUT, source="native")
        accepted = liking < user.taste.chance(answer.completion, answer.prompt.middle)
        if flipping < settings.noise_flip:
            accepted = not accepted
        self.seen["accepted"] += accepted
        verdict = Verdict.ACCEPTED if accepted else Verdict.REJECTED
        return answer.sample(self.policy, user=user.name, verdict=verdict, source="native")


def users_of(settings: config.Validation) -> tuple[User, ...]:
    """Who rates: always the same people, whatever the seed. Raises SettingsError."""
    tastes = dict(zip(settings.tastes, tastes_of(settings.tastes), strict=True))
    everybody = cohorts(settings.users, tastes, 0, spread=settings.spread)
    if settings.user is None:
        return everybody
    found = tuple(user for user in everybody if user.name == settings.user)
    if not found:
        names = ", ".join(user.name for user in everybody)
        raise SettingsError(f"validation.user: there is no user {settings.user!r}, but {names}")
    return found


def reported(settings: config.Validation) -> list[Taste]:
    """Tastes that the report's accept rate is of. Raises SettingsError."""
    own = (user.taste for user in users_of(settings))
    return tastes_of(settings.report_tastes, "report_tastes") or list(dict.fromkeys(own))


def tastes_of(names: Sequence[str], setting: str = "tastes") -> list[Taste]:
    """Tastes by name. Raises SettingsError for one that there is not."""
    for name in names:
        if name not in TASTES:
            raise SettingsError(f"validation.{setting}: no taste {name!r}; there are {', '.join(TASTES)}")
    return [TASTES[name] for name in names]
