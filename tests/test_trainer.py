"""Whole runs on a tiny model and a real store: learning, kills, guards, silence, wishes."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from onlinerl.config import Settings, load_settings
from onlinerl.errors import GuardTripped
from onlinerl.learning import run as running
from onlinerl.learning.__main__ import main
from onlinerl.learning.checkpoints import Checkpoints
from onlinerl.learning.devices import threads_of
from onlinerl.learning.learner import Learner
from onlinerl.learning.receive import lineage, oldest
from onlinerl.learning.run import train
from onlinerl.learning.trainer import checkpoints_of
from onlinerl.records import Run, RunState, Step, Verdict, Version, VersionState
from onlinerl.store import interactions, runs, versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from tests.synthetic import fill, interaction, load, sample, start, tiny_model

FAST = (
    "policies.tab.train.lr=3e-3",
    "policies.tab.train.threads=1",
    "policies.tab.train.guards.kl=2",
    "policies.tab.train.batch=16",
    "policies.tab.train.version_every=4",
    "policies.tab.train.checkpoint_every=2",
)


QUIET = (
    "policies.tab.train.patience=0",
    "policies.tab.train.guards.kl=100",
    "policies.tab.train.guards.entropy=0",
    "policies.tab.train.guards.clip_fraction=1",
)
"""Nothing ends the run before its data does."""
SILENCING = (
    *QUIET,
    "policies.tab.rewards.tau=1",
    "policies.tab.train.lr=1e-2",
    "policies.tab.train.version_every=100",
    "policies.tab.train.silence.floor=0.95",
)
"""Whatever is shown costs, so the policy falls silent."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def settings_for(model: Path, home: Path, *overrides: str) -> Settings:
    return load_settings(overrides=[f"policies.tab.model={model}", *FAST, *overrides], home=home)


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> Settings:
    return settings_for(model, tmp_path / "home")


