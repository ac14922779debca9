"""Studies: intervals against known numbers, the queue, tables that say what their JSON holds, and a small
study on this processor, in a process that has none of the serving packages."""

from __future__ import annotations

import doctest
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from studies import catalogue, executed, intervals, performer, plan, plots, sabotage, tables, workers
from studies.plan import Column, Outcome, Run, Study
from studies.workers import Work

from onlinerl import config
from onlinerl.datasets import fim
from onlinerl.datasets.splits import library
from onlinerl.learning.rewards import RewardTable, examples
from onlinerl.records import Verdict
from onlinerl.validate.estimates import t_quantile

ROOT = Path(__file__).parents[1]
SERVING = ("fastapi", "sqlalchemy", "alembic", "structlog", "uvicorn", "aiohttp", "uvloop", "httptools")


# ---------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227), (1e9, 1.95996)]
)
def test_t_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


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


def test_a_command_that_goes_on_writes_over_the_line_that_was_cut(tmp_path: Path) -> None:
    first = Outcome("s", "arm", 0, "finished", "", 1.0)
    plan.append(tmp_path, first)
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"study": "s", "ar')
    plan.append(tmp_path, replace(first, seed=1))
    plan.append(tmp_path, replace(first, seed=2))
    assert [outcome.seed for outcome in plan.read(tmp_path, ["s"])] == [0, 1, 2]


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
    assert plan.ready(queue, {})[0].arm == "shared"
    assert "own" not in [run.arm for run in plan.ready(queue, {"one/shared/0": "failed"})]
    assert "own" in [run.arm for run in plan.ready(queue, {"one/shared/0": "guard"})]


def test_every_run_of_the_catalogue_has_settings_that_exist_and_agree(tmp_path: Path) -> None:
    from onlinerl.validate.course import check

    performer.lay_out(tmp_path, small=True)
    performer.tiny_model(tmp_path / "tiny")
    shared = json.loads((tmp_path / "settings.json").read_text())
    seen: set[str] = set()
    for study in catalogue.studies():
        assert {arm for pair in study.compare for arm in pair} <= set(study.arms), study.name
        for run in study.runs:
            assert run.key not in seen, run.key
            seen.add(run.key)
            assert set(run.extras) <= set(performer.EXTRAS)
            if run.seed:
                continue
            check(performer.settings_of(run, tmp_path, shared))
            check(performer.settings_of(run, tmp_path, {**shared, "after": []}))
    keys = {run.key for study in catalogue.studies() for run in study.runs if run.save}
    assert {run.start for study in catalogue.studies() for run in study.runs} - keys == {None}


def test_points_of_curves_are_measured_where_curves_are_plotted(tmp_path: Path) -> None:
    shared = performer.shared(small=False, every=())
    for study in catalogue.studies():
        for run in study.runs:
            every = performer.settings_of(run, tmp_path, shared).validation.evaluate_every
            assert bool(every) is bool(study.curves), run.key


