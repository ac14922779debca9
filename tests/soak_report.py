"""`python -m tests.soak_report INCIDENTS REPORT`: the trials of a soak as a page for people.

INCIDENTS has one JSON object a line (`tests.faults.incident`). Only counts and times; what a trial must show
is in tests/test_faults.py.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

KILLS = (
    ("trials", None),
    ("passed", None),
    ("kills", "kills"),
    ("feedback acknowledged", "acknowledged"),
    ("… of it lost", "lost_feedback"),
    ("samples trained on", "trained"),
    ("… twice or not as claimed", "samples_wrong"),
    ("answers whole", "whole"),
    ("answers cut, with an error", "cut"),
    ("requests refused, 503", "refused"),
    ("connections lost with the gateway", "lost"),
    ("records that differ from what was answered", "wrong_records"),
    ("whole answers not in the store", "forgotten_answers"),
    ("versions verified", "versions"),
    ("… of them broken", "broken_versions"),
)
"""Row of the table, and the fact whose sum it is."""


def report(trials: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for trial in trials:
        kinds[trial["kind"]].append(trial)
    switches = kinds.pop("switch", [])
    failed = [trial for trial in trials if trial["outcome"] != "passed"]
    seconds = sum(trial["seconds"] for trial in trials)
    parts = [
        "# Soak: kills and switches",
        "",
        "Written by `make soak`: tests/test_faults.py, and tests/soak_report.py for this page. Each trial",
        "has a seed that chooses the moment.",
        f"{len(trials)} trials in {seconds / 60:.0f} minutes on {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; {len(failed)} failed.",
        "",
        "## kill -9",
        "",
        *_table(kinds),
        "",
        "Recovery is the time from the kill until: trainer, another process carries the run on; engine, a",
        "request sent after the kill is answered; gateway, the `serve` that was started again is ready.",
    ]
    if switches:
        parts += ["", "## Weights switched under 16 streams", "", *_switches(switches)]
    if failed:
        parts += ["", "## Failed trials", ""]
        parts += [f"- {trial['kind']}, seed {trial['seed']}: {json.dumps(trial)}" for trial in failed]
    return "\n".join(parts) + "\n"


def _table(kinds: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = ["| | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    for title, fact in KILLS:
        cells = []
        for trials in kinds.values():
            if title == "trials":
                cells.append(str(len(trials)))
            elif title == "passed":
                cells.append(str(sum(trial["outcome"] == "passed" for trial in trials)))
            else:
                known = [trial[fact] for trial in trials if fact in trial]
                cells.append(str(sum(known)) if known else "")
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    cells = [_quantiles([t["recovery"] for t in trials if "recovery" in t]) for trials in kinds.values()]
    lines.append("| recovery p50 / p95 / max, s | " + " | ".join(cells) + " |")
    return lines


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = np.quantile(values, (0.5, 0.95))
    return f"{low:.1f} / {high:.1f} / {max(values):.1f}"


def _switches(trials: Sequence[dict[str, Any]]) -> list[str]:
    def total(name: str) -> int:
        return int(sum(trial.get(name, 0) for trial in trials))

    done = [trial for trial in trials if "gap_p99_switch" in trial]
    ratios: dict[str, list[float]] = {"HTTP": [], "command": []}
    for trial in done:
        ratios[trial["by"]].append(trial["gap_p99_switch"] / trial["gap_p99_steady"])
    answers = total("answers")
    lines = [
        "| | |",
        "|---|---:|",
        f"| switches | {len(trials)} |",
        f"| passed | {sum(trial['outcome'] == 'passed' for trial in trials)} |",
        f"| answers | {answers} |",
        f"| … failed or cut | {answers - total('whole')} |",
        f"| … in flight during a switch | {total('crossing')} |",
        f"| … with a wrong version at start or end | {total('wrong_versions')} |",
        f"| tokens held against a dense fp32 pass | {total('logprobs_checked')} |",
    ]
    if done:
        lines += [
            f"| … largest difference of a log-probability | {max(t['logprobs_off'] for t in done):.1e} |",
            "| promote until the first new answer, p50 / p95 / max, s | "
            f"{_quantiles([t['switch_seconds'] for t in done])} |",
            f"| longest wait for a token during a switch, s | {max(t['gap_max_switch'] for t in done):.2f} |",
        ]
        lines += [
            f"| p99 between tokens, switch / steady, promoted by {by}: median of the trials | "
            f"{np.median(values):.2f} |"
            for by, values in ratios.items()
            if values
        ]
    lines += [
        "",
        "`onlinerl versions promote` is a process that shares the cores with engine, gateway and clients.",
    ]
    return lines


def main() -> None:
    """Read, write."""
    incidents, target = map(Path, sys.argv[1:])
    trials = [json.loads(line) for line in incidents.read_text(encoding="utf-8").splitlines()]
    target.write_text(report(trials), encoding="utf-8")


if __name__ == "__main__":
    main()
