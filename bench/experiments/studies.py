"""The studies of one stage with many users: false promotions, guardrails, versions in turn, power."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from bench.experiments.population import COLUMNS, SHOWN, People, Table, Version, days, taken, truth
from bench.experiments.sequential import (
    chunks,
    curve,
    firsts,
    msprt,
    published_mixture,
    rank,
    running,
    share_of,
    statistic,
    without_history,
)
from numpy.random import Generator
from scipy.stats import norm

from onlinerl import config
from onlinerl.experiments import analysis, decisions, guardrails
from onlinerl.experiments.analysis import LEAST, Floats, contrast, radius

ALPHA = 0.05
TUNED = 1000
"""Both are the settings' defaults."""


def null(rng: Generator, *, experiments: int = 10_000, units: int = 5_000) -> dict[str, Any]:
    """A/A: both arms are the same version. How often is one ever promoted, at a look after every user?"""
    table = days(rng, People.draw(rng, 1_000_000), Version(), history=0.85)
    names = COLUMNS[:4]
    times: dict[str, list[Floats]] = {}
    wrong = {"early": 0, "early_two_sided": 0}
    mismatches = 0
    fixed = float(norm.ppf(1 - ALPHA / 2))
    for some in chunks(experiments):
        columns = taken(table, rng.integers(0, len(table["reward"]), (some, units)), names)
        treated = rng.random((some, units)) < 0.5
        control, treatment = running(treated, columns)
        plain = without_history(control), without_history(treatment)
        for name, arms in {"cuped": (control, treatment), "plain": plain}.items():
            found = contrast(*arms)
            z = statistic(found)
            two = radius(found.size, alpha=ALPHA, tuned=TUNED)
            one = radius(found.size, alpha=ALPHA, tuned=TUNED, two_sided=False)
            times.setdefault(name, []).append(firsts(z > two))
            times.setdefault(f"{name}, missed at either end", []).append(firsts(np.abs(z) > two))
            times.setdefault(f"{name}, one-sided", []).append(firsts(z > one))
            if name == "plain":
                times.setdefault("a t-test at every look", []).append(firsts(z > fixed))
                early = radius(found.size, alpha=ALPHA, tuned=50)
                wrong["early"] += int((z > early).any(axis=1).sum())
                wrong["early_two_sided"] += int((np.abs(z) > early).any(axis=1).sum())
        counts = np.cumsum(treated, axis=1)
        surprise = analysis.imbalance((np.arange(1, units + 1) - counts, counts), 0.5)
        mismatches += int((surprise < 0.05).any(axis=1).sum())
        times.setdefault("mismatch", []).append(firsts(surprise < decisions.MISMATCH))
    joined = {name: np.concatenate(parts) for name, parts in times.items()}
    alarms = joined.pop("mismatch")
    return {
        "experiments": experiments,
        "units": units,
        "alpha": ALPHA,
        "tuned": TUNED,
        "false promotions": {
            name: share_of(int(np.isfinite(part).sum()), experiments) for name, part in joined.items()
        },
        "tuned at 50": {
            "false promotions": share_of(wrong["early"], experiments),
            "missed at either end": share_of(wrong["early_two_sided"], experiments),
        },
        "mismatch alarms": {
            "at 0.001": share_of(int(np.isfinite(alarms).sum()), experiments),
            "at 0.05": share_of(mismatches, experiments),
        },
        "curves": {name: curve(part, units) for name, part in joined.items() if "either" not in name},
    }


EDGES = {
    "reward": Version(),
    "latency": Version(slow=0.10),
    "errors": Version(errors=0.015),
    "shown": Version(shown=0.6 * SHOWN),
    "reverted": Version(reverted=0.25),
    "length": Version(length=120.0),
}
"""Versions that are exactly at one margin of the default guardrails: none of them should break it."""
RATIOS = {
    "reward": ("reward", "opportunities", -1.0, 1.0),
    "latency": ("slow", "opportunities", 1.0, 1.0),
    "errors": ("errors", "opportunities", 1.0, 1.0),
    "shown": ("shown", "opportunities", -1.0, 0.6),
    "reverted": ("reverted", "retained", 1.0, 1.0),
    "length": ("characters", "shown", 1.0, 2.0),
}
"""Numerator, denominator, sign of worse, factor of the control: those of `guardrails.watch`, tested."""


