"""The report: tables for docs/experiments.md, and the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.experiments.ladder import FAULTS
from bench.experiments.studies import ALPHA
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def percent(share: Mapping[str, float]) -> str:
    """A proportion with its interval.

    >>> percent({"share": 0.0125, "low": 0.0104, "high": 0.0149})
    '1.25 % (1.04 to 1.49)'
    """
    return f"{100 * share['share']:.2f} % ({100 * share['low']:.2f} to {100 * share['high']:.2f})"


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is words, the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The tables of docs/experiments.md by the name of their place."""
    null, power = report["null"], report["power"]
    guarded, teams = report["guards"], report["sessions"]
    made = {}
    small = null["tuned at 50"]
    made["null"] = lines(
        ["promoted although no better", "share of experiments (95 %)"],
        [
            *[[name, percent(share)] for name, share in null["false promotions"].items()],
            ["plain, tuned at 50 units", percent(small["false promotions"])],
            ["plain, tuned at 50 units, missed at either end", percent(small["missed at either end"])],
        ],
    )
    made["mismatch"] = lines(
        ["sample-ratio alarms", "share of experiments (95 %)"],
        [[name, percent(share)] for name, share in null["mismatch alarms"].items()],
    )
    spent = report["spending"]
    made["spending"] = lines(
        [f"{spent['versions']} versions in turn, none better", "policies that ever promote one (95 %)"],
        [
            ["α spent (`analysis.spend`)", percent(spent["with spending"])],
            ["each version with all of α", percent(spent["each at 0.05"])],
        ],
    )
    made["guards"] = lines(
        ["guardrail broken", "A/A, share 5 %", "A/A, share 50 %", "exactly at the margin, share 5 %"],
        [
            [
                f"`{name}`" if name != "any" else "any",
                percent(guarded["A/A at 0.05"][name]),
                percent(guarded["A/A at 0.5"][name]),
                percent(guarded["at the margin, at 0.05"][name]) if name != "any" else "",
            ]
            for name in guarded["A/A at 0.05"]
        ],
    )
    plan = power["fixed horizon"]
    made["power"] = lines(
        ["way", "half found by", "80 % found by", "mean (at most all)"],
        [
            [
                "fixed horizon, one look at the end",
                "",
                f"{plan['units for 80 %']:,} (found: {plan['found']['share']:.1%})",
                "",
            ],
            *[
                [name, *(_number(way[key]) for key in ("half found", "80 % found", "mean, at most all"))]
                for name, way in power["ways"].items()
            ],
        ],
    )
    made["saved"] = lines(
        ["CUPED with", "users saved"], [[name, f"{share:.0%}"] for name, share in power["saved"].items()]
    )
    made["sessions"] = lines(
        ["assigned, analysed", "promoted although no better (95 %)"],
        [[name, percent(share)] for name, share in teams["false promotions"].items()],
    )
    made["days"] = lines(
        [
            "people",
            "lift",
            "half found",
            "80 % found",
            "half, with a week before",
            "80 %, with a week before",
        ],
        [
            [str(row["people"]), f"{row['lift']:.0%}"]
            + [
                _number(row[way][key], f"over {row['most days']}")
                for way in ("plain", "history")
                for key in ("half found", "80 % found")
            ]
            for row in teams["days until found"]
        ],
    )
    made["ladder"] = lines(
        [
            "version",
            "users",
            "first stage",
            "ends",
            "users who got it, median (95 %)",
            "requests",
            "working hours",
        ],
        [
            [
                row["version"],
                f"{row['users']:,}",
                f"{row['stages'][0]:.0%}",
                ", ".join(f"{end}: {count}" for end, count in row["ends"].items()),
                *(
                    f"{_number(row['harmed'][of][0])} ({_number(row['harmed'][of][1])})"
                    for of in ("users", "requests", "working hours")
                ),
            ]
            for row in report["ladder"]["rows"]
        ],
    )
    return made


def _number(value: float | None, missing: str = "more than all") -> str:
    if value is None:
        return missing
    return f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def page(text: str, made: Mapping[str, str]) -> str:
    """The page with its tables in their places: between `<!-- table: NAME -->` and `<!-- end -->`."""
    for name, table in made.items():
        start = f"<!-- table: {name} -->\n"
        head, found, rest = text.partition(start)
        if not found:
            raise SystemExit(f"the page has no place for the table {name}: {start.strip()}")
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}{start}\n{table}\n\n{end}{tail}"
    return text


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Four panels: false promotions, power, small teams, harm."""
    figure = Figure(figsize=(12.5, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    false, found, small, harm = figure.subplots(2, 2).flat
    for color, (name, points) in zip(COLORS, report["null"]["curves"].items(), strict=False):
        false.plot(*zip(*points, strict=True), color=color, label=name)
    false.axhline(ALPHA, color="black", linestyle=":", linewidth=1, label="α")
    false.set(
        title="A/A: promoted although no better", xlabel="users, a look after each",
        ylabel="share of experiments", yscale="log", ylim=(5e-4, 0.6),
    )  # fmt: skip
    false.legend(fontsize=8)
    for color, (name, points) in zip(COLORS, report["power"]["curves"].items(), strict=False):
        found.plot(*zip(*points, strict=True), color=color, label=name)
    planned = report["power"]["fixed horizon"]["units for 80 %"]
    found.plot([planned], [0.8], "k*", markersize=11, label="fixed horizon, planned for 80 %")
    found.axhline(0.8, color="black", linestyle=":", linewidth=1)
    lift = report["power"]["lift"]
    found.set(title=f"Accepted {lift:.0%} more: found", xlabel="users", ylabel="share of experiments")
    found.legend(fontsize=8)
    rows = report["sessions"]["days until found"]
    for color, lift in zip(COLORS, sorted({row["lift"] for row in rows}), strict=False):
        for way, style in (("plain", "--"), ("history", "-")):
            points = [
                (row["people"], row[way]["80 % found"])
                for row in rows
                if row["lift"] == lift and row[way]["80 % found"] is not None
            ]
            words = f"{lift:.0%} more" + (", week before known" if way == "history" else "")
            small.plot(*zip(*points, strict=True), style, color=color, marker="o", label=words)
    small.set(
        title="Mode `session`: working days until 80 % found", xlabel="people", ylabel="working days",
        xscale="log", yscale="log",
    )  # fmt: skip
    small.set_xticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    small.legend(fontsize=8)
    bad = [row for row in report["ladder"]["rows"] if row["version"] not in list(FAULTS)[:2]]
    names = [f"{row['version']}\n{row['users']:,} users, from {row['stages'][0]:.0%}" for row in bad]
    places = np.arange(len(bad))[::-1]
    middle = np.array([row["harmed"]["users"][0] for row in bad])
    upper = np.array([row["harmed"]["users"][1] for row in bad])
    harm.barh(places, middle, color=COLORS[1], height=0.6)
    harm.errorbar(
        middle, places, xerr=[np.zeros(len(bad)), upper - middle], fmt="none", ecolor="black", capsize=3
    )
    harm.set_yticks(places, names, fontsize=7)
    harm.set(title="Bad versions: users who got one, median and 95th percentile", xlabel="users")
    for axes in (false, found, small, harm):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
