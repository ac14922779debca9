"""What every judge is, and the cheapest one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from onlinerl.datasets.fim import LONGEST_MIDDLE, FimPrompt
from onlinerl.datasets.users import similarity

HIGHEST = 10.0
"""Scores lie in [0, HIGHEST], the scale of the field's headline and of the model card."""
COMPARED = 5 * LONGEST_MIDDLE
"""Characters of a completion that are compared; difflib's time grows with the product of both lengths, and
what comes later can only lower the ratio."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge makes of one completion. Made by a `Judge`, eaten by offline validation.

    >>> Judgement.example().score
    7.5
    """

    score: float | None
    """0 to 10; None: the judge failed, so the sample is masked and counted, never given a score."""
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Points by source; they add up to `score`. Empty when the judge failed."""
    reason: str = ""
    """Why there is no score."""

    @staticmethod
    def example() -> Judgement:
        """A small one, for tests and documentation."""
        return Judgement(7.5, MappingProxyType({"similarity": 7.5}))


class Judge(Protocol):
    """Scores completions where users are missing. Train with one and report with another."""

    @property
    def name(self) -> str:
        """For reports; never holds a key."""
        ...

    async def judge(self, pairs: Sequence[tuple[FimPrompt, str]]) -> list[Judgement]:
        """One judgement for each (prompt, completion), in the same order.

        Raises JudgeError when no further call can help: wrong key, wrong address, unknown model.
        """
        ...


def closeness(completion: str, middle: str) -> float:
    """`datasets.users.similarity` of the two, in [0, 1], in bounded time.

    ratio = 2·M/T with M matched characters and T the length of both (difflib). Of a completion longer than
    COMPARED and twice the middle, M is that of its beginning and T that of the whole.
    """
    most = max(COMPARED, 2 * len(middle))
    if len(completion) <= most:
        return similarity(completion, middle)
    whole, other = len(completion.rstrip()), len(middle.rstrip())
    cut = completion[:most].rstrip()
    return similarity(cut, middle) * (len(cut) + other) / max(whole + other, 1)


class SimilarityJudge:
    """Ten times the similarity with what the author wrote; where both are silent 10."""

    name = "similarity"

    async def judge(self, pairs: Sequence[tuple[FimPrompt, str]]) -> list[Judgement]:
        """Never fails."""
        return [self.score(prompt, completion) for prompt, completion in pairs]

    def score(self, prompt: FimPrompt, completion: str) -> Judgement:
        """One judgement, without waiting."""
        silent = not completion.strip() and not prompt.middle.strip()
        score = HIGHEST if silent else HIGHEST * closeness(completion, prompt.middle)
        return Judgement(score, MappingProxyType({"similarity": score}))