def broken(
    rng: Generator, arms: tuple[Table, Table], share: float, experiments: int, units: int
) -> dict[str, int]:
    """In how many experiments each guardrail ever breaks, at a look after every user; `any` of them."""
    limits = config.Guardrails()
    margins = {"latency": limits.latency, "errors": limits.errors, "reverted": limits.reverted}
    hits = dict.fromkeys((*RATIOS, "any"), 0)
    for some in chunks(experiments):
        rows = rng.integers(0, len(arms[0]["reward"]), (some, units))
        treated = rng.random((some, units)) < share
        ever = np.zeros(some, dtype=np.bool_)
        for name, (above, below, worse, scale) in RATIOS.items():
            pair = [taken(table, rows, (above, below)) for table in arms]
            columns = [np.where(treated, new, old) for old, new in zip(*pair, strict=True)]
            found = contrast(*running(treated, columns), scale=scale, cautious=True, least=LEAST // 2)
            known = found.known & (found.size >= LEAST)
            alpha = ALPHA * guardrails.SHARES[name]
            with np.errstate(invalid="ignore"):
                bound = radius(found.size, alpha=alpha, tuned=guardrails.TUNED, two_sided=False)
                low = worse * found.estimate - np.sqrt(found.variance) * bound
            crossed = (known & (low > margins.get(name, 0.0))).any(axis=1)
            hits[name] += int(crossed.sum())
            ever |= crossed
        hits["any"] += int(ever.sum())
    return hits


def guards(rng: Generator, *, experiments: int = 2_000, units: int = 5_000) -> dict[str, Any]:
    """How often guardrails break that should not: in A/A, and with versions exactly at their margins."""
    people = People.draw(rng, 400_000)
    same = days(rng, people, Version())
    report: dict[str, Any] = {"experiments": experiments, "units": units, "alpha": ALPHA}
    for share in (0.05, 0.5):
        hits = broken(rng, (same, same), share, experiments, units)
        report[f"A/A at {share:g}"] = {name: share_of(hit, experiments) for name, hit in hits.items()}
    at_margin = {}
    fewer = experiments // 4
    for name, version in EDGES.items():
        other = days(rng, people, version)
        hits = broken(rng, (same, other), 0.05, fewer, units)
        at_margin[name] = share_of(hits[name], fewer)
    report["at the margin, at 0.05"] = at_margin
    return report


def spending(
    rng: Generator, *, policies: int = 500, versions: int = 20, units: int = 3_000
) -> dict[str, Any]:
    """Policies that try version after version, none better than the live one: how many ever promote one?"""
    table = days(rng, People.draw(rng, 400_000), Version())
    ever = np.zeros(policies, dtype=np.bool_)
    naive = np.zeros(policies, dtype=np.bool_)
    for number in range(1, versions + 1):
        alpha = analysis.spend(ALPHA, number)
        done = 0
        for some in chunks(policies):
            columns = taken(table, rng.integers(0, len(table["reward"]), (some, units)), COLUMNS[:2])
            found = contrast(*running(rng.random((some, units)) < 0.5, columns))
            z = statistic(found)
            for marks, level in ((ever, alpha), (naive, ALPHA)):
                crossed = (z > radius(found.size, alpha=level, tuned=TUNED)).any(axis=1)
                marks[done : done + some] |= crossed
            done += some
    return {
        "policies": policies,
        "versions": versions,
        "units": units,
        "with spending": share_of(int(ever.sum()), policies),
        "each at 0.05": share_of(int(naive.sum()), policies),
    }


def power(
    rng: Generator, *, lift: float = 0.1, experiments: int = 1_000, units: int = 8_000
) -> dict[str, Any]:
    """A version whose accept rate is `lift` higher: after how many users is it found?"""
    people = People.draw(rng, 1_000_000)
    old, new = days(rng, people, Version()), days(rng, people, Version(lift=lift))
    week = _week(rng, people)
    tables = []
    for table in (old, new):
        fresh = dict(table)
        blank = rng.random(len(table["reward"])) < 0.15
        for name in COLUMNS[2:4]:
            fresh[f"{name} of 85 %"] = np.where(blank, 0.0, table[name])
            fresh[f"{name} of a week"] = week[name]
        tables.append(fresh)
    effect = truth(new) - truth(old)
    noise = [_noise(table) for table in (old, new)]
    quantiles = norm.ppf(1 - ALPHA / 2) + norm.ppf(0.8)
    planned = 2 * math.ceil(float(sum(noise)) * float(quantiles) ** 2 / effect**2)
    ways: dict[str, tuple[str, ...]] = {
        "no history": (),
        "history of a day, 85 % of users": ("before_reward of 85 %", "before_opportunities of 85 %"),
        "history of a day": ("before_reward", "before_opportunities"),
        "history of a week": ("before_reward of a week", "before_opportunities of a week"),
    }
    times: dict[str, list[Floats]] = {}
    at_plan = 0
    for some in chunks(experiments):
        rows = rng.integers(0, len(old["reward"]), (some, units))
        treated = rng.random((some, units)) < 0.5
        for name, history in ways.items():
            pair = [taken(table, rows, (*COLUMNS[:2], *history)) for table in tables]
            columns = [np.where(treated, after, before) for before, after in zip(*pair, strict=True)]
            found = contrast(*running(treated, columns))
            z = statistic(found)
            for sides, words in ((True, ""), (False, ", one-sided")):
                bound = radius(found.size, alpha=ALPHA, tuned=TUNED, two_sided=sides)
                times.setdefault(name + words, []).append(firsts(z > bound))
            if history:
                continue
            at_plan += int((z[:, planned - 1] > norm.ppf(1 - ALPHA / 2)).sum())
            spread = np.where(found.known, found.variance * found.size / 2, 1.0)
            gain = np.where(found.known, found.estimate, 0.0)
            mixtures = {
                "mSPRT, the authors' mixture": spread * published_mixture(ALPHA, units / 2),
                "mSPRT, mixture as wide as this very effect": np.full_like(spread, effect**2),
            }
            for words, mixture in mixtures.items():
                rejects = msprt(gain, spread, found.size, mixture=mixture, alpha=ALPHA) & (gain > 0)
                times.setdefault(words, []).append(firsts(rejects & found.known))
    joined = {name: np.concatenate(parts) for name, parts in times.items()}
    found_by: dict[str, dict[str, Any]] = {}
    for name, part in joined.items():
        found_by[name] = {
            "half found": rank(part, 0.5),
            "80 % found": rank(part, 0.8),
            "mean, at most all": float(np.minimum(part, units).mean()),
            "found in all": float(np.isfinite(part).mean()),
        }
    return {
        "lift": lift,
        "base": truth(old, "accepted"),
        "effect": effect,
        "experiments": experiments,
        "units": units,
        "fixed horizon": {"units for 80 %": planned, "found": share_of(at_plan, experiments)},
        "ways": found_by,
        "saved": {
            name: 1.0 - found_by[name]["80 % found"] / found_by["no history"]["80 % found"]
            for name in ways
            if name != "no history"
        },
        "curves": {name: curve(part, units) for name, part in joined.items() if "one-sided" not in name},
    }


def _week(rng: Generator, people: People) -> Table:
    """Seven days before, together."""
    parts = [days(rng, people, Version()) for _ in range(4)]
    # each call makes a day and the one before it, which are eight days in all: one too many is left out
    return {
        f"before_{name}": np.sum(
            [*(part[name] for part in parts), *(part[f"before_{name}"] for part in parts[:3])], axis=0
        )
        for name in ("reward", "opportunities")
    }


def _noise(table: Mapping[str, Floats]) -> float:
    deviations = table["reward"] - truth(table) * table["opportunities"]
    return float(np.var(deviations) / table["opportunities"].mean() ** 2)
