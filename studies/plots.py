"""Plots of a summary: learning curves with their intervals as bands, or bars where there are no curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b", "#7f7f7f", "#bcbd22",
)  # fmt: skip
"""Okabe and Ito's, which colour-blind readers can tell apart, and three more."""
STYLES = ("-", "--", ":", "-.")
LABELS = {
    "reward": "reward per opportunity",
    "show": "show rate",
    "accept": "accepted of all opportunities",
    "accept_shown": "accepted of shown",
    "judge": "judge, 0–10",
    "length": "characters of an answer",
}
"""Words for the last part of a metric's name."""


def draw(summary: Mapping[str, Any], path: Path) -> bool:
    """Write a PNG: one panel a curve metric, else one panel with the first column's intervals. False when
    there is nothing to draw."""
    curves = [metric for metric in summary["curves"] if _has(summary, metric)]
    if not summary["arms"]:
        return False
    count = max(1, len(curves))
    figure = Figure(figsize=(6.4 * count, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, squeeze=False)[0]
    if curves:
        for axes, metric in zip(panels, curves, strict=True):
            _lines(axes, summary, metric)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
    elif not _bars(panels[0], summary):
        return False
    seeds = max(len(facts["seeds"]) for facts in summary["arms"].values())
    figure.suptitle(f"{summary['title']}\n(bands and bars: 95 %, up to {seeds} runs an arm)", fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    return True


def _has(summary: Mapping[str, Any], metric: str) -> bool:
    return any(len(facts["curve"].get(metric, ())) > 1 for facts in summary["arms"].values())


def _lines(axes: Axes, summary: Mapping[str, Any], metric: str) -> None:
    for number, (arm, facts) in enumerate(summary["arms"].items()):
        points = facts["curve"].get(metric, ())
        if len(points) < 2:
            continue
        color = COLORS[number % len(COLORS)]
        at = [point["completions"] for point in points]
        axes.plot(
            at, [point["mean"] for point in points], label=arm, color=color, linewidth=1.6,
            linestyle=STYLES[number // len(COLORS) % len(STYLES)],
        )  # fmt: skip
        axes.fill_between(
            at, [point["low"] for point in points], [point["high"] for point in points],
            color=color, alpha=0.13, linewidth=0,
        )  # fmt: skip
    axes.set_xlabel("completions sampled to learn from")
    axes.set_ylabel(label(metric))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _bars(axes: Axes, summary: Mapping[str, Any]) -> bool:
    column = summary["columns"][0]
    place = "metrics" if column["at"] == "final" else "extras"
    rows = [
        (arm, facts[place][column["metric"]])
        for arm, facts in summary["arms"].items()
        if column["metric"] in facts[place]
    ]
    for number, (_, one) in enumerate(rows):
        low, high = one["mean"] - one["low"], one["high"] - one["mean"]
        axes.errorbar([one["mean"]], [number], xerr=[[low], [high]], fmt="o", color=COLORS[0], capsize=3)
        axes.plot(one["values"], [number] * len(one["values"]), "|", color="black", alpha=0.5)
    axes.set_yticks(range(len(rows)), [arm for arm, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(column["title"])
    axes.grid(alpha=0.3, axis="x")
    return bool(rows)


def label(metric: str) -> str:
    """An axis' words.

    >>> label("greedy.reward"), label("sampled.show")
    ('reward per opportunity (greedy)', 'show rate (T=1)')
    """
    mode, _, name = metric.rpartition(".")
    words = LABELS.get(name, name.replace("_", " "))
    return f"{words} ({'T=1' if mode == 'sampled' else mode})" if mode else words