def events(settings: Settings, run: int = 1, kind: str | None = None) -> list[dict[str, Any]]:
    lines = (settings.home / "runs" / str(run) / "log.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [one for one in found if kind is None or one["event"] == kind]


def trained(settings: Settings, run: int = 1) -> list[str]:
    """Ids of the samples that went into the weights, following what a resume took back."""
    steps: dict[int, list[str]] = {}
    for one in events(settings, run):
        if one["event"] == "resume":
            steps = {batch: ids for batch, ids in steps.items() if batch <= one["batch"]}
        elif one["event"] == "step":
            assert one["batch"] not in steps
            steps[one["batch"]] = one["ids"]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [id for batch in sorted(steps) for id in steps[batch]]


def rows(settings: Settings) -> list[sqlite3.Row]:
    connection = sqlite3.connect(settings.home / "onlinerl.db")
    connection.row_factory = sqlite3.Row
    try:
        return connection.execute("SELECT * FROM interactions ORDER BY seq").fetchall()
    finally:
        connection.close()


def kept_steps(settings: Settings, run: int = 1) -> list[Step]:
    """What the store says that the batches of a run measured."""
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            return runs.steps(c, run)
    finally:
        database.close()


def assert_kept(settings: Settings, run: int = 1) -> None:
    """The store has the numbers of each batch that counts, as the log has them, and the reward of each
    sample that was trained on and of no other."""
    logged: dict[int, dict[str, Any]] = {}
    for one in events(settings, run):
        if one["event"] == "resume":
            logged = {batch: line for batch, line in logged.items() if batch <= one["batch"]}
        elif one["event"] == "step":
            batch = one.pop("batch")
            logged[batch] = {name: one[name] for name in one.keys() - {"event", "at", "ids"}}
    steps = kept_steps(settings, run)
    assert [step.batch for step in steps] == sorted(logged)
    for step in steps:
        assert step.numbers == pytest.approx(logged[step.batch], rel=1e-5)
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            rewards = interactions.rewards(c, run=run)
    finally:
        database.close()
    of_batch: dict[int, list[float]] = {}
    for kept in rewards:
        assert sum(kept.parts.values()) == pytest.approx(kept.reward)
        of_batch.setdefault(kept.batch, []).append(kept.reward)
    for step in steps:
        mean = sum(of_batch[step.batch]) / len(of_batch[step.batch])
        assert mean == pytest.approx(step.numbers["reward"])
        assert len(of_batch[step.batch]) == step.numbers["samples"]
    assert [f"{kept.id}/{kept.index}" for kept in rewards] == [
        f"{row['id']}/0"
        for row in sorted(rows(settings), key=lambda row: (row["batch"] or 0, row["seq"]))
        if row["use"] == "claimed" and row["run"] == run
    ]


def list_versions(settings: Settings) -> list[Version]:
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            return versions.list_(c, "tab")
    finally:
        database.close()


def share_even(url: str) -> float:
    drawn = sample(load(Path(url)), 1000, 99)
    return sum(answer[0] % 2 == 0 for _, answer, _ in drawn) / 1000


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------- learning


def test_a_run_learns_a_simple_taste(settings: Settings) -> None:
    fill(settings, 700)
    ended = train(settings, "tab")
    assert ended.state is RunState.FINISHED
    assert ended.message.startswith("no feedback is left that it may claim now"), (
        "the oldest are too old for it"
    )
    made = list_versions(settings)
    assert [v.state for v in made] == [VersionState.LIVE] + [VersionState.CANDIDATE] * (len(made) - 1)
    assert [v.parent for v in made[1:]] == [v.id for v in made[:-1]]
    # four standard errors of a difference of two shares of 1,000 draws are 0.09
    assert share_even(made[-1].url) > share_even(made[0].url) + 0.12
    for version in made:
        directory.verify(version.url, version.digest)
    manifest = directory.read_manifest(made[-1].url)
    assert {entry.dtype for entry in manifest.tensors.values()} == {"BF16"}, "the parent's number format"
    assert manifest.data.steps == made[-1].step == ended.step
    assert manifest.settings["tau"] == ended.tau
    assert {"kl", "entropy", "held_reward"} <= set(manifest.metrics)
    # every claimed row was trained on exactly once, what is left was set aside for a stated reason
    assert Counter(trained(settings)) == Counter(
        f"{row['id']}/0" for row in rows(settings) if row["use"] == "claimed"
    )
    assert {row["use"] for row in rows(settings)} <= {"claimed", "held", "labelled", "dropped"}
    step = events(settings, kind="step")[0]
    expected = (
        "kl entropy clip_fraction ess staleness baseline masked vetoed silent length show gradient_norm"
    )
    assert {*expected.split(), "reward/accepted", "accepted", "explored"} <= step.keys()
    assert_kept(settings)
    board = settings.home / "runs" / "1" / "tensorboard"
    assert list(board.glob("events.out.tfevents.*"))


def test_what_is_not_worth_learning_from_measures_nothing_either(model: Path, tmp_path: Path) -> None:
    """Three users judge eighty answers in a second: neither their samples nor their held-back ones count."""
    strangers = ("policies.tab.trust.owner=false", "policies.tab.trust.dominance=1")
    settings = settings_for(model, tmp_path / "home", *strangers, "policies.tab.train.holdout=0.3")
    fill(settings, 240, users=3)
    fill(settings, 240, seed=1, users=60)
    train(settings, "tab", max_steps=4)
    assert Counter((row["use"], row["dropped"], row["run"]) for row in rows(settings)[:240]) == {
        ("dropped", "burst", 1): 240
    }, "each is counted, like one that was claimed"
    held = [row for row in rows(settings) if row["use"] == "held"]
    assert 10 < len(held) < 64
    assert list_versions(settings)[-1].metrics["held_samples"] == len(held)


def test_next_run_goes_on_where_the_last_one_stood(settings: Settings) -> None:
    fill(settings, 60)
    train(settings, "tab")
    database = Database.open(settings.database_url)
    try:
        with database.write() as c:
            last = versions.list_(c, "tab")[-1]
            versions.promote(c, "tab", last.id, actor="test")
    finally:
        database.close()
    fill(settings, 60, seed=1)
    second = train(settings, "tab", max_steps=1)
    assert second.parent == last.id
    assert events(settings, second.id, "inherited"), "the optimiser goes on"
    state = checkpoints_of(settings, second.id).latest()
    assert state is not None
    steps = {float(value) for name, value in state.optimizer().items() if name.endswith("/step")}
    first_steps = 2 * events(settings, 1, "step")[-1]["batch"]
    assert steps == {first_steps + 2.0}, "two minibatches more than the first run's"


def test_max_steps(settings: Settings) -> None:
    fill(settings, 100)
    ended = train(settings, "tab", max_steps=2)
    assert (ended.step, ended.message) == (2, "step 2 was to be its last")
    assert list_versions(settings)[-1].step == 2
    assert sum(row["use"] == "claimed" for row in rows(settings)) == 32


def test_what_rests_is_left(settings: Settings) -> None:
    fill(settings, 40)
    with sqlite3.connect(settings.database_url.removeprefix("sqlite:///")) as connection:
        resting = connection.execute(
            "UPDATE interactions SET verdict = 'timeout', verdict_at = ? WHERE kind = 'shown' AND seq > 30",
            (time.time(),),
        ).rowcount
    connection.close()
    ended = train(settings, "tab")
    assert ended.message == f"no feedback is left that it may claim now; verdicts that wait: {resting}"


def test_raw_mode_takes_the_reward_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(
        model, tmp_path / "home", "policies.tab.train.mode=raw", "policies.tab.rewards.tau=0"
    )
    fill(settings, 40)
    seen: list[tuple[Verdict, float]] = []
    plain = Learner.step

    def spy(self: Learner, batch: Any, advantage: Sequence[float], *rest: Any) -> dict[str, float]:
        seen.extend((scored.sample.verdict, value) for scored, value in zip(batch, advantage, strict=True))
        return plain(self, batch, advantage, *rest)

    monkeypatch.setattr(Learner, "step", spy)
    train(settings, "tab", max_steps=1)
    assert {verdict for verdict, _ in seen} >= {Verdict.ACCEPTED, Verdict.REJECTED}
    assert all(value == (1.0 if verdict is Verdict.ACCEPTED else 0.0) for verdict, value in seen)


def test_group_mode_learns_from_the_choices_of_one_request(model: Path, tmp_path: Path) -> None:
    """GRPO over whole runs: four answers to each prompt, τ of no account."""
    settings = settings_for(
        model, tmp_path / "home", "policies.tab.train.mode=group", "policies.tab.rewards.tau=1", *QUIET,
        "policies.tab.train.silence.floor=0", "policies.tab.train.staleness=100",
    )  # fmt: skip
    base_only = settings_for(model, tmp_path / "base")
    fill(base_only, 4)
    first = load(Path(list_versions(base_only)[0].url))
    made = []
    for number, drawn in enumerate(sample(first, 800, 0, group=4)):
        one = interaction(number, drawn)
        made.append(replace(one, id=f"request-{number // 4}", index=number % 4))
    fill(settings, 1)
    database = Database.open(settings.database_url)
    try:
        with database.write() as c:
            interactions.insert(c, made)
    finally:
        database.close()
    assert train(settings, "tab").state is RunState.FINISHED
    versions_made = list_versions(settings)
    # four standard errors of a difference of two shares of 1,000 draws are 0.09
    assert share_even(versions_made[-1].url) > share_even(versions_made[0].url) + 0.09


def test_nothing_to_learn_from(settings: Settings) -> None:
    ended = train(settings, "tab")
    assert (ended.state, ended.step) == (RunState.FINISHED, 0)
    assert [v.id for v in list_versions(settings)] == [0], "the base model was registered, nothing was made"


def test_cold_samples_are_left_out(settings: Settings) -> None:
    fill(settings, 40)
    fill(settings, 40, seed=1, temperature=0.2)
    fill(settings, 40, seed=2, arm="explore")
    train(settings, "tab")
    assert not [id for id in trained(settings) if id.startswith("s1-")]
    for step, ids in zip(kept_steps(settings), events(settings, kind="step"), strict=True):
        explored = [id for id in ids["ids"] if id.startswith("s2-")]
        assert step.numbers["explored"] == len(explored) / step.numbers["samples"]
    assert kept_steps(settings)[-1].numbers["explored"] == 1, "both arms are trained on"
    cold = sum(row["dropped"] == "cold" for row in rows(settings))
    assert cold > 0
    assert kept_steps(settings)[-1].numbers["dropped/cold"] == cold


def test_run_ends_when_the_held_back_reward_stops_rising(model: Path, tmp_path: Path) -> None:
    settings = settings_for(
        model, tmp_path / "home", "policies.tab.train.version_every=1", "policies.tab.train.patience=2",
        "policies.tab.train.holdout=0.3", "policies.tab.train.lr=1e-9", "policies.tab.train.staleness=100",
    )  # fmt: skip
    fill(settings, 400)
    ended = train(settings, "tab")
    assert ended.state is RunState.FINISHED
    assert "did not rise" in ended.message
    held = {f"{row['id']}/0" for row in rows(settings) if row["use"] == "held"}
    assert held
    assert not held & set(trained(settings)), "what measures is never trained on"


def share_changed(one: Version, other: Version) -> float:
    """Of the stored numbers, those whose bits differ."""
    before, after = (load_file(Path(version.url) / "model.safetensors") for version in (one, other))
    different = [
        (after[name].view(torch.int16) != tensor.view(torch.int16)) for name, tensor in before.items()
    ]
    return float(torch.cat([each.flatten() for each in different]).double().mean())


def test_each_version_says_what_share_of_the_served_weights_it_changed(model: Path, tmp_path: Path) -> None:
    """In bf16 a small step changes some weights and leaves others as they were."""
    settings = settings_for(
        model, tmp_path / "home", *QUIET, "policies.tab.train.version_every=1", "policies.tab.train.lr=1e-5"
    )
    fill(settings, 60)
    train(settings, "tab", max_steps=3)
    made = list_versions(settings)
    told = [line["changed"] for line in events(settings, kind="version")]
    assert told == pytest.approx([share_changed(one, other) for one, other in itertools.pairwise(made)])
    assert all(0 < share < 0.5 for share in told), told
    assert [version.metrics["changed"] for version in made[1:]] == told
    assert not [line for line in events(settings, kind="warning") if "very weights" in line["text"]]


def test_a_version_that_equals_its_parent_is_told(model: Path, tmp_path: Path) -> None:
    settings = settings_for(
        model, tmp_path / "home", *QUIET, "policies.tab.train.version_every=1", "policies.tab.train.lr=1e-44"
    )
    fill(settings, 40)
    train(settings, "tab", max_steps=2)
    made = list_versions(settings)
    assert [share_changed(one, other) for one, other in itertools.pairwise(made)] == [0.0, 0.0]
    assert [line["changed"] for line in events(settings, kind="version")] == [0.0, 0.0]
    warned = [line for line in events(settings, kind="warning") if "very weights" in line["text"]]
    assert [line["batch"] for line in warned] == [1, 2]
    assert "tab@2 serves the very weights of tab@1" in warned[1]["text"]
    assert "too small for bfloat16" in warned[1]["text"]
    assert "raise train.lr" in warned[1]["text"]


# -------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kill_in_mid_step_loses_nothing_and_repeats_nothing(model: Path, tmp_path: Path, seed: int) -> None:
    settings = settings_for(model, tmp_path / "home", "policies.tab.train.staleness=100", *QUIET)
    ids = fill(settings, 400, seed=seed)
    rng = random.Random(seed)
    log = settings.home / "runs" / "1" / "log.jsonl"
    process = start(settings)
    target = rng.randint(3, 12)
    wait_for(lambda: log.exists() and log.read_text().count('"step"') >= target)
    time.sleep(rng.random() * 0.15)
    process.kill()
    process.communicate()
    for version in list_versions(settings):
        directory.verify(version.url, version.digest)
    ended = train(settings, "tab")
    assert ended.id == 1, "the same run goes on"
    assert ended.state is RunState.FINISHED
    assert events(settings, kind="resume")
    used = trained(settings)
    claimed = [f"{row['id']}/0" for row in rows(settings) if row["use"] == "claimed"]
    assert sorted(used) == sorted(claimed)
    assert len(used) == len(set(used))
    uses = Counter(row["use"] for row in rows(settings))
    assert uses["labelled"] == 0, "none was left behind"
    assert sum(uses.values()) == len(ids)
    made = list_versions(settings)
    for version in made:
        directory.verify(version.url, version.digest)
    steps = [version.step for version in made[1:]]
    assert steps == sorted(set(steps)), "no version was made twice"
    assert steps[-1] == ended.step
    assert_kept(settings)


def test_kill_between_checkpoint_and_version(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest gap: the checkpoint owes a version that was not registered."""
    fill(settings, 200)

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(versions, "register", die_after_base(versions.register, die))
        patch.setattr(running, "_end", lambda *_: None)  # a kill tells the store nothing
        with pytest.raises(Killed):
            train(settings, "tab")
    release_lease(settings)
    ended = train(with_lr(settings, 1e-4), "tab")
    assert ended.id == 1
    assert events(settings, kind="resume")[0]["batch"] == 4
    (warned,) = [one["text"] for one in events(settings, kind="warning") if "began with" in one["text"]]
    assert warned.endswith("those it began with: train.lr: 0.003, now 0.0001"), "and nothing else"
    assert warned in running.outcome(with_lr(settings, 1e-4), ended), "whoever started it is told"
    assert not [line for line in running.outcome(settings, ended) if "began with" in line]
    assert [v.step for v in list_versions(settings)][:2] == [0, 4]
    assert len(trained(settings)) == len(set(trained(settings)))


def with_lr(settings: Settings, lr: float) -> Settings:
    policy = settings.policies["tab"]
    other = policy.model_copy(update={"train": policy.train.model_copy(update={"lr": lr})})
    return settings.model_copy(update={"policies": {"tab": other}})


def die_after_base(plain: Any, die: Any) -> Any:
    def register(c: Any, version: Version, **rest: Any) -> None:
        if version.id == 0:
            plain(c, version, **rest)
        else:
            die()

    return register


def release_lease(settings: Settings) -> None:
    """As if the run's process had died."""
    connection = sqlite3.connect(settings.home / "onlinerl.db")
    connection.execute("UPDATE runs SET heartbeat_at = 0")
    connection.commit()
    connection.close()


def test_lost_checkpoints_fall_back_to_the_last_version(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    fill(settings, 300)
    plain = Learner.step

    class Killed(BaseException):
        pass

    def step(self: Learner, batch: Any, advantage: Any, bands: Any, number: int) -> dict[str, float]:
        if number == 6:
            raise Killed
        return plain(self, batch, advantage, bands, number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", step)
        patch.setattr(running, "_end", lambda *_: None)
        with pytest.raises(Killed):
            train(settings, "tab")
    shutil.rmtree(settings.home / "runs" / "1" / "checkpoints")
    release_lease(settings)
    train(settings, "tab")
    assert events(settings, kind="resume")[0]["batch"] == 4
    assert len(trained(settings)) == len(set(trained(settings)))


def test_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    for batch in (1, 2, 3):
        checkpoints.save(
            batch, {"w": torch.full((2,), float(batch))}, {"w/step": torch.tensor(1.0)}, {"n": batch}, 1
        )
    assert checkpoints.batches() == [1, 2, 3], "the last two, and the pinned one"
    checkpoints.save(4, {"w": torch.zeros(2)}, {}, {"n": 4})
    assert checkpoints.batches() == [3, 4]
    (tmp_path / "c" / ".00000005.new").mkdir()  # what a kill leaves
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.batch, latest.state["n"]) == (4, 4)
    checkpoints.amend(4, {"n": 5})
    assert checkpoints.read(4).state == {"n": 5}
    checkpoints.save(6, {"w": torch.zeros(2)}, {}, {"n": 6})
    assert not list((tmp_path / "c").glob(".*"))


# ------------------------------------------------------------------------------------------- guards


def assert_failed(settings: Settings, words: str, versions_made: int = 0) -> None:
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            run = runs.list_(c, "tab")[-1]
            left = interactions.counts(c, policy="tab").waiting
    finally:
        database.close()
    assert run.state is RunState.FAILED
    assert words in run.message
    made = list_versions(settings)
    assert len(made) == 1 + versions_made
    assert made[0].state is VersionState.LIVE
    assert left, "what no version learned from is free again"


def test_nan_never_reaches_a_version(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(settings, 100)
    plain = torch.autograd.backward

    def poisoned(loss: Any, *rest: Any, **named: Any) -> None:
        plain(loss * float("nan"), *rest, **named)

    monkeypatch.setattr(torch.autograd, "backward", poisoned)
    with pytest.raises(GuardTripped, match="not a number"):
        train(settings, "tab")
    assert_failed(settings, "not a number")


def test_learning_rate_a_hundred_times_too_high(model: Path, tmp_path: Path) -> None:
    settings = settings_for(
        model, tmp_path / "home", "policies.tab.train.lr=0.3", "policies.tab.train.guards.kl=0.1"
    )
    fill(settings, 200)
    with pytest.raises(GuardTripped, match=r"guards\.|silence\."):
        train(settings, "tab")
    assert_failed(settings, "guards.")


def test_a_batch_that_is_not_full_earns_its_share_of_a_step(model: Path, tmp_path: Path) -> None:
    """Adam's step does not shrink with the evidence: three verdicts must not move the weights like 32."""

    def moved(name: str, verdicts: int, *more: str) -> float:
        settings = settings_for(model, tmp_path / name, "policies.tab.train.guards.kl=100", *more)
        fill(settings, verdicts, taste=lambda _: Verdict.ACCEPTED)
        assert train(settings, "tab").state is RunState.FINISHED
        (step,) = events(settings, kind="version")
        return float(step["kl"])

    few = moved("few", 3, "policies.tab.train.warmup=0")
    full = moved("full", 3, "policies.tab.train.warmup=0", "policies.tab.train.batch=3")
    assert 0 < few < full / 4
    # and neither is the first step of an optimiser that rises over a hundred as large as the hundredth
    risen = moved("risen", 3, "policies.tab.train.batch=3", "policies.tab.train.warmup=100")
    assert 0 < risen < full / 100


def test_policy_that_falls_silent_is_halted(model: Path, tmp_path: Path) -> None:
    """Everything shown is rejected, so silence pays. The floor ends it, and the old version stays."""
    settings = settings_for(model, tmp_path / "home", "policies.tab.train.silence.step=0", *SILENCING)
    fill(settings, 600, taste=lambda _: Verdict.REJECTED)
    with pytest.raises(GuardTripped, match=r"silence\.floor"):
        train(settings, "tab")
    assert_failed(settings, "silence.floor")
    last = events(settings, kind="step")[-1]
    assert last["show"] < last["show_floor"] < events(settings, kind="step")[0]["show"]


def test_multiplier_holds_the_floor(model: Path, tmp_path: Path) -> None:
    """The same, with the multiplier at work: it grows and the show rate comes back over its floor."""
    home = tmp_path / "home"
    settings = settings_for(
        model,
        home,
        *SILENCING,
        "policies.tab.train.silence.step=20",
        "policies.tab.train.silence.patience=100",
    )
    fill(settings, 600, taste=lambda _: Verdict.REJECTED)
    train(settings, "tab")
    steps = events(settings, kind="step")
    assert max(one["multiplier"] for one in steps) > 0
    assert any(one.get("violations") for one in steps)
    assert steps[-1]["show"] > min(one["show"] for one in steps)


# ------------------------------------------------------------------------------------------- wishes


def background(settings: Settings) -> tuple[threading.Thread, list[Run]]:
    """A following run on a thread of this process."""
    ended: list[Run] = []
    thread = threading.Thread(target=lambda: ended.append(train(settings, "tab", follow=True)), daemon=True)
    thread.start()
    return thread, ended


def steps_of(settings: Settings) -> int:
    log = settings.home / "runs" / "1" / "log.jsonl"
    return log.read_text().count('"event": "step"') if log.exists() else 0


def test_second_run_names_the_first_which_ends_its_step_on_a_signal(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings, 40)
    process = start(settings, "--follow")
    try:
        wait_for(lambda: steps_of(settings) == 2)
        monkeypatch.setenv("ONLINERL_SETTINGS", settings.model_dump_json())
        other = CliRunner().invoke(main, ["--policy", "tab"])
        assert other.exit_code == 1
        assert "onlinerl: run 1 of tab is running" in other.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopped after 2 steps: SIGTERM received" in out
    assert list_versions(settings)[-1].step == 2, "what was trained is a version"


def test_following_run_pauses_goes_on_and_stops_when_asked(settings: Settings) -> None:
    fill(settings, 40)
    thread, ended = background(settings)
    database = Database.open(settings.database_url)

    def ask(wish: str) -> None:
        with database.write() as c:
            runs.wish(c, "tab", 1, wish)

    def state() -> RunState:
        with database.read() as c:
            return runs.get(c, "tab", 1).state

    try:
        wait_for(lambda: steps_of(settings) == 2)
        ask("pause")
        wait_for(lambda: state() is RunState.PAUSED)
        fill(settings, 40, seed=1)
        time.sleep(0.3)
        assert steps_of(settings) == 2
        ask("")
        wait_for(lambda: steps_of(settings) == 4)
        ask("stop")
        thread.join(30)
        assert not thread.is_alive()
        assert (ended[0].state, ended[0].message, ended[0].step) == (RunState.STOPPED, "asked to stop", 4)
        assert list_versions(settings)[-1].step == 4
        claimed = [f"{row['id']}/0" for row in rows(settings) if row["use"] == "claimed"]
        assert Counter(trained(settings)) == Counter(claimed), (
            "the part of a batch that waited was given back"
        )
    finally:
        database.close()


def test_rollback_stops_the_run_and_takes_its_work_back(settings: Settings) -> None:
    fill(settings, 80)
    thread, ended = background(settings)
    database = Database.open(settings.database_url)
    try:
        wait_for(lambda: len(list_versions(settings)) > 1)
        with database.write() as c:
            versions.promote(c, "tab", versions.list_(c, "tab")[-1].id, actor="test")
        fill(settings, 40, seed=5)
        wait_for(lambda: steps_of(settings) >= 6)
        with database.write() as c:
            versions.rollback(c, "tab", actor="test")
        thread.join(30)
        assert not thread.is_alive()
        assert ended[0].state is RunState.STOPPED
        after = list_versions(settings)
        assert after[0].state is VersionState.LIVE
        assert after[-1].step == 4, "the steps after the one taken back became no version"
        assert sum(row["use"] == "claimed" for row in rows(settings)) == 4 * 16
    finally:
        database.close()


def test_promoted_version_becomes_the_reference_of_the_kl(settings: Settings) -> None:
    fill(settings, 80)
    thread, _ = background(settings)
    database = Database.open(settings.database_url)
    try:
        wait_for(lambda: len(list_versions(settings)) > 1)
        with database.write() as c:
            versions.promote(c, "tab", versions.list_(c, "tab")[-1].id, actor="test")
        fill(settings, 80, seed=5)
        wait_for(lambda: steps_of(settings) >= 6)
        with database.write() as c:
            runs.wish(c, "tab", 1, "stop")
        thread.join(30)
        kl = {one["batch"]: one["kl"] for one in events(settings, kind="step")}
        assert kl[6] < kl[4], "the distance starts anew at the promoted version"
    finally:
        database.close()


def told(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run of the command says."""
    monkeypatch.setenv("ONLINERL_SETTINGS", settings.model_dump_json())
    done = CliRunner().invoke(main, ["--policy", "tab"])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_says_what_came_of_it_and_what_to_do_next(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = told(settings, monkeypatch)
    assert "after 0 steps" in nothing
    assert "answers must be asked for and rated first" in nothing
    fill(settings, 4, temperature=0.1)
    cold = told(settings, monkeypatch)
    assert "answers sampled below train.temperature_floor" in cold
    fill(settings, 8, seed=1)
    made = told(settings, monkeypatch)
    assert "it made tab@1" in made
    assert "`onlinerl versions promote 1`" in made
    assert "runs start from tab@0" in made
    folder = settings.home / "runs" / "3"
    assert f"its numbers are in {folder / 'log.jsonl'}" in made
    assert f"`tensorboard --logdir {folder}`" in made
    assert "its numbers" not in nothing


def test_wrong_settings_exit_with_two(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setenv("ONLINERL_SETTINGS", '{"policies": {"tab": {"train": {"speed": 1}}}}')
    wrong = CliRunner().invoke(main, ["--policy", "tab"])
    assert (wrong.exit_code, "speed" in wrong.stderr) == (2, True)
    monkeypatch.setenv("ONLINERL_SETTINGS", settings.model_dump_json())
    unknown = CliRunner().invoke(main, ["--policy", "chat"])
    assert (unknown.exit_code, unknown.stderr) == (2, "onlinerl: there is no policy 'chat'; there are tab\n")


# ---------------------------------------------------------------------------------------- small parts


def test_staleness_counts_generations_not_ids(settings: Settings) -> None:
    fill(settings, 1)
    database = Database.open(settings.database_url)

    def version(id: int, parent: int) -> Version:
        return Version("tab", id, VersionState.CANDIDATE, parent, None, 0.0, "", str(id))

    try:
        with database.write() as c:
            for id, parent in ((5, 0), (6, 5), (9, 6)):
                versions.register(c, version(id, parent))
            assert lineage(c, versions.get(c, "tab", 9)) == [9, 6, 5, 0]
    finally:
        database.close()
    assert oldest([9, 6, 5, 0], 2) == 5
    assert oldest([9, 6, 5, 0], 0) == 9
    assert oldest([6, 0], 2) == 0


def test_tau_is_set_from_what_was_served(settings: Settings) -> None:
    fill(settings, 200)
    database = Database.open(settings.database_url)
    try:
        with database.read() as c:
            counts = interactions.counts(c, policy="tab")
            policy = settings.policies["tab"]
            found = interactions.tau(c, policy="tab", settings=policy)
            assert found == min(0.25, 0.5 * counts.accepted / counts.opportunities)
            fixed = policy.model_copy(update={"rewards": policy.rewards.model_copy(update={"tau": 0.1})})
            assert interactions.tau(c, policy="tab", settings=fixed) == 0.1
            raw = policy.model_copy(update={"train": policy.train.model_copy(update={"mode": "raw"})})
            assert interactions.tau(c, policy="tab", settings=raw) == 0.0
    finally:
        database.close()


def test_threads_default_to_half_of_the_cores(settings: Settings) -> None:
    train_settings = settings.policies["tab"].train
    assert threads_of(train_settings) == 1
    default = threads_of(train_settings.model_copy(update={"threads": None}))
    assert default == max(1, len(os.sched_getaffinity(0)) // 2)
