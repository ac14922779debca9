"""From outcomes to a compact JSON, and from that JSON alone to Markdown: no number that it does not hold."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies import intervals, plots
from studies.intervals import Interval
from studies.plan import Outcome, Study

Summary = dict[str, Any]


def write(study: Study, outcomes: Sequence[Outcome], folder: Path, to: Path) -> Summary:
    """Make `to/STUDY.json`, `to/STUDY.png` (where there are curves) and `to/STUDY.md`."""
    machine = folder / "machine.json"
    facts = json.loads(machine.read_text(encoding="utf-8")) if machine.exists() else {}
    summary = summarise(study, outcomes, facts)
    to.mkdir(parents=True, exist_ok=True)
    (to / f"{study.name}.json").write_text(
        json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    (to / f"{study.name}.md").write_text(markdown(summary), encoding="utf-8")
    plots.draw(summary, to / f"{study.name}.png")
    return summary


# ------------------------------------------------------------------------------------------ summary


def summarise(study: Study, outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> Summary:
    """All that tables and plots show, JSON-able."""
    by_arm: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_arm[outcome.arm].append(outcome)
    have = {outcome.key for outcome in outcomes}
    arms = {arm: _arm(study, by_arm[arm]) for arm in study.arms if by_arm[arm]}
    start = [one for outcome in outcomes if (one := outcome.start)]
    return {
        "study": study.name,
        "title": study.title,
        "interval": (
            f"95 %; n > 1: Student's t over {study.units}; the held-out prompts are the same for all, so this "
            "is the spread between learning runs, not between prompts; n = 1: the value alone"
        ),
        "machine": dict(machine),
        "columns": [asdict(column) for column in study.columns],
        "curves": list(study.curves),
        "start": _metrics(study, start) if start else {},
        "arms": arms,
        "compare": _compare(study, by_arm),
        "reach": _reach(study, by_arm),
        "missing": [run.key for run in study.runs if run.key not in have],
    }


def _arm(study: Study, outcomes: Sequence[Outcome]) -> Summary:
    good = [outcome for outcome in outcomes if outcome.final]
    return {
        "seeds": sorted(outcome.seed for outcome in outcomes),
        "overrides": list(outcomes[0].overrides),
        "seconds": round(sum(outcome.seconds for outcome in outcomes) / len(outcomes), 1),
        "states": {
            state: sum(outcome.state == state for outcome in outcomes)
            for state in ("finished", "guard", "failed")
        },
        "messages": sorted({o.message.strip().splitlines()[-1] for o in outcomes if o.message.strip()}),
        "metrics": _metrics(study, [outcome.final for outcome in good]),
        "gain": _gain(study, good),
        "extras": _metrics(study, [_numbers(outcome.extras) for outcome in good]),
        "curve": {metric: _curve(metric, good, study) for metric in study.curves},
    }


def _numbers(extras: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in extras.items() if isinstance(value, int | float)}


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _interval(values: Sequence[float], study: Study) -> Summary:
    one = intervals.mean(values, study.units)
    return _written(one) | {"values": [round(value, 5) for value in values]}


def _written(one: Interval) -> Summary:
    return {
        "mean": round(one.mean, 5),
        "low": round(one.low, 5),
        "high": round(one.high, 5),
        "n": one.n,
        "over": one.over,
    }


def _metrics(study: Study, rows: Sequence[Mapping[str, float]]) -> Summary:
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: _finite(row.get(name) for row in rows) for name in names}
    return {name: _interval(values, study) for name, values in found.items() if values}


def _gain(study: Study, outcomes: Sequence[Outcome]) -> Summary:
    """Final minus start within each run: paired by seed or user."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name in outcome.final.keys() & outcome.start.keys():
            value = outcome.final[name] - outcome.start[name]
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    return {name: _interval(found[name], study) for name in sorted(found)}