def test_the_halves_share_no_package_and_nothing_that_is_learned_from(tmp_path: Path) -> None:
    performer.lay_out(tmp_path)
    own, other = (fim.read(tmp_path / "prompts" / f"{name}.jsonl") for name in ("own", "other"))
    assert min(len(own), len(other)) > 300
    assert not {library(p) for p in own} & {library(p) for p in other}
    assert all(fim.is_test(p.path) for p in [*own, *other])


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
    assert summary["missing"] == {"lost": [0, 1, 2]}
    text = (tmp_path / "to" / "made.md").read_text()
    assert "3, 1 stopped" in text
    assert "guards.kl: too far" in text
    assert (tmp_path / "to" / "made.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_study_of_which_all_failed_is_told(tmp_path: Path) -> None:
    failed = [Outcome("made", arm, 0, "failed", "broke", 1.0) for arm in MADE.arms]
    summary = tables.write(replace(MADE, floor=("sampled.shown", 0.6)), failed, tmp_path, tmp_path)
    assert summary["floor"] is None
    assert "1, 1 failed" in (tmp_path / "made.md").read_text()


def test_every_number_of_the_markdown_is_in_the_json(tmp_path: Path) -> None:
    summary = tables.summarise(MADE, made_up(), {})
    held: set[str] = set()

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


def test_pass_rates_are_told_against_the_base(tmp_path: Path) -> None:
    def made(arm: str, seed: int, passed: dict[str, float]) -> Outcome:
        name = f"{arm}-{seed}.T0.2.json"
        rate = {"mean": sum(passed.values()) / 4, "low": 0.1, "high": 0.9, "sites": 4}
        result = {"passed": passed, "pass_at_1": rate, "unseen": rate, "exact": 1, "empty": 0}
        place = executed.result_of(tmp_path, name)
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(result))
        return Outcome("s", arm, seed, "finished", "", 1.0, extras={"execution.files": [name]})

    sites = ("a.py:1", "a.py:2", "b.py:1", "b.py:2")
    outcomes = [
        made("base", 0, dict(zip(sites, (0.0, 0.0, 1.0, 0.0), strict=True))),
        made("(c)", 0, dict(zip(sites, (1.0, 0.0, 1.0, 0.0), strict=True))),
        made("(c)", 1, dict(zip(sites, (1.0, 0.0, 1.0, 1.0), strict=True))),
    ]
    base, ours = executed.summarise(outcomes, tmp_path)["rows"]
    assert (base["pass_at_1"], base["low"], base["high"]) == (0.25, 0.1, 0.9)
    assert "gain" not in base
    assert ours["pass_at_1"] == pytest.approx(0.625)
    # a.py gains 1 at one of its sites, b.py half at one of its: (1 + 0.5) / 4
    assert ours["gain"][0] == pytest.approx(0.375)
    text = executed.markdown(executed.summarise(outcomes, tmp_path))
    assert "| (c) | 0.2 | 2 | 62.5%" in text
    assert "+37.5%" in text


# -------------------------------------------------------------------------------------- the sabotages


def test_a_gradient_is_spoiled_once_and_what_was_patched_is_put_back() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    clip = torch.nn.utils.clip_grad_norm_
    norms = []
    with sabotage.KINDS["nan"]():
        for _ in range(sabotage.AFTER + 1):
            weight.grad = torch.ones(3)
            norms.append(float(torch.nn.utils.clip_grad_norm_([weight], 1.0)))
    assert [place for place, norm in enumerate(norms) if math.isnan(norm)] == [sabotage.AFTER - 1]
    assert torch.nn.utils.clip_grad_norm_ is clip


def test_a_flipped_reward_pays_refusals_more() -> None:
    settings = config.Rewards(function="studies.sabotage:flipped", weights={"verdict": 0.0})
    table = RewardTable.of(settings, tau=0.1)
    paid = {one.verdict: table.score(one).reward for one in examples()}
    assert paid[Verdict.ACCEPTED] < paid[Verdict.REJECTED]


# ---------------------------------------------------------------------------------------- the workers


def toys(folder: Path) -> Work:
    """Work that learns nothing: the arm says what happens."""

    def work(run: Run) -> Outcome:
        if run.arm == "breaks":
            raise ValueError("as it should")
        if run.arm == "dies":
            os._exit(7)
        if run.arm == "slow":
            (folder / "pid").write_text(str(os.getpid()))
            time.sleep(60)
        seen = f"{os.environ['CUDA_VISIBLE_DEVICES']}/{os.environ['OMP_NUM_THREADS']}"
        return Outcome(run.study, run.arm, run.seed, "finished", seen, 0.01)

    return work


def cannot(folder: Path) -> Work:
    raise ImportError("no such package")


def off(runs: list[Run], folder: Path, **more: Any) -> workers.Tally:
    settings: dict[str, Any] = {
        "prepare": toys,
        "processes": 2,
        "gpus": 2,
        "budget": 50.0,
        "say": lambda text: None,
    }
    return workers.work_off(runs, folder=folder, **(settings | more))


