"""Run what trained models completed at the execution sites, and tell their pass rates against the base's.

    python -m studies execute DIR --arms "(c)" --jobs 2 --to docs/results

What a worker wrote under `DIR/execution/` may come from another machine; the tests run on this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onlinerl.errors import SettingsError
from onlinerl.validate import execution
from onlinerl.validate.sites import load
from studies import catalogue, intervals, plan, tables
from studies.plan import Outcome

BASE = "base"
"""Arm of the untrained model, of the study `models`."""


def main(words: Sequence[str]) -> int:
    """The command line; returns the exit code. Raises SettingsError where nothing was completed."""
    parser = argparse.ArgumentParser(prog="python -m studies execute")
    parser.add_argument("folder", type=Path, help="--out of the runs")
    parser.add_argument(
        "--arms", default="", metavar="TEXT", help="only arms that hold this text, and the base"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of an arm, the lowest")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    given = parser.parse_args(words)
    completed = [o for o in plan.read(given.folder, catalogue.NAMES) if o.extras.get("execution.files")]
    if not completed:
        raise SettingsError(f"{given.folder} holds no completions: run studies with --sites")
    asked = [o for o in completed if o.arm != BASE and given.arms in o.arm and o.seed < given.seeds]
    if given.arms and not asked:
        arms = "\n  ".join(dict.fromkeys(o.arm for o in completed if o.arm != BASE))
        raise SettingsError(
            f"no arm with completions holds {given.arms!r} (--arms) and has a seed below {given.seeds} "
            f"(--seeds); there are\n  {arms}"
        )
    outcomes = [o for o in completed if o.arm == BASE or o in asked]
    for outcome in outcomes:
        for name in outcome.extras["execution.files"]:
            if not result_of(given.folder, name).exists():
                execute(given.folder, name, given.jobs)
                print(f"{outcome.key}: {name}", flush=True)
    summary = summarise(outcomes, given.folder)
    given.to.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    (given.to / "execution.json").write_text(text + "\n", encoding="utf-8")
    (given.to / "execution.md").write_text(markdown(summary), encoding="utf-8")
    return 0


def result_of(folder: Path, name: str) -> Path:
    """Where the verdict on a file of completions is kept."""
    return folder / "execution" / name.replace(".json", ".result.json")


def execute(folder: Path, name: str, jobs: int) -> None:
    """Run one file of completions. Raises SettingsError as `execution.evaluate` does."""
    made = execution.read_completions(folder / "execution" / name)
    result = execution.evaluate(load(), made, jobs=jobs)
    result_of(folder, name).write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")


def summarise(outcomes: Sequence[Outcome], folder: Path) -> dict[str, Any]:
    """Pass rates by arm and temperature, and what each arm has over the base at the same temperature."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for outcome in outcomes:
        for name in outcome.extras["execution.files"]:
            result = json.loads(result_of(folder, name).read_text(encoding="utf-8"))
            found.setdefault((outcome.arm, temperature_of(name)), []).append(result)
    rows = []
    for (arm, temperature), results in found.items():
        row: dict[str, Any] = {"arm": arm, "temperature": temperature, "runs": len(results)}
        for rate in ("pass_at_1", "unseen"):
            row[rate] = statistics.fmean(result[rate]["mean"] for result in results)
            row[f"{rate}_sites"] = results[0][rate]["sites"]
        if len(results) == 1:
            row["low"], row["high"] = results[0]["pass_at_1"]["low"], results[0]["pass_at_1"]["high"]
        else:
            one = intervals.mean([result["pass_at_1"]["mean"] for result in results])
            row["low"], row["high"] = one.low, one.high
        base = found.get((BASE, temperature))
        if base is not None and arm != BASE:
            row["gain"] = execution.difference(base[0]["passed"], average([r["passed"] for r in results]))
        row["exact"] = statistics.fmean(result["exact"] for result in results)
        row["empty"] = statistics.fmean(result["empty"] for result in results)
        rows.append(row)
    return {
        "interval": (
            "95 %; one run: over sites, clustered by module; several: Student's t over seeds; gains: the "
            "mean of the runs against the base, site by site, Student's t over modules"
        ),
        "rows": rows,
    }


def temperature_of(name: str) -> str:
    """The temperature in the name of a file of completions.

    >>> temperature_of("headline-c-0-12345678.T0.2.json")
    '0.2'
    """
    return name.rpartition(".T")[2].removesuffix(".json")


def average(passed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of several runs, for the sites that all have."""
    names = set.intersection(*({*one} for one in passed))
    return {name: statistics.fmean(one[name] for one in passed) for name in sorted(names)}


def markdown(summary: Mapping[str, Any]) -> str:
    """A table to paste into docs/RESULTS.md."""
    rows = []
    for row in summary["rows"]:
        gain = row.get("gain")
        rows.append([
            row["arm"], row["temperature"], str(row["runs"]),
            f"{row['pass_at_1']:.1%} [{row['low']:.1%}, {row['high']:.1%}]", f"{row['unseen']:.1%}",
            "" if gain is None else f"{gain[0]:+.1%} [{gain[1]:+.1%}, {gain[2]:+.1%}]",
            f"{row['exact']:.1f}", f"{row['empty']:.1f}",
        ])  # fmt: skip
    head = ["model", "temperature", "runs", "passes its tests", "in files never trained on", "over the base",
            "the author's text", "empty"]  # fmt: skip
    return f"{summary['interval']}.\n\n{tables.table(head, rows)}"
