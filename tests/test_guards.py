"""What ends a run before a bad step is written: the decisions, and the sabotage of whole runs."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from onlinerl import config
from onlinerl.config import Settings, Trust
from onlinerl.errors import GuardTripped, SettingsError
from onlinerl.learning.__main__ import main
from onlinerl.learning.guards import Bands, contradicted, dominance, most_of_one
from onlinerl.learning.rewards import RewardTable, examples
from onlinerl.learning.run import outcome, train
from onlinerl.learning.trainer import checkpoints_of
from onlinerl.records import RunState, Sample, Scored, Verdict, Version, VersionState
from onlinerl.store import interactions, runs, versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from tests.synthetic import fill, tiny_model
from tests.test_trainer import QUIET, events, list_versions, rows, settings_for

TABLE = RewardTable(0.25)


def bands(**changes: Any) -> Bands:
    return Bands(config.Guards(**changes), config.Silence())


def earned(verdict: Verdict, *rewards: float) -> list[Scored]:
    one = replace(examples()[0], verdict=verdict)
    return [Scored(one, reward, {"function": reward}) for reward in rewards]


# --------------------------------------------------------------------------------------- the decisions


def test_steps_without_a_gradient_say_nothing_of_their_size() -> None:
    """Nobody accepted anything for some batches: the first that somebody did accept is no explosion."""
    one = bands(gradient=20)
    for norm in (*[0.0] * 20, *[1e-9] * 20, 0.4, 0.5, 0.6, 0.5, 0.5):
        one.gradient(norm, 0.0)
    assert one.norms == [0.4, 0.5, 0.6, 0.5, 0.5]
    one.gradient(9.9, 0.0)
    with pytest.raises(GuardTripped, match=r"10\.1 is above 20 times its running median 0\.5"):
        one.gradient(10.1, 0.0)
    with pytest.raises(GuardTripped, match="is not a number"):
        one.gradient(0.0, math.nan)


def test_contradiction_by_hand() -> None:
    assert contradicted([-0.4] * 16, [0.2] * 16)
    assert not contradicted([0.75] * 16, [-0.25] * 16)
    assert not contradicted([0.0] * 16, [0.0] * 16), "equal is no contradiction"
    # every accepted one below every refused one is beyond chance from six of each on
    assert contradicted([-0.5, -0.4, -0.3, -0.5, -0.4, -0.3], [0.1, 0.2, 0.3, 0.1, 0.2, 0.3])
    assert not contradicted([-0.5] * 5, [0.2] * 5)
    # both have variance 16/15, so the standard error of the difference is √(2·16/15/16) = 0.365
    spread = [-1.0, 1.0] * 8
    shifted = [value + 0.5 for value in spread]
    assert not contradicted(spread, shifted), "1.4 standard errors apart: chance"
    far = [value + 1.2 for value in spread]
    assert contradicted(spread, far), "3.3 standard errors apart"


def test_rewards_that_have_nothing_to_do_with_verdicts_pass() -> None:
    """The check is made at every batch; over many runs of many batches it hardly ever cries."""
    tripped = 0
    for seed in range(20):
        rng = random.Random(seed)
        one = bands()
        try:
            for _ in range(20):
                for verdict in (Verdict.ACCEPTED, Verdict.REJECTED):
                    one.rewards(earned(verdict, *(rng.gauss(0.0, 1.0) for _ in range(8))))
        except GuardTripped:
            tripped += 1
    assert tripped <= 2


def test_contradiction_is_seen_over_batches_and_named() -> None:
    one = bands()
    for _ in range(5):
        one.rewards([*earned(Verdict.ACCEPTED, -0.4), *earned(Verdict.TIMEOUT, 0.2)])
        one.restore(json.loads(json.dumps(one.state())))
    with pytest.raises(GuardTripped) as tripped:
        one.rewards([*earned(Verdict.ACCEPTED, -0.4), *earned(Verdict.REJECTED, 0.2)])
    assert str(tripped.value).startswith(
        "the rewards contradict the verdicts: accepted answers earned -0.4 on average and rejected ones "
        "+0.2: look at rewards.function and rewards.weights"
    )
    off = bands(contradiction=False)
    off.rewards([*earned(Verdict.ACCEPTED, *[-0.4] * 50), *earned(Verdict.REJECTED, *[0.2] * 50)])


def test_silent_answers_are_no_refusals() -> None:
    one = bands()
    silent = replace(examples()[0], verdict=Verdict.SILENT, completion="")
    one.rewards([*earned(Verdict.ACCEPTED, *[-0.1] * 20), *[Scored(silent, 0.0)] * 20])
    assert (len(one.accepted), one.refused) == (20, [])


def test_more_than_half_without_a_reward_ends_it() -> None:
    fine, failed = earned(Verdict.ACCEPTED, 0.5), [Scored(examples()[0], 0.0, fault="it raised KeyError")]
    one = bands()
    one.rewards(fine * 8 + failed * 8)
    with pytest.raises(GuardTripped, match=r"9 of the last 16 samples got no reward; .*, it raised KeyError"):
        one.rewards(fine * 7 + failed * 9)
    small = bands()
    small.rewards(failed * 7)  # too few to say: they are left out, and the next batch decides
    small.restore(json.loads(json.dumps(small.state())))
    with pytest.raises(GuardTripped, match="7 of the last 8 samples"):
        small.rewards(fine)


def test_dominance_by_hand() -> None:
    assert dominance([], 0.5) == ""
    assert dominance(["a", "b", "a", "b"], 0.5) == ""
    said = dominance(["ann", "bob", "ann", "ann"], 0.5)
    assert "one user gave 75% of a batch (3 of 4 samples), more than 50%" in said
    assert "ann" not in said.replace("than", ""), "logs name nobody"
    assert dominance(["a"], 0.5)
    assert dominance(["a"] * 4, 1.0) == ""


@pytest.mark.parametrize(
    ("changes", "active", "batch", "most"),
    [
        ({}, 1000, 32, None),
        ({"owner": False}, 1, 32, 16),
        ({"owner": False}, 199, 32, 16),
        ({"owner": False}, 200, 32, 1),  # max(0.01, 3/200) of 32 is 0.48: one at least
        ({"owner": False}, 200, 1000, 15),
        ({"owner": False}, 1000, 1000, 10),
        ({"owner": False, "dominance": 0.3}, 5, 10, 3),
        ({"owner": False, "dominance": 0.1}, 5, 4, 1),
        ({"owner": False, "crowd": 1, "users": 50.0}, 2, 10, 10),
    ],
)
def test_what_one_user_may_have_of_a_batch(
    changes: dict[str, Any], active: int, batch: int, most: int
) -> None:
    assert most_of_one(Trust(**changes), active, batch) == most


# -------------------------------------------------------------------------------- sabotage of whole runs


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def good(model: Path, tmp_path: Path) -> Settings:
    """An installation whose live version was learned and is good, and new feedback that waits."""
    settings = settings_for(model, tmp_path / "home", *QUIET)
    fill(settings, 40)
    assert train(settings, "tab", max_steps=2).state is RunState.FINISHED
    database = Database.open(settings.database_url)
    try:
        with database.write() as c:
            versions.promote(c, "tab", versions.list_(c, "tab")[-1].id, actor="test")
    finally:
        database.close()
    fill(settings, 120, seed=1)
    return settings


def sabotaged(good: Settings, *overrides: str) -> Settings:
    """The same installation with settings that somebody should not have made."""
    model = Path(good.policies["tab"].model)
    return settings_for(model, good.home, *overrides)


def assert_stopped(settings: Settings, said: str, before: list[Version], steps: int = 0) -> None:
    """The second run failed with these words after so many steps; whatever was good before still is."""
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            run = runs.list_(c, "tab")[-1]
            measured = [step.batch for step in runs.steps(c, run.id)]
            live = versions.live(c, "tab")
            rewarded = interactions.rewards(c, run=run.id)
            waiting = interactions.counts(c, policy="tab").waiting
    finally:
        database.close()
    assert (run.id, run.state) == (2, RunState.FAILED)
    assert said in run.message
    after = list_versions(settings)
    assert after == before, "no version was made, none changed its state"
    assert live == before[-1]
    assert live.state is VersionState.LIVE
    directory.verify(live.url, live.digest)
    assert measured == list(range(1, steps + 1)), "the bad step left no numbers"
    assert [one["batch"] for one in events(settings, 2, "step")] == measured
    assert checkpoints_of(settings, 2).batches() == [], "nor weights that a next run could take over"
    assert not rewarded
    assert waiting > 50, "what nothing was learned from is free again"
    assert not [row for row in rows(settings) if row["use"] == "claimed" and row["run"] == 2]
    # and the next run, without the sabotage, begins where the last good one stood
    again = train(
        settings_for(Path(settings.policies["tab"].model), settings.home, *QUIET), "tab", max_steps=1
    )
    assert (again.state, again.parent, again.step) == (RunState.FINISHED, live.id, 1)


def test_a_learning_rate_a_hundred_times_too_high(good: Settings) -> None:
    before = list_versions(good)
    settings = sabotaged(good, "policies.tab.train.lr=0.3", "policies.tab.train.guards.kl=0.1")
    with pytest.raises(GuardTripped) as tripped:
        train(settings, "tab")
    assert str(tripped.value).startswith(("guards.", "train.veto", "silence.floor"))
    assert_stopped(settings, str(tripped.value), before, steps=len(events(settings, 2, "step")))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of reward functions with bugs in them."""
    folder = tmp_path / "mine"
    folder.mkdir()
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(
        "def flipped(sample):\n"
        "    return {'accepted': -1.0, 'rejected': 0.2}.get(sample.verdict.value, 0.0)\n"
        "def nan(sample):\n"
        "    return 1.0 if sample.id.startswith('example-') else float('nan')\n"
        "def picky(sample):\n"
        "    if sample.prompt_ids[0] % 4 == 3:\n"
        "        raise KeyError(sample.prompt)\n"
        "    return 0.0\n"
    )
    monkeypatch.syspath_prepend(folder)
    return name