def test_a_run_that_breaks_or_dies_costs_itself_alone(tmp_path: Path) -> None:
    kept: list[Outcome] = []
    runs = [Run("s", arm, seed, cost=0.1) for arm in ("breaks", "dies", "fine") for seed in range(3)]
    tally = off(runs, tmp_path, keep=kept.append)
    assert tally.missing == []
    assert kept == tally.finished
    assert Counter(f"{outcome.arm} {outcome.state}" for outcome in kept) == {
        "breaks failed": 3, "dies failed": 3, "fine finished": 3,
    }  # fmt: skip
    assert {o.message for o in kept if o.arm == "fine"} <= {"0/1", "1/1"}
    assert all("as it should" in o.message for o in kept if o.arm == "breaks")
    assert all("code 7" in o.message for o in kept if o.arm == "dies")


def test_workers_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """In the middle of a run too: it would go on for minutes, and nobody would read what comes of it."""
    script = (
        "from pathlib import Path; from tests.test_studies import off; from studies.plan import Run;"
        f"off([Run('s', 'slow', 0, cost=0.1)], Path({str(tmp_path)!r}), processes=1)"
    )
    command = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text() != "")
    command.kill()
    command.wait()
    worker = Path("/proc", pid.read_text())
    wait_for(lambda: not worker.exists() or "Z" in (worker / "stat").read_text().rpartition(")")[2][:3])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_what_does_not_fit_the_budget_is_missing(tmp_path: Path) -> None:
    runs = [Run("s", "slow", 0, cost=0.1), Run("s", "fine", 0, cost=0.1), Run("s", "fine", 1, cost=0.1),
            Run("s", "long", 0, cost=9e6)]  # fmt: skip
    began = time.monotonic()
    tally = off(runs, tmp_path, budget=25.0)
    assert time.monotonic() - began < 55
    assert {run.key for run in tally.missing} == {"s/slow/0", "s/long/0"}
    assert {outcome.key for outcome in tally.finished} == {"s/fine/0", "s/fine/1"}


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path: Path) -> None:
    runs = [
        Run("s", "own", 0, cost=0.2, start="s/shared/0"),
        Run("s", "shared", 0, cost=0.1, save=True),
        Run("s", "orphan", 0, cost=0.1, start="s/breaks/0"),
        Run("s", "breaks", 0, cost=0.1, save=True),
    ]
    tally = off(runs, tmp_path)
    keys = [outcome.key for outcome in tally.finished]
    assert keys.index("s/shared/0") < keys.index("s/own/0")
    assert [run.key for run in tally.missing] == ["s/orphan/0"]


