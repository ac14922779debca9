"""From outcomes to a compact JSON, and from that JSON alone to Markdown: no number that it does not hold."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies import intervals, performer, plots
from studies.intervals import Interval
from studies.plan import Outcome, Study

Summary = dict[str, Any]
HOWS = {"sampled": "At T=1", "greedy": "Greedy"}
"""What the first part of a metric's name means."""


def write(study: Study, outcomes: Sequence[Outcome], folder: Path, to: Path) -> Summary:
    """Make `to/STUDY.json`, `to/STUDY.md` and `to/STUDY.png`; `folder` is that of the outcomes."""
    summary = summarise(study, outcomes, performer.machine(folder, study.name))
    to.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
    (to / f"{study.name}.json").write_text(text + "\n", encoding="utf-8")
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
    return {
        "study": study.name,
        "title": study.title,
        "interval": (
            f"95 %. Several runs: Student's t over {study.units}, i.e. the spread between learning runs on "
            "the same held-out prompts; `prompts` in the JSON is the standard error that one run's number "
            "has over its prompts, clustered by file. One run: over its prompts"
        ),
        "machine": dict(machine),
        "columns": [asdict(column) for column in study.columns],
        "curves": list(study.curves),
        "floor": _floor(study, outcomes),
        "start": _arm_metrics(study, outcomes, "start") if study.one_start else {},
        "arms": {arm: _arm(study, by_arm[arm]) for arm in study.arms if by_arm[arm]},
        "differences": _differences(study, by_arm),
        "reach": _reach(study, by_arm),
        "missing": _missing(study, have),
    }


def _missing(study: Study, have: Set[str]) -> dict[str, list[int]]:
    """Seeds that were not run, by arm."""
    found: dict[str, list[int]] = {}
    for run in study.runs:
        if run.key not in have:
            found.setdefault(run.arm, []).append(run.seed)
    return found


def _floor(study: Study, outcomes: Sequence[Outcome]) -> Summary | None:
    if study.floor is None:
        return None
    metric, share = study.floor
    starts = _finite(outcome.start.get(metric) for outcome in outcomes)
    if not starts:
        return None
    return {"metric": metric, "share": share, "value": round(share * sum(starts) / len(starts), 5)}


def _arm(study: Study, outcomes: Sequence[Outcome]) -> Summary:
    states = ("finished", "guard", "failed")
    good = [outcome for outcome in outcomes if outcome.final]
    return {
        "seeds": sorted(outcome.seed for outcome in outcomes),
        "overrides": list(outcomes[0].overrides),
        "seconds": round(sum(outcome.seconds for outcome in outcomes) / len(outcomes), 1),
        "states": {state: sum(outcome.state == state for outcome in outcomes) for state in states},
        "messages": sorted({o.message.strip().splitlines()[-1] for o in outcomes if o.message.strip()}),
        "metrics": _arm_metrics(study, good, "final"),
        "starts": _arm_metrics(study, good, "start"),
        "gains": _gains(study, good),
        "extras": _rows(study, [_numbers(outcome.extras) for outcome in good]),
        "curves": {metric: _curve(metric, good, study) for metric in study.curves},
    }


def _numbers(extras: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in extras.items() if isinstance(value, int | float)}


def _written(one: Interval) -> Summary:
    numbers = {"mean": round(one.mean, 5), "low": round(one.low, 5), "high": round(one.high, 5)}
    return {**numbers, "n": one.n, "over": one.over}


def _wanted(study: Study) -> list[str]:
    columns = [column.metric for column in study.columns if column.at != "extras"]
    return list(dict.fromkeys([*columns, *study.compared, *study.curves]))


def _arm_metrics(study: Study, outcomes: Sequence[Outcome], which: str) -> Summary:
    found = {}
    for name in _wanted(study):
        values = _finite(getattr(outcome, which).get(name) for outcome in outcomes)
        # Of the start there are none; its prompts are the same, and the errors nearly so.
        errors = _finite(outcome.errors.get(name) for outcome in outcomes)
        if not values:
            continue
        one = intervals.mean(values, study.units)
        if len(values) == 1 and errors:
            one = intervals.of_prompts(values[0], errors[0])
        found[name] = _written(one)
        if which == "final":
            found[name]["values"] = [round(value, 5) for value in values]
        if errors:
            found[name]["prompts"] = round(sum(errors) / len(errors), 5)
    return found


def _rows(study: Study, rows: Sequence[Mapping[str, float]]) -> Summary:
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: _finite(row.get(name) for row in rows) for name in names}
    return {name: _written(intervals.mean(values, study.units)) for name, values in found.items() if values}


def _gains(study: Study, outcomes: Sequence[Outcome]) -> Summary:
    """Final minus start within each run: paired by seed or user."""
    return _rows(
        study,
        [
            {
                name: o.final[name] - o.start[name]
                for name in _wanted(study)
                if name in o.final and name in o.start
            }
            for o in outcomes
        ],
    )


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _curve(metric: str, outcomes: Sequence[Outcome], study: Study) -> list[Summary]:
    """Mean at the points of the run that has the most; a run that was stopped goes on as it ended."""
    lines = [
        [
            (point["completions"], point[metric])
            for point in outcome.curve
            if math.isfinite(point.get(metric, math.nan))
        ]
        for outcome in outcomes
    ]
    lines = [line for line in lines if line]
    grid = [at for at, _ in max(lines, key=lambda line: (line[-1][0], len(line)), default=[])]
    return [
        {"completions": round(at)}
        | _written(intervals.mean([intervals.value_at(line, at) for line in lines], study.units))
        for at in grid
    ]


