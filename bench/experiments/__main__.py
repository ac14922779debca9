"""What the statistics of experiments are worth, on simulated users: false promotions, power, teams, harm.

    python -m bench.experiments [null guards spending power sessions ladder] [--quick]

Every look of every simulated experiment goes through `onlinerl.experiments.analysis`, as arrays; in `ladder`
whole experiments go through `read`, `watch` and `decide` themselves. A million user-days make a population
(`population.py`), and an experiment draws its users from it, so that the truth is known to the last digit.
Parts that are not named keep what docs/results/experiments.json has of them. Writes that file,
docs/results/experiments.png, and the tables of docs/experiments.md. One core, some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.experiments.ladder import ladder
from bench.experiments.report import draw, page, tables
from bench.experiments.studies import guards, null, power, spending
from bench.experiments.teams import sessions

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "docs" / "results" / "experiments.json"
PLOT = ROOT / "docs" / "results" / "experiments.png"
PAGE = ROOT / "docs" / "experiments.md"
PARTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "null": null,
    "guards": guards,
    "spending": spending,
    "power": power,
    "sessions": sessions,
    "ladder": ladder,
}
QUICK: Mapping[str, Mapping[str, int]] = {
    "null": {"experiments": 100, "units": 1_000},
    "guards": {"experiments": 40, "units": 1_000},
    "spending": {"policies": 20, "versions": 3, "units": 500},
    "power": {"experiments": 40},
    "sessions": {"teams": 20, "length": 10},
    "ladder": {"experiments": 4},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print how long each part took, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--quick", action="store_true", help="too few to say anything; writes nothing")
    given = parser.parse_args(arguments)
    wrong = set(given.parts) - set(PARTS)
    if wrong:
        parser.error(f"no part {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    report: dict[str, Any] = json.loads(RESULT.read_text("utf-8")) if RESULT.exists() else {}
    for number, (name, part) in enumerate(PARTS.items()):
        if given.parts and name not in given.parts:
            continue
        start = time.process_time()
        made = part(np.random.default_rng([20, number]), **(QUICK[name] if given.quick else {}))
        report[name] = {**made, "seconds": round(time.process_time() - start, 1)}
        print(f"{name}: {report[name]['seconds']} s of one core", flush=True)
        if not given.quick:
            RESULT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if not given.quick:
        draw(report, PLOT)
        PAGE.write_text(page(PAGE.read_text("utf-8"), tables(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
