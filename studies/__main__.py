"""Command line: run studies, list them, or make their reports.

    python -m studies STUDY [STUDY …] --processes N --gpus G --budget SECONDS --out DIR
    python -m studies report DIR --to docs/results
    python -m studies execute DIR --to docs/results
    python -m studies list

A killed or timed-out command keeps every finished run; the same command with `--resume` makes the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

from studies import catalogue, performer, plan, workers


def main(words: list[str] | None = None) -> int:
    """Returns the exit code: 1 when runs are missing, 2 when a name is wrong."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["report"]:
        return report(words[1:])
    if words[:1] == ["execute"]:
        from studies import executed

        return executed.main(words[1:])
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__.split("\n")[0])
    parser.add_argument(
        "studies", nargs="+", metavar="STUDY", help=f"{', '.join(catalogue.NAMES)}; all; list"
    )
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to spread them over; 0: on the CPU")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds, start-up included")
    parser.add_argument("--out", type=Path, default=Path("build/studies"), help="folder of the outcomes")
    parser.add_argument("--ranks", type=int, default=9, help="highest rank of runs that is made")
    parser.add_argument("--arms", default="", metavar="TEXT", help="only arms that hold this text")
    parser.add_argument("--resume", action="store_true", help="leave out runs whose outcome is there")
    parser.add_argument(
        "--mps", action="store_true", help="use NVIDIA's multi-process service if it is there"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SETTING=VALUE", help="for every run, before its own"
    )
    parser.add_argument(
        "--sites",
        type=Path,
        help="what `python -m onlinerl.validate.execution prompts` wrote: trained models complete it",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and few completions: a rehearsal")
    given = parser.parse_args(words)
    names = list(catalogue.NAMES) if "all" in given.studies else given.studies
    if names == ["list"]:
        listing()
        return 0
    unknown = [name for name in names if name not in catalogue.NAMES]
    if unknown:
        print(f"no study {', '.join(unknown)}: there are {', '.join(catalogue.NAMES)}", file=sys.stderr)
        return 2
    return perform(given, names)


def listing() -> None:
    """Print what there is."""
    for study in catalogue.studies():
        cost = sum(run.cost for run in study.runs)
        print(
            f"{study.name}: {study.title}\n  {len(study.runs)} runs, cost {cost:.1f}: {', '.join(study.arms)}"
        )


def perform(given: argparse.Namespace, names: list[str]) -> int:
    """Run the studies; returns the exit code."""
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    chosen = [study for study in catalogue.studies() if study.name in names]
    runs = [run for name in names for study in chosen if study.name == name for run in study.runs]
    runs = [run for run in runs if run.rank <= given.ranks and given.arms in run.arm]
    before = plan.read(out, catalogue.NAMES)
    if not given.resume and any(outcome.study in names for outcome in before):
        print(
            f"{out} holds outcomes of these studies already: add --resume, or another --out", file=sys.stderr
        )
        return 2
    done = {outcome.key: outcome.state for outcome in before if outcome.state != "failed"}
    wanted = {run.start for run in runs if run.key not in done}
    for run in runs:
        if run.key in done and run.key in wanted and not performer.saved_at(out, run.key).exists():
            del done[run.key]  # its model is not here any more, and another run starts from it
    runs = [run for run in runs if run.key not in done]
    began = time.monotonic()
    performer.lay_out(out, small=given.small, every=given.set, sites=given.sites)
    call = {
        "command": f"python -m studies {shlex.join(sys.argv[1:])}",
        "gpus": given.gpus,
        "cores": os.cpu_count(),
        "processes": given.processes,
    }
    (out / "call.json").write_text(json.dumps(call) + "\n", encoding="utf-8")
    print(f"{len(runs)} runs, cost {sum(run.cost for run in runs):.1f}; {len(done)} are there", flush=True)
    with workers.mps(given.mps and given.gpus > 0):
        tally = workers.work_off(
            runs,
            prepare=performer.prepare,
            folder=out,
            processes=given.processes,
            gpus=given.gpus,
            budget=given.budget - (time.monotonic() - began),
            done=done,
            keep=lambda outcome: plan.append(out, outcome),
            say=lambda text: print(text, flush=True),
        )
    failed = [outcome for outcome in tally.finished if outcome.state == "failed"]
    for outcome in failed[:5]:
        print(f"--- {outcome.key}\n{outcome.message}", flush=True)
    if tally.missing:
        print(f"missing {len(tally.missing)}: {' '.join(run.key for run in tally.missing)}", flush=True)
    print(f"{len(tally.finished)} runs in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    return 1 if tally.missing or failed else 0


def report(words: list[str]) -> int:
    """Write JSON, plots and Markdown of every study that has outcomes."""
    from studies import tables

    parser = argparse.ArgumentParser(prog="python -m studies report")
    parser.add_argument("folder", type=Path, help="--out of the runs")
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    given = parser.parse_args(words)
    for study in catalogue.studies():
        outcomes = plan.read(given.folder, [study.name])
        if outcomes:
            tables.write(study, outcomes, given.folder, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