def _differences(study: Study, by_arm: Mapping[str, Sequence[Outcome]]) -> list[Summary]:
    rows = []
    for one, other in study.compare:
        for metric in study.compared:
            mine, theirs = (
                _finite(outcome.final.get(metric) for outcome in by_arm.get(arm, ())) for arm in (one, other)
            )
            if not mine or not theirs:
                continue
            both = [intervals.mean(values, study.units) for values in (mine, theirs)]
            several = both[0].n > 1 and both[1].n > 1
            rows.append(
                {"arm": one, "against": other, "metric": metric}
                | _written(intervals.difference(mine, theirs))
                | {"apart": several and both[0].apart(both[1])}
            )
    return rows


def _reach(study: Study, by_arm: Mapping[str, Sequence[Outcome]]) -> list[Summary]:
    rows = []
    for one, other in study.compare:
        for metric in study.reach:
            mine, theirs = (_curve(metric, by_arm.get(arm, ()), study) for arm in (one, other))
            if not mine or not theirs:
                continue
            line = [(point["completions"], point["mean"]) for point in mine]
            at = intervals.reaches(line, theirs[-1]["mean"])
            rows.append(
                {
                    "arm": one,
                    "against": other,
                    "metric": metric,
                    "level": theirs[-1]["mean"],
                    "its_completions": round(theirs[-1]["completions"]),
                    "completions": None if at is None else round(at),
                }
            )
    return rows


# ----------------------------------------------------------------------------------------- Markdown


def cell(one: Mapping[str, Any] | None, form: str) -> str:
    """A mean with its interval.

    >>> cell({"mean": 0.5, "low": 0.4, "high": 0.61, "over": "seeds"}, ".2f")
    '0.50 [0.40, 0.61]'
    >>> cell({"mean": 0.123, "low": 0.123, "high": 0.123, "over": "one value"}, ".1%"), cell(None, ".1%")
    ('12.3%', '–')
    """
    if one is None:
        return "–"
    if one["over"] == "one value":
        return format(one["mean"], form)
    return f"{one['mean']:{form}} [{one['low']:{form}}, {one['high']:{form}}]"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, first column left."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def markdown(summary: Summary) -> str:
    """Tables to paste into docs/RESULTS.md."""
    parts = [f"### {summary['title']}\n", f"{summary['interval']}.\n"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for column in summary["columns"]:
        how = column["metric"].partition(".")[0] if column["at"] != "extras" else ""
        groups.setdefault(HOWS.get(how, ""), []).append(column)
    for words, columns in groups.items():
        if words:
            parts.append(f"{words}:\n")
        parts.append(_arms(summary, columns))
    parts += [_difference_table(summary), _reach_table(summary), _stopped(summary)]
    if summary["missing"]:
        rows = [[arm, ", ".join(map(str, seeds))] for arm, seeds in summary["missing"].items()]
        parts.append(table(["not run", "seeds"], rows))
    return "\n".join(part for part in parts if part)


def _arms(summary: Summary, columns: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    start = {column["metric"]: summary["start"].get(column["metric"]) for column in columns}
    if any(start.values()):
        cells = [cell(start[column["metric"]], column["form"]) for column in columns]
        rows.append(["*before the first step*", "", *cells])
    for arm, facts in summary["arms"].items():
        cells = [cell(facts[plots.PLACES[c["at"]]].get(c["metric"]), c["form"]) for c in columns]
        rows.append([arm, _runs(facts), *cells])
    return table(["arm", "runs", *(column["title"] for column in columns)], rows)


def _runs(facts: Mapping[str, Any]) -> str:
    words = [str(len(facts["seeds"]))]
    for state, word in (("guard", "stopped"), ("failed", "failed")):
        if facts["states"][state]:
            words.append(f"{facts['states'][state]} {word}")
    return ", ".join(words)


def _difference_table(summary: Summary) -> str:
    forms = {column["metric"]: column["form"] for column in summary["columns"]}
    found = {(row["arm"], row["against"], row["metric"]): row for row in summary["differences"]}
    if not found:
        return ""
    pairs = list(dict.fromkeys((one, other) for one, other, _ in found))
    metrics = list(dict.fromkeys(metric for _, _, metric in found))
    rows = []
    for one, other in pairs:
        cells = []
        for metric in metrics:
            row = found.get((one, other, metric))
            mark = " *" if row is not None and row["apart"] else ""
            cells.append(cell(row, "+" + forms.get(metric, ".4f")) + mark)
        rows.append([f"{one} − {other}", *cells])
    head = ["difference", *(plots.label(metric) for metric in metrics)]
    words = "\n\\* The two arms' own intervals have nothing in common. Differences: Welch's t.\n"
    return table(head, rows) + words


def _reach_table(summary: Summary) -> str:
    if not summary["reach"]:
        return ""
    rows = [
        [
            row["arm"],
            plots.label(row["metric"]),
            row["against"],
            f"{row['level']:.4f}",
            str(row["its_completions"]),
            "never" if row["completions"] is None else str(row["completions"]),
        ]
        for row in summary["reach"]
    ]
    head = ["arm", "reaches in", "the final level of", "which is", "with its completions", "with its own"]
    return table(head, rows)


def _stopped(summary: Summary) -> str:
    rows = [
        [arm, "; ".join(facts["messages"])] for arm, facts in summary["arms"].items() if facts["messages"]
    ]
    return table(["arm", "what stopped it"], rows) if rows else ""
