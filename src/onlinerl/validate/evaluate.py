"""What weights are worth on held-out prompts, each number with a 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onlinerl.datasets.fim import FimPrompt
from onlinerl.datasets.users import Taste, similarity
from onlinerl.errors import JudgeError
from onlinerl.learning.judges import Judge, Judgement
from onlinerl.learning.judges.syntax import parses
from onlinerl.validate.estimates import Estimate, ratio
from onlinerl.validate.rollouts import Answer


@dataclass(frozen=True, slots=True)
class Scores:
    """What came of each held-out prompt under one setting of the sampling. Made by `score`."""

    prompts: tuple[FimPrompt, ...]
    columns: Mapping[str, tuple[float, ...]]
    """One number a prompt by name: judge/NAME, accept (chance of it), shown, exact, similarity, characters,
    tokens, parses. NaN where there is none: the judge failed, no parser for the language."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """By judge how often it failed, and why the last time."""
    examples: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(completion, what the author wrote) of the first prompts, for a look."""

    @property
    def clusters(self) -> list[str]:
        """Each prompt's file; prompts without one stand alone."""
        return [one.path or str(place) for place, one in enumerate(self.prompts)]

    def first(self, count: int) -> Scores:
        """Those of the first prompts alone."""
        columns = {name: column[:count] for name, column in self.columns.items()}
        return Scores(self.prompts[:count], columns, self.faults)

    def estimates(self, tau: float) -> dict[str, Estimate]:
        """All metrics. `reward` is per opportunity under τ: accept − τ where something was shown, else 0."""
        ones = [1.0] * len(self.prompts)
        found = {name: self._mean(column) for name, column in self.columns.items()}
        found["accept_shown"] = ratio(self.columns["accept"], self.columns["shown"], self.clusters)
        found["reward"] = ratio(self.rewards(tau), ones, self.clusters)
        return found

    def rewards(self, tau: float) -> list[float]:
        """Expected reward of each opportunity."""
        return [
            (accept - tau) * shown
            for accept, shown in zip(self.columns["accept"], self.columns["shown"], strict=True)
        ]

    def gains(self, before: Scores, tau: float) -> dict[str, Estimate]:
        """How much each metric is above that of `before`, prompt by prompt: the errors are paired, so they
        are smaller than those of two independent samples. Raises ValueError for other prompts."""
        if self.prompts != before.prompts:
            raise ValueError("gains are of the same prompts")
        pairs = {name: (column, before.columns[name]) for name, column in self.columns.items()}
        pairs["reward"] = (tuple(self.rewards(tau)), tuple(before.rewards(tau)))
        return {
            name: self._mean([after - start for after, start in zip(one, other, strict=True)])
            for name, (one, other) in pairs.items()
        }

    def _mean(self, column: Sequence[float]) -> Estimate:
        kept = [not math.isnan(value) for value in column]
        values = [value if keep else 0.0 for value, keep in zip(column, kept, strict=True)]
        return ratio(values, [float(keep) for keep in kept], self.clusters)


async def score(
    answers: Sequence[Answer],
    tastes: Sequence[Taste],
    judges: Mapping[str, Judge],
    *,
    examples: int = 0,
) -> Scores:
    """Score one answer to each held-out prompt.

    `tastes`: those that `accept` is the mean of. `judges`: by the name that they have in the report.
    """
    columns: dict[str, tuple[float, ...]] = {}
    faults: dict[str, str] = {}
    pairs = [(one.prompt, one.completion) for one in answers]
    for name, judge in judges.items():
        try:
            judgements = await judge.judge(pairs)
        except JudgeError as error:  # the other numbers can be told without it
            judgements = [Judgement(None, reason=str(error))] * len(pairs)
        reasons = [one.reason for one in judgements if one.score is None]
        if reasons:
            faults[name] = f"{judge.name} failed on {len(reasons)} of {len(pairs)}: {reasons[-1]}"
        columns[f"judge/{name}"] = tuple(math.nan if one.score is None else one.score for one in judgements)
    columns["accept"] = tuple(
        0.0 if one.silent else sum(t.chance(one.completion, one.prompt.middle) for t in tastes) / len(tastes)
        for one in answers
    )
    columns["shown"] = tuple(float(not one.silent) for one in answers)
    columns["exact"] = tuple(float(c.rstrip() == prompt.middle.rstrip()) for prompt, c in pairs)
    columns["similarity"] = tuple(similarity(c, prompt.middle) for prompt, c in pairs)
    columns["characters"] = tuple(float(len(c)) for _, c in pairs)
    columns["tokens"] = tuple(float(len(one.ids)) for one in answers)
    columns["parses"] = tuple(
        math.nan if (found := parses(prompt, c)) is None else float(found) for prompt, c in pairs
    )
    looked_at = tuple((c, prompt.middle) for prompt, c in pairs[:examples])
    return Scores(tuple(prompt for prompt, _ in pairs), columns, faults, looked_at)


def as_json(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """For the report; NaN becomes null, since JSON has none."""
    return {
        name: {key: None if math.isnan(value) else value for key, value in one.as_json().items()}
        for name, one in estimates.items()
    }