def test_a_reward_whose_sign_a_bug_flipped(good: Settings, mine: str) -> None:
    before = list_versions(good)
    settings = sabotaged(
        good,
        f"policies.tab.rewards.function={mine}:flipped",
        "policies.tab.rewards.weights.verdict=0",
        "policies.tab.train.version_every=1",
    )
    with pytest.raises(GuardTripped):
        train(settings, "tab")
    assert_stopped(
        settings,
        "the rewards contradict the verdicts: accepted answers earned -1 on average and rejected ones +0.2: "
        "look at rewards.function and rewards.weights",
        before,
    )


def test_a_weight_with_the_wrong_sign(good: Settings) -> None:
    before = list_versions(good)
    settings = sabotaged(good, "policies.tab.rewards.weights.verdict=-1", "policies.tab.rewards.tau=0.25")
    with pytest.raises(GuardTripped):
        train(settings, "tab")
    said = "accepted answers earned -0.75 on average and rejected ones +0.25"
    assert_stopped(settings, said, before)


def test_a_reward_that_is_no_number(good: Settings, mine: str) -> None:
    before = list_versions(good)
    settings = sabotaged(good, f"policies.tab.rewards.function={mine}:nan")
    with pytest.raises(GuardTripped):
        train(settings, "tab")
    said = "16 of the last 16 samples got no reward; the last time, rewards.function: it returned nan"
    assert_stopped(settings, said, before)