def _curve(metric: str, outcomes: Sequence[Outcome], study: Study) -> list[Summary]:
    """Mean at each number of completions that every finished run of the arm has."""
    points: dict[float, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for point in outcome.curve:
            if math.isfinite(point.get(metric, math.nan)):
                points[point["completions"]].append(point[metric])
    most = max((len(values) for values in points.values()), default=0)
    return [
        {"completions": at} | _written(intervals.mean(points[at], study.units))
        for at in sorted(points)
        if len(points[at]) == most
    ]


def _compare(study: Study, by_arm: Mapping[str, Sequence[Outcome]]) -> list[Summary]:
    rows = []
    for one, other in study.compare:
        for column in study.columns:
            if column.at != "final":
                continue
            values = [
                _finite(outcome.final.get(column.metric) for outcome in by_arm.get(arm, ()))
                for arm in (one, other)
            ]
            if not all(values):
                continue
            both = [intervals.mean(part, study.units) for part in values]
            rows.append(
                {"arm": one, "against": other, "metric": column.metric}
                | _written(intervals.difference(*values))
                | {"apart": both[0].n > 1 and both[1].n > 1 and both[0].apart(both[1])}
            )
    return rows


def _reach(study: Study, by_arm: Mapping[str, Sequence[Outcome]]) -> list[Summary]:
    """For each comparison and curve: interactions until the mean curve is at the other's final level."""
    rows = []
    for one, other in study.compare:
        for metric in study.curves:
            mine, theirs = (_curve(metric, by_arm.get(arm, ()), study) for arm in (one, other))
            if not mine or not theirs:
                continue
            at = intervals.reaches([(point["completions"], point["mean"]) for point in mine], theirs[-1]["mean"])
            rows.append({
                "arm": one,
                "against": other,
                "metric": metric,
                "level": theirs[-1]["mean"],
                "theirs": theirs[-1]["completions"],
                "reached_at": None if at is None else round(at),
            })  # fmt: skip
    return rows


# ----------------------------------------------------------------------------------------- Markdown


def cell(one: Mapping[str, Any] | None, form: str) -> str:
    """A mean with its interval.

    >>> cell({"mean": 0.5, "low": 0.4, "high": 0.61, "n": 3}, ".2f")
    '0.50 [0.40, 0.61]'
    >>> cell({"mean": 0.123, "low": 0.123, "high": 0.123, "n": 1}, ".1%"), cell(None, ".1%")
    ('12.3%', '–')
    """
    if one is None:
        return "–"
    if one["n"] == 1:
        return format(one["mean"], form)
    return f"{one['mean']:{form}} [{one['low']:{form}}, {one['high']:{form}}]"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, first column left."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def markdown(summary: Summary) -> str:
    """Tables to paste into docs/RESULTS.md."""
    columns = summary["columns"]
    parts = [f"### {summary['title']}\n", f"{summary['interval']}.\n"]
    rows = []
    start = {column["metric"]: summary["start"].get(column["metric"]) for column in columns}
    if any(start.values()):
        cells = [_plain(start[column["metric"]], column["form"]) for column in columns]
        rows.append(["before the first step", "", *cells])
    for arm, facts in summary["arms"].items():
        cells = [
            cell(facts["metrics" if column["at"] == "final" else "extras"].get(column["metric"]), column["form"])
            for column in columns
        ]
        rows.append([arm, _ended(facts), *cells])
    parts.append(table(["arm", "runs", *(column["title"] for column in columns)], rows))
    if summary["compare"]:
        parts.append(_comparisons(summary))
    if any(row["reached_at"] is not None for row in summary["reach"]):
        parts.append(
            table(
                ["arm", "reaches the final level of", "metric", "level", "after its", "with completions"],
                [
                    [
                        row["arm"], row["against"], row["metric"], f"{row['level']:.4f}",
                        f"{row['theirs']:.0f}", "never" if row["reached_at"] is None else str(row["reached_at"]),
                    ]
                    for row in summary["reach"]
                ],
            )  # fmt: skip
        )
    stopped = {arm: facts["messages"] for arm, facts in summary["arms"].items() if facts["messages"]}
    if stopped:
        rows = [[arm, "; ".join(messages)] for arm, messages in stopped.items()]
        parts.append(table(["arm", "what stopped it"], rows))
    if summary["missing"]:
        parts.append(f"Not run: {', '.join(f'`{key}`' for key in summary['missing'])}.\n")
    return "\n".join(parts)


def _plain(one: Mapping[str, Any] | None, form: str) -> str:
    return "–" if one is None else format(one["mean"], form)


def _ended(facts: Mapping[str, Any]) -> str:
    states = facts["states"]
    words = [str(len(facts["seeds"]))]
    words += [f"{states[state]} {word}" for state, word in (("guard", "stopped"), ("failed", "failed")) if states[state]]
    return ", ".join(words)


def _comparisons(summary: Summary) -> str:
    titles = {column["metric"]: (column["title"], column["form"]) for column in summary["columns"]}
    pairs = dict.fromkeys((row["arm"], row["against"]) for row in summary["compare"])
    metrics = [metric for metric in titles if any(row["metric"] == metric for row in summary["compare"])]
    found = {(row["arm"], row["against"], row["metric"]): row for row in summary["compare"]}
    rows = []
    for one, other in pairs:
        cells = []
        for metric in metrics:
            row = found.get((one, other, metric))
            sign = titles[metric][1]
            text = cell(row, "+" + sign)
            cells.append(text + (" *" if row is not None and row["apart"] else ""))
        rows.append([f"{one} − {other}", *cells])
    return (
        table(["difference", *(titles[metric][0] for metric in metrics)], rows)
        + "\n\\* the two arms' own intervals have nothing in common. Differences: Welch's t.\n"
    )