def test_workers_that_cannot_start_end_the_command(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with code 1 and without a run"):
        off([Run("s", "fine", 0)], tmp_path, prepare=cannot)


def test_without_its_program_there_is_no_multi_process_service(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("PATH", "/nowhere")
    with workers.mps(True, said.append):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "take turns" in said[0]


# ---------------------------------------------------------------------------------------- the command


def studies(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command where the serving packages cannot be imported, by the workers neither."""
    block = folder / "block"
    block.mkdir(exist_ok=True)
    names = ", ".join(repr(name) for name in SERVING)
    (block / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys(({names},), None))\n"
    )
    paths = os.pathsep.join([str(block), str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "studies", *words], capture_output=True, text=True, timeout=250, check=False,
        cwd=folder, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_small_study_runs_without_what_serves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["guards", "--arms", "one user", "--small", "--out", str(out), "--budget", "200",
             "--set", "validation.judge.url=http://me:it's sk-0123456789@127.0.0.1:9/v1"]  # fmt: skip
    done = studies(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = plan.read(out, ["guards"])
    assert outcome.state == "guard"
    assert "one user gave 100%" in outcome.message
    assert outcome.extras["weights.finite"] == 1.0
    assert outcome.extras["weights.changed"] == 0.0
    again = studies(words, tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    more = studies([*words, "--resume"], tmp_path)
    assert more.returncode == 0
    assert "0 runs, cost 0.0; 1 are there" in more.stdout
    made = studies(["report", str(out), "--to", str(tmp_path / "to")], tmp_path)
    assert made.returncode == 0, made.stderr
    summary = json.loads((tmp_path / "to" / "guards.json").read_text())
    assert summary["missing"] == {arm: [0] for arm in catalogue.guards().arms if "one user" not in arm}
    assert summary["machine"]["command"].startswith("python -m studies guards --arms 'one user' --small")
    assert "--resume" not in summary["machine"]["command"]  # it made no run
    assert "torch" in summary["machine"]["libraries"]
    told = [*(tmp_path / "to").iterdir(), *out.glob("*.jsonl"), *out.glob("home/**/report.*")]
    assert len(told) > 4
    assert not [file for file in told if b"sk-0123456789" in file.read_bytes()]


def test_unknown_studies_are_named(tmp_path: Path) -> None:
    done = studies(["nonsense"], tmp_path)
    assert done.returncode == 2
    assert "no study nonsense: there are headline" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["noise", "--arms", "nothing"],
            ["no arm of noise holds 'nothing'", "\n  50 % missing, all silence"],
        ),
        (["noise", "silence", "--arms", "?"], ["\n  clean\n", "\n  floor · 5 % accepted, τ = 0.1"]),
        (["precision", "--ranks", "0"], ["no run has a rank up to 0", "[1]"]),
        (["all", "nonsense"], ["no study nonsense"]),
        (["noise", "--set", "validation.nonsense=1"], ["unknown setting validation.nonsense"]),
        (["noise", "--set", "validation.users"], ["is not an override"]),
        (["headline", "--sites", "nowhere.jsonl"], ["nowhere.jsonl cannot be read"]),
        (["headline", "--sites", "prompts.jsonl"], ["does not name its sites"]),
        (["report", "."], ["holds no outcome"]),
        (["execute", "."], ["holds no completions"]),
        (["execute", "made", "--arms", "(x)"], ["no arm with completions holds '(x)'", "\n  (c)"]),
        (["noise", "--processes", "0"], ["0 is below 1"]),
        (["noise", "--gpus", "-1"], ["-1 is below 0"]),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: list[str],
) -> None:
    from studies.__main__ import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(asdict(fim.FimPrompt.example())) + "\n")
    made = Outcome("headline", "(c)", 0, "finished", "", 1.0, extras={"execution.files": ["x.T0.json"]})
    plan.append(tmp_path / "made", made)
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (results / "execution.json").write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    try:
        code: object = main(words)
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert code == 2
    told = capsys.readouterr().err
    assert all(text in told for text in said), told
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_every_study_keeps_the_commands_that_made_it(tmp_path: Path) -> None:
    performer.note(tmp_path, ["noise", "silence"], "first", {"gpus": 1})
    performer.note(tmp_path, ["silence"], "second", {"gpus": 2})
    assert performer.machine(tmp_path, "noise") == {"command": "first", "gpus": 1}
    assert performer.machine(tmp_path, "silence") == {"command": "first; second", "gpus": 2}
    assert performer.machine(tmp_path, "tune") == {}


def test_what_a_chosen_run_starts_from_is_chosen_too() -> None:
    from studies.__main__ import chosen, parsed

    runs = chosen(parsed(["cohorts", "--arms", "cohort short"]), ["cohorts"])
    assert {run.arm for run in runs} == {"shared policy", "adapter of cohort short"}
    assert len(runs) == 6


@pytest.mark.parametrize("module", [executed, intervals, plots, tables])
def test_examples_in_the_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_records_are_json() -> None:
    assert json.loads(json.dumps(asdict(Outcome.example())))["study"] == "headline"
    assert Run.example().key == "headline/ours/0"