def test_nan_in_a_gradient(good: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one tensor, in the second batch, while the loss looks well."""
    before = list_versions(good)
    plain = torch.nn.utils.clip_grad_norm_
    calls = Counter[str]()

    def poisoned(parameters: Any, *rest: Any, **named: Any) -> Any:
        parameters = list(parameters)
        calls["steps"] += 1
        if calls["steps"] == 3:  # two optimiser steps a batch
            parameters[-1].grad.view(-1)[0] = float("nan")
        return plain(parameters, *rest, **named)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    settings = sabotaged(good, *QUIET)
    with pytest.raises(GuardTripped, match=r"gradient norm \(nan\) is not a number"):
        train(settings, "tab")
    monkeypatch.undo()
    assert_stopped(settings, "is not a number: nothing was written", before, steps=1)


STRANGERS = ("policies.tab.trust.owner=false", "policies.tab.cleaning.per_minute=null")


def test_all_feedback_from_one_user(model: Path, tmp_path: Path) -> None:
    settings = settings_for(model, tmp_path / "home", *QUIET)
    fill(settings, 40, users=1)
    train(settings, "tab", max_steps=2)
    database = Database.open(settings.database_url)
    try:
        with database.write() as c:
            versions.promote(c, "tab", versions.list_(c, "tab")[-1].id, actor="test")
    finally:
        database.close()
    fill(settings, 120, seed=1, users=1)
    before = list_versions(settings)
    strangers = sabotaged(settings, *STRANGERS)
    with pytest.raises(GuardTripped) as tripped:
        train(strangers, "tab")
    assert "u0" not in str(tripped.value)
    # half a batch of 16 is all that one user could have, and nobody fills the other half
    assert_stopped(strangers, "trust.dominance: one user gave 100% of a batch (8 of 8 samples)", before)


def test_one_loud_user_among_others_teaches_half_and_no_more(model: Path, tmp_path: Path) -> None:
    settings = settings_for(model, tmp_path / "home", *QUIET, *STRANGERS, "policies.tab.train.holdout=0")
    fill(settings, 100, users=1)
    fill(settings, 40, seed=1, users=4)  # u0 again, u1, u2, u3
    ended = train(settings, "tab")
    assert ended.state is RunState.FINISHED
    assert ended.message.startswith("trust.dominance: one user gave ")
    assert ended.step >= 3
    assert list_versions(settings)[-1].step == ended.step, "what was learned before is a version"
    claimed = [row for row in rows(settings) if row["use"] == "claimed"]
    for batch in range(1, ended.step + 1):
        users = Counter(row["user"] for row in claimed if row["batch"] == batch)
        assert users["u0"] <= 8
        assert users.total() == 16
    assert max(row["batch"] for row in claimed) == ended.step, "the rest was given back"


def test_a_function_that_fails_now_and_then_costs_those_samples_only(
    good: Settings, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sabotaged(good, *QUIET, f"policies.tab.rewards.function={mine}:picky")
    ended = train(settings, "tab")
    assert ended.state is RunState.FINISHED
    lost = [row for row in rows(settings) if row["dropped"] == "reward"]
    assert lost
    taken = [row for row in rows(settings) if row["use"] == "claimed" and row["run"] == 2]
    assert all(
        json.loads(row["reward_parts"])["function"] == 0.0 for row in taken if row["reward"] is not None
    )
    assert sum(one["samples"] for one in events(settings, 2, "step")) == len(taken)
    assert f"left out: {len(lost)} answers for which rewards.function failed" in outcome(settings, ended)


def test_a_function_that_cannot_be_used_ends_before_there_is_a_run(
    good: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sabotaged(good, "policies.tab.rewards.function=not_there:reward")
    with pytest.raises(SettingsError, match="there is no module not_there"):
        train(settings, "tab")
    monkeypatch.setenv("ONLINERL_SETTINGS", settings.model_dump_json())
    told = CliRunner().invoke(main, ["--policy", "tab"])
    assert told.exit_code == 2
    assert "rewards.function not_there:reward" in told.stderr
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            assert len(runs.list_(c, "tab")) == 1
    finally:
        database.close()


def test_a_function_that_says_what_the_verdict_says_learns_as_ever(good: Settings) -> None:
    settings = sabotaged(
        good, *QUIET, "policies.tab.rewards.function=tests.test_guards:agreeing",
        "policies.tab.rewards.weights.verdict=0",
    )  # fmt: skip
    assert train(settings, "tab").state is RunState.FINISHED
    assert any("reward/function" in one for one in events(settings, 2, "step"))


def agreeing(sample: Sample) -> float:
    return {Verdict.ACCEPTED: 0.75, Verdict.SILENT: 0.0}.get(sample.verdict, -0.25)
