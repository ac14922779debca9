"""Judges: what scores a completion where there are no users, from 0 to 10."""

from __future__ import annotations

from pathlib import Path

from onlinerl import config
from onlinerl.learning.judges.base import HIGHEST, Judge, Judgement, SimilarityJudge
from onlinerl.learning.judges.cache import ScoreCache
from onlinerl.learning.judges.llm import CHARACTERS_PER_TOKEN, Estimate, LLMJudge, estimate
from onlinerl.learning.judges.reference import ReferenceJudge

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "HIGHEST",
    "Estimate",
    "Judge",
    "Judgement",
    "LLMJudge",
    "ReferenceJudge",
    "SimilarityJudge",
    "estimate",
    "make_judge",
]


def make_judge(settings: config.Judge, cache: Path | None = None) -> Judge:
    """The judge that `settings` describe.

    `cache` is a file in which an LLM judge keeps its scores; None keeps them in memory, and the other judges
    need none. Raises SettingsError when the settings and the environment do not say enough.
    """
    if settings.kind == "similarity":
        return SimilarityJudge()
    if settings.kind == "reference":
        return ReferenceJudge()
    return LLMJudge(settings, ScoreCache(cache))
