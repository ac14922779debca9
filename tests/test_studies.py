"""Studies: intervals against known numbers, the queue, tables that say what their JSON holds, and a small
study on this processor, in a process that has none of the serving packages."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from studies import catalogue, intervals, performer, plan, plots, tables
from studies.plan import Column, Outcome, Run, Study

ROOT = Path(__file__).parents[1]
SERVING = ("fastapi", "sqlalchemy", "alembic", "structlog", "uvicorn", "aiohttp", "uvloop", "httptools")


# ---------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227), (1e9, 1.95996)]
)
def test_t_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert intervals.t_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


def test_mean_and_difference_by_hand() -> None:
    one = intervals.mean([1.0, 2.0, 3.0])
    half = 4.30265 / math.sqrt(3)  # the standard deviation is 1
    assert (one.mean, one.low, one.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), rel=1e-4)
    # equal spreads and sizes: Welch's degrees of freedom are 4, the error √(1/3 + 1/3)
    gap = intervals.difference([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])
    assert gap.mean == pytest.approx(-10.0)
    assert gap.high - gap.mean == pytest.approx(2.77645 * math.sqrt(2 / 3), rel=1e-4)
    assert intervals.mean([5.0]).over == "one value"


def test_intervals_hold_what_they_promise() -> None:
    rng = random.Random(0)
    drawn = [intervals.mean([rng.gauss(0, 1) for _ in range(3)]) for _ in range(4000)]
    assert sum(one.low <= 0 <= one.high for one in drawn) / 4000 == pytest.approx(0.95, abs=0.012)


def test_a_curve_reaches_a_level_between_its_points() -> None:
    curve = [(0.0, 0.0), (100.0, 1.0), (200.0, 0.5), (300.0, 3.0)]
    assert intervals.reaches(curve, 0.5) == 50.0
    assert intervals.reaches(curve, 1.75) == pytest.approx(250.0)
    assert intervals.reaches(curve, 4.0) is None
    assert intervals.reaches(curve, -1.0) == 0.0
    assert intervals.value_at(curve, 150.0) == 0.75
    assert intervals.value_at(curve, 900.0) == 3.0


# -------------------------------------------------------------------------------- plans and outcomes


def test_outcomes_survive_a_cut_line_and_the_last_of_a_key_counts(tmp_path: Path) -> None:
    first = Outcome("s", "arm", 0, "failed", "broke", 1.0)
    plan.append(tmp_path, first)
    plan.append(tmp_path, replace(first, seed=1))
    plan.append(tmp_path, replace(first, state="finished", curve=({"completions": 0.0, "x": 1.0},)))
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"study": "s", "ar')
    found = {outcome.seed: outcome for outcome in plan.read(tmp_path, ["s", "t"])}
    assert found[0].state == "finished"
    assert found[0].curve == ({"completions": 0.0, "x": 1.0},)
    assert found[1].state == "failed"


def test_the_queue_takes_ranks_then_studies_then_what_others_wait_for_then_the_longest() -> None:
    runs = [
        Run("one", "short", 0, cost=0.5),
        Run("one", "long", 0, cost=2.0),
        Run("one", "shared", 0, cost=1.0, save=True),
        Run("one", "later", 0, cost=9.0, rank=1),
        Run("one", "own", 0, cost=3.0, start="one/shared/0"),
        Run("two", "huge", 0, cost=99.0),
    ]
    queue = plan.order(runs)
    assert [run.arm for run in queue] == ["shared", "own", "long", "short", "huge", "later"]
    assert [run.arm for run in plan.ready(queue, {})][0] == "shared"
    assert "own" not in [run.arm for run in plan.ready(queue, {"one/shared/0": "guard"})]
    assert "own" in [run.arm for run in plan.ready(queue, {"one/shared/0": "finished"})]


def test_every_run_of_the_catalogue_has_settings_that_exist_and_agree(tmp_path: Path) -> None:
    from onlinerl.validate.course import check

    performer.lay_out(tmp_path, small=True)
    shared = json.loads((tmp_path / "settings.json").read_text())
    seen: set[str] = set()
    for study in catalogue.studies():
        assert {arm for pair in study.compare for arm in pair} <= set(study.arms), study.name
        for run in study.runs:
            assert run.key not in seen, run.key
            seen.add(run.key)
            assert set(run.extras) <= set(performer.EXTRAS)
            check(performer.settings_of(run, tmp_path, shared))
            check(performer.settings_of(run, tmp_path, {**shared, "after": []}))
    keys = {run.key for study in catalogue.studies() for run in study.runs if run.save}
    assert {run.start for study in catalogue.studies() for run in study.runs} - keys == {None}


def test_halves_share_no_package() -> None:
    from onlinerl.datasets import fim

    prompts = fim.collect(limit=400, characters=200).prompts
    one, other = performer.halves(prompts)
    assert len(one) + len(other) == len(prompts)
    assert min(len(one), len(other)) > 60
    assert not {performer.package(p.path) for p in one} & {performer.package(p.path) for p in other}


# -------------------------------------------------------------------------------------------- tables

MADE = Study(
    "made",
    "A made-up study",
    tuple(Run("made", arm, seed) for arm in ("new · fast", "old · fast", "lost") for seed in range(3)),
    (Column("greedy.reward", "reward", ".3f"), Column("sampled.shown", "shown", ".1%")),
    compare=(("new · fast", "old · fast"),),
    compared=("greedy.reward",),
    reach=("greedy.reward",),
    curves=("greedy.reward",),
)


def made_up() -> list[Outcome]:
    outcomes = []
    for arm, slope in (("new · fast", 0.2), ("old · fast", 0.1)):
        for seed in range(3):
            last = slope + 0.001 * seed
            curve = tuple(
                {"completions": at, "greedy.reward": last * at / 1000} for at in (0.0, 500.0, 1000.0)
            )
            final = {"greedy.reward": last, "sampled.shown": 0.9}
            outcomes.append(
                Outcome("made", arm, seed, "finished", "", 9.0, (), {"greedy.reward": 0.0}, final,
                        {"greedy.reward": 0.004}, curve)
            )  # fmt: skip
    stopped = outcomes[0]
    outcomes[0] = replace(stopped, state="guard", message="guards.kl: too far", curve=stopped.curve[:2])
    return outcomes


def test_tables_and_plots_hold_what_the_outcomes_say(tmp_path: Path) -> None:
    summary = tables.write(MADE, made_up(), tmp_path, tmp_path / "to")
    assert summary == json.loads((tmp_path / "to" / "made.json").read_text())
    reward = summary["arms"]["new · fast"]["metrics"]["greedy.reward"]
    assert reward["mean"] == pytest.approx(0.201)
    assert reward["prompts"] == 0.004
    (gap,) = summary["differences"]
    assert gap["apart"] is True
    assert gap["mean"] == pytest.approx(0.1)
    (reach,) = summary["reach"]
    # the stopped seed stays at 0.1, so the mean curve ends at (0.1 + 0.201 + 0.202) / 3, half-way of which …
    assert reach["level"] == pytest.approx(0.101)
    assert 500 < reach["completions"] < 520
    assert summary["missing"] == [f"made/lost/{seed}" for seed in range(3)]
    text = (tmp_path / "to" / "made.md").read_text()
    assert "3, 1 stopped" in text
    assert "guards.kl: too far" in text
    assert (tmp_path / "to" / "made.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_number_of_the_markdown_is_in_the_json(tmp_path: Path) -> None:
    summary = tables.summarise(MADE, made_up(), {})
    held = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, int | float):
            held.update((f"{value:.3f}", f"{value:+.3f}", f"{value:.1%}", f"{value:.4f}", f"{value:g}"))

    walk(summary)
    rows = [line for line in tables.markdown(summary).splitlines() if line.startswith("| ")]
    numbers = {number for row in rows for number in re.findall(r"[-+]?\d+\.\d+%?", row)}
    assert len(numbers) > 10
    assert numbers <= held


def test_arms_without_curves_are_marks(tmp_path: Path) -> None:
    plain = [replace(outcome, curve=()) for outcome in made_up()]
    assert plots.draw(tables.summarise(replace(MADE, curves=()), plain, {}), tmp_path / "marks.png")
    assert not plots.draw(tables.summarise(MADE, [], {}), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


# ---------------------------------------------------------------------------------------- the command


def studies(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command where the serving packages cannot be imported, by the workers neither."""
    block = folder / "block"
    block.mkdir(exist_ok=True)
    names = ", ".join(repr(name) for name in SERVING)
    (block / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys(({names}), None))\n"
    )
    paths = os.pathsep.join([str(block), str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "studies", *words], capture_output=True, text=True, timeout=250, check=False,
        cwd=folder, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_small_study_runs_without_what_serves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["guards", "--small", "--out", str(out), "--budget", "200"]
    done = studies(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {outcome.arm: outcome for outcome in plan.read(out, ["guards"])}
    assert len(outcomes) == 5
    assert outcomes["all feedback from one user"].state == "guard"
    assert "one user gave 100%" in outcomes["all feedback from one user"].message
    assert all(outcome.extras["weights.finite"] == 1.0 for outcome in outcomes.values())
    again = studies(words, tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    lines = (out / "guards.jsonl").read_text().splitlines(keepends=True)
    (out / "guards.jsonl").write_text("".join(lines[:4]))
    more = studies([*words, "--resume"], tmp_path)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "1 runs, cost" in more.stdout
    assert "4 are there" in more.stdout
    made = studies(["report", str(out), "--to", str(tmp_path / "to")], tmp_path)
    assert made.returncode == 0, made.stderr
    summary = json.loads((tmp_path / "to" / "guards.json").read_text())
    assert summary["missing"] == []
    assert summary["machine"]["command"].startswith("python -m studies guards --small")


def test_a_run_that_breaks_is_an_outcome_and_the_budget_ends_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = studies(
        [
            "guards",
            "--small",
            "--out",
            str(out),
            "--budget",
            "200",
            "--set",
            "policies.tab.engine.resident=1",
        ],
        tmp_path,
    )
    assert done.returncode == 1
    outcomes = plan.read(out, ["guards"])
    assert {outcome.state for outcome in outcomes} == {"failed"}
    assert "resident" in outcomes[0].message
    late = studies(["guards", "--small", "--out", str(tmp_path / "late"), "--budget", "1"], tmp_path)
    assert late.returncode == 1
    assert "missing 5" in late.stdout


def test_records_are_json() -> None:
    assert json.loads(json.dumps(asdict(Outcome.example())))["study"] == "headline"
    assert Run.example().key == "headline/ours/0"
