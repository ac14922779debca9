"""What the demo measured: estimates with their intervals, tables and the plot."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from onlinerl.datasets.simulate import (
    Outcome,
    Report,
)
from onlinerl.datasets.users import Act, Taste, similarity
from onlinerl.store.interactions import VersionCounts

POLICY = "tab"
FEWEST = 20
"""Opportunities below which no interval is given."""
Z = 1.959964
"""Two-sided 95 % of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval. Made by `reward_per_opportunity` and `difference`."""

    mean: float
    low: float
    high: float
    variance: float
    """Of the mean."""

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def reward_per_opportunity(counts: VersionCounts, tau: float) -> Estimate:
    """Mean reward of an opportunity: accept 1−τ, refusal −τ, everything else (silent, cancelled,
    unrated) 0. Plain normal interval over opportunities, with the unbiased sample variance.

    >>> print(reward_per_opportunity(VersionCounts(0, 100, 90, 10, 30, 40, 10), 0.1))
    +0.220 [+0.132, +0.308]
    """
    n = counts.opportunities
    if n < 2:
        return Estimate(math.nan, math.nan, math.nan, math.nan)
    accepted, refused = counts.accepted, counts.rejected + counts.timeout
    total = accepted * (1 - tau) - refused * tau
    squares = accepted * (1 - tau) ** 2 + refused * tau**2
    mean = total / n
    variance = max(squares - n * mean**2, 0.0) / (n - 1) / n
    return _estimate(mean, variance)


def difference(after: Estimate, before: Estimate) -> Estimate:
    """`after` − `before` of two independent samples (Welch's standard error, normal quantile)."""
    return _estimate(after.mean - before.mean, after.variance + before.variance)


def _estimate(mean: float, variance: float) -> Estimate:
    half = Z * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half, variance)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How a version answers the held-out prompts, greedily. Made by `_examine`."""

    prompts: int
    exact: float
    """Share equal to the author's text, trailing space aside."""
    similarity: float
    """Mean difflib ratio with the author's text."""
    fits: float
    """Share that fits the developers' taste, without noise."""
    characters: float
    """Mean length."""


def held_out_scores(answers: Sequence[tuple[str, str]], taste: Taste) -> HeldOut:
    """Score pairs of (completion, what the author wrote)."""
    n = len(answers)
    calm = replace(taste, noise=0.0)
    return HeldOut(
        prompts=n,
        exact=sum(one.rstrip() == other.rstrip() for one, other in answers) / n,
        similarity=sum(similarity(one, other) for one, other in answers) / n,
        fits=sum(calm.chance(one, other) for one, other in answers) / n,
        characters=sum(len(one) for one, _ in answers) / n,
    )


@dataclass(slots=True)
class Journal:
    """What happened, in order; filled while the demo runs."""

    started: float = field(default_factory=time.time)
    outcomes: list[Outcome] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)
    """When the engine began to give new requests which version."""
    reports: list[Report] = field(default_factory=list)
    switches: dict[str, float] = field(default_factory=dict)
    """Seconds from the switch in the store to the moment new requests got the other version."""


def traffic_totals(reports: Sequence[Report]) -> dict[str, Any]:
    """Sums of what the simulated developers counted."""
    sums: dict[str, Any] = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("requests", "cancelled", "cut", "cached", "late", "errors")
    }
    for name in ("feedback", "error_kinds"):
        sums[name] = {}
        for report in reports:
            for key, count in getattr(report, name).items():
                sums[name][key] = sums[name].get(key, 0) + count
    return sums


# ---------------------------------------------------------------------------------------- table, plot


def version_table(counts: Sequence[VersionCounts], rewards: Mapping[int, Estimate], tau: float) -> Table:
    """One row a version."""
    table = Table(title="what the versions earned")
    for name in ("version", "interactions", "shown", "accepted of shown", "reward per opportunity [95 %]"):
        table.add_column(name, justify="left" if name == "version" else "right")
    for row in counts:
        share = f"{row.accepted} ({row.accepted / row.shown:.0%})" if row.shown else "-"
        enough = row.opportunities >= FEWEST
        reward = str(rewards[row.version]) if enough else "(too few)"
        table.add_row(str(row.version), str(row.opportunities), str(row.shown), share, reward)
    table.caption = (
        f"accept {1 - tau:+.3f}, refusal {-tau:+.3f}, silent, cancelled or unrated 0; the same τ for every "
        "version; plain intervals over opportunities (all developers share one taste)"
    )
    return table


def exam_table(exams: Mapping[int, HeldOut]) -> Table:
    """Before and after, on files that nobody worked on."""
    some = next(iter(exams.values()))
    table = Table(title=f"greedy answers to {some.prompts} prompts from held-out files")
    for name in ("version", "exact match", "edit similarity", "fits the taste", "mean characters"):
        table.add_column(name, justify="left" if name == "version" else "right")
    for version, scores in exams.items():
        table.add_row(
            f"{POLICY}@{version}",
            f"{scores.exact:.1%}",
            f"{scores.similarity:.3f}",
            f"{scores.fits:.0%}",
            f"{scores.characters:.1f}",
        )
    return table


def accept_rates(outcomes: Sequence[Outcome], window: int = 60) -> tuple[list[float], list[float]]:
    """Times and accepted share of the last `window` answers that a developer accepted or refused;
    begins when a quarter of a window is there."""
    rated = sorted(
        (outcome.at, outcome.act in (Act.ACCEPT, Act.LATE_ACCEPT))
        for outcome in outcomes
        if outcome.act in (Act.ACCEPT, Act.LATE_ACCEPT, Act.REJECT, Act.TIMEOUT)
    )
    times, rates = [], []
    for end in range(max(window // 4, 1), len(rated) + 1):
        recent = rated[max(0, end - window) : end]
        times.append(recent[-1][0])
        rates.append(sum(accepted for _, accepted in recent) / len(recent))
    return times, rates


def draw(journal: Journal, path: Path, window: int = 60) -> None:
    """Accept rate over time with the changes of the live version marked, as a PNG."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times, rates = accept_rates(journal.outcomes, window)
    axes.plot([(at - journal.started) / 60 for at in times], rates, color="tab:blue", linewidth=1.8)
    before = -1
    for at, version in journal.live:
        backwards = version < before
        color = "tab:red" if backwards else "tab:gray"
        minute = (at - journal.started) / 60
        axes.axvline(minute, color=color, linestyle="--", linewidth=1)
        words = f" back to {version}" if backwards else f" {POLICY}@{version}"
        axes.text(minute, 1.01, words, color=color, fontsize=8, rotation=40, va="bottom", ha="left")
        before = version
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel(f"accepted of the last {window} rated")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
