"""Plots of a summary: learning curves with their intervals as bands, or a row for each arm without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#8c564b",
    "#7f7f7f",
    "#bcbd22",
)
"""Okabe and Ito's, which colour-blind readers can tell apart, and three more."""
STYLES = ("-", "--", ":", "-.")
PARTS = " · "
"""Between an arm's label and its panel."""
LABELS = {
    "reward": "reward per opportunity",
    "shown": "show rate",
    "accept": "accepted of all",
    "accept_shown": "accepted of shown",
    "judge/report": "judge, 0–10",
    "judge/train": "training judge, 0–10",
    "characters": "characters",
    "exact": "exact match",
    "similarity": "edit similarity",
}
"""Words for the last part of a metric's name."""
PLACES = {"final": "metrics", "start": "starts", "gain": "gains", "extras": "extras"}
"""Where an arm's summary has a column, by `Column.at`."""
MODES = {"sampled": "T=1"}


def draw(summary: Mapping[str, Any], path: Path) -> bool:
    """Write a PNG: a row of panels for each curve's metric, else the first column with its intervals. False
    when there is nothing to draw."""
    arms: Mapping[str, Any] = summary["arms"]
    if not arms:
        return False
    curves = [
        metric for metric in summary["curves"] if any(len(f["curves"][metric]) > 1 for f in arms.values())
    ]
    panels = list(dict.fromkeys(split(arm)[1] for arm in arms))
    labels = list(dict.fromkeys(split(arm)[0] for arm in arms))
    if curves:
        figure = Figure(figsize=(max(7.0, 4.2 * len(panels)), 3.4 * len(curves) + 1.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(curves), len(panels), squeeze=False, sharex=True, sharey="row")
        for row, metric in zip(grid, curves, strict=True):
            for axes, panel in zip(row, panels, strict=True):
                _lines(axes, arms, metric, panel, labels)
            floor = summary["floor"]
            for axes in row if floor is not None and floor["metric"] == metric else ():
                words = f"floor: {floor['share']:g} of the start"
                axes.axhline(floor["value"], color="black", linestyle=":", linewidth=1, label=words)
            row[0].set_ylabel(label(metric))
            _zoom(row)
        for axes, panel in zip(grid[0], panels, strict=True):
            axes.set_title(panel, fontsize=10)
        for axes in grid[-1]:
            axes.set_xlabel("completions sampled to learn from")
        handles = {
            name: handle
            for axes in grid[0]
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(3, len(handles)),
            fontsize=8,
        )
    else:
        figure = Figure(figsize=(8.5, 1.6 + 0.33 * len(arms)), layout="constrained")
        FigureCanvasAgg(figure)
        if not _marks(figure.subplots(), summary):
            return False
    runs = max(len(facts["seeds"]) for facts in arms.values())
    bands = "bands" if curves else "bars"
    figure.suptitle(f"{summary['title']}\n({bands}: 95 %; up to {runs} runs an arm)", fontsize=10)
    figure.savefig(path, dpi=100, format="png")
    return True


def split(arm: str) -> tuple[str, str]:
    """Label and panel of an arm.

    >>> split("ours · lr 3e-5"), split("clean")
    (('ours', 'lr 3e-5'), ('clean', ''))
    """
    name, _, panel = arm.partition(PARTS)
    return name, panel


def _lines(axes: Axes, arms: Mapping[str, Any], metric: str, panel: str, labels: Sequence[str]) -> None:
    for arm, facts in arms.items():
        points = facts["curves"][metric]
        if split(arm)[1] != panel or len(points) < 2:
            continue
        number = labels.index(split(arm)[0])
        color = COLORS[number % len(COLORS)]
        at = [point["completions"] for point in points]
        style = STYLES[number // len(COLORS) % len(STYLES)]
        axes.plot(
            at,
            [point["mean"] for point in points],
            label=split(arm)[0],
            color=color,
            linestyle=style,
            linewidth=1.6,
        )
        low, high = [point["low"] for point in points], [point["high"] for point in points]
        axes.fill_between(at, low, high, color=color, alpha=0.13, linewidth=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _zoom(row: Sequence[Axes]) -> None:
    """Limits by the lines: wide bands of few seeds must not press them flat."""
    lines = [np.asarray(line.get_ydata(), dtype=float) for axes in row for line in axes.lines]
    values = [float(value) for line in lines for value in line]
    if values:
        room = max(max(values) - min(values), 1e-3)
        low, high = row[0].get_ylim()
        row[0].set_ylim(max(low, min(values) - 0.6 * room), min(high, max(values) + 0.6 * room))


def _marks(axes: Axes, summary: Mapping[str, Any]) -> bool:
    column = summary["columns"][0]
    place = PLACES[column["at"]]
    found = [(arm, facts[place].get(column["metric"])) for arm, facts in summary["arms"].items()]
    rows = [(arm, one) for arm, one in found if one is not None]
    for number, (_, one) in enumerate(rows):
        low, high = one["mean"] - one["low"], one["high"] - one["mean"]
        axes.errorbar([one["mean"]], [number], xerr=[[low], [high]], fmt="o", color=COLORS[0], capsize=3)
        values = one.get("values", [])
        axes.plot(values, [number] * len(values), "|", color="black", alpha=0.5)
    axes.set_yticks(range(len(rows)), [arm for arm, _ in rows], fontsize=8)
    axes.invert_yaxis()
    gain = "gain in " if column["at"] == "gain" else ""
    axes.set_xlabel(column["title"] if column["at"] == "extras" else gain + label(column["metric"]))
    axes.grid(alpha=0.3, axis="x")
    return bool(rows)


def label(metric: str) -> str:
    """An axis' words.

    >>> label("greedy.reward"), label("sampled.shown"), label("sampled.reward@0.25")
    ('reward per opportunity (greedy)', 'show rate (T=1)', 'reward per opportunity at τ=0.25 (T=1)')
    """
    how, _, name = metric.partition(".")
    name, _, tau = name.partition("@")
    words = LABELS.get(name, name.replace("_", " ")) + (f" at τ={tau}" if tau else "")
    return f"{words} ({MODES.get(how, how)})"
