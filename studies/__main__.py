"""Command line: run studies, list them, or make their reports.

    python -m studies STUDY [STUDY …] --processes N --gpus G --budget SECONDS --out DIR
    python -m studies report DIR --to docs/results
    python -m studies execute DIR --to docs/results
    python -m studies list

A killed or timed-out command keeps every finished run; the same command with `--resume` makes the others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from onlinerl.errors import OnlineRLError, SettingsError
from onlinerl.redaction import redacted_url
from studies import catalogue, performer, plan, workers
from studies.plan import Run


def main(words: list[str] | None = None) -> int:
    """Returns the exit code: 1 when runs are missing or failed, 2 when what was asked for cannot be."""
    words = sys.argv[1:] if words is None else words
    try:
        if words[:1] == ["report"]:
            return report(words[1:])
        if words[:1] == ["execute"]:
            from studies import executed

            return executed.main(words[1:])
        return perform(words)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except OnlineRLError as error:
        print(error, file=sys.stderr)
        return 1


def parsed(words: list[str]) -> argparse.Namespace:
    """The options of a command that runs studies."""
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__.split("\n")[0])
    parser.add_argument(
        "studies", nargs="+", metavar="STUDY", help=f"{', '.join(catalogue.NAMES)}; all; list"
    )
    parser.add_argument("--processes", type=at_least(1), default=1, help="runs side by side")
    parser.add_argument("--gpus", type=at_least(0), default=0, help="GPUs to spread them over; 0: on the CPU")
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
    return parser.parse_args(words)


def at_least(least: int) -> Callable[[str], int]:
    """A type of argument: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def listing() -> None:
    """Print what there is."""
    for study in catalogue.studies():
        cost = sum(run.cost for run in study.runs)
        print(
            f"{study.name}: {study.title}\n  {len(study.runs)} runs, cost {cost:.1f}: {', '.join(study.arms)}"
        )


def chosen(given: argparse.Namespace, names: Sequence[str]) -> list[Run]:
    """The runs that were asked for, and those that they start from. Raises SettingsError without any."""
    unknown = [name for name in given.studies if name not in (*catalogue.NAMES, "all")]
    if unknown:
        raise SettingsError(f"no study {', '.join(unknown)}: there are {', '.join(catalogue.NAMES)}")
    studies = {study.name: study for study in catalogue.studies()}
    everything = [run for name in names for run in studies[name].runs]
    named = [run for run in everything if given.arms in run.arm]
    if not named:
        arms = "\n  ".join(dict.fromkeys(run.arm for run in everything))
        raise SettingsError(
            f"no arm of {', '.join(names)} holds {given.arms!r} (--arms); there are\n  {arms}"
        )
    kept = [run for run in named if run.rank <= given.ranks]
    if not kept:
        ranks = sorted({run.rank for run in named})
        raise SettingsError(f"no run has a rank up to {given.ranks} (--ranks); they have {ranks}")
    needed = {key for run in kept for key in (run.key, run.start)}
    return [run for run in everything if run.key in needed]


def perform(words: list[str]) -> int:
    """Run studies; returns the exit code. Raises SettingsError, and has then changed nothing."""
    given = parsed(words)
    if given.studies == ["list"]:
        listing()
        return 0
    names = list(catalogue.NAMES) if "all" in given.studies else list(dict.fromkeys(given.studies))
    runs = chosen(given, names)
    out: Path = given.out
    before = plan.read(out, catalogue.NAMES)
    if not given.resume and any(outcome.study in names for outcome in before):
        raise SettingsError(f"{out} holds outcomes of these studies already: add --resume, or another --out")
    if given.sites is not None:
        performer.sites_of(given.sites)
    performer.settings_of(runs[0], out, performer.shared(small=given.small, every=given.set))
    done = {outcome.key: outcome.state for outcome in before if outcome.state != "failed"}
    wanted = {run.start for run in runs if run.key not in done}
    for run in runs:
        if run.key in done and run.key in wanted and not performer.saved_at(out, run.key).exists():
            del done[run.key]  # its model is not here any more, and another run starts from it
    runs = [run for run in runs if run.key not in done]
    began = time.monotonic()
    performer.lay_out(out, small=given.small, every=given.set, sites=given.sites)
    performer.note(
        out,
        {run.study for run in runs},
        f"python -m studies {shlex.join(published(words))}",
        {"gpus": given.gpus, "cores": os.cpu_count(), "processes": given.processes},
    )
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


def published(words: Sequence[str]) -> list[str]:
    """The command's words without the secrets of their URLs. Word by word, since after quoting a URL with a
    quote or a space in it no longer looks like one."""
    return [redacted_url(word) if "://" in word else word for word in words]


def report(words: list[str]) -> int:
    """Write JSON, plots and Markdown of every study that has outcomes. Raises SettingsError without any."""
    from studies import tables

    parser = argparse.ArgumentParser(prog="python -m studies report")
    parser.add_argument("folder", type=Path, help="--out of the runs")
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    given = parser.parse_args(words)
    studies = {study: plan.read(given.folder, [study.name]) for study in catalogue.studies()}
    if not any(studies.values()):
        raise SettingsError(f"{given.folder} holds no outcome of any study")
    for study, outcomes in studies.items():
        if outcomes:
            tables.write(study, outcomes, given.folder, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
