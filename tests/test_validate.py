"""Offline validation: the whole loop on a tiny random model, its guards, and its arithmetic by hand."""

from __future__ import annotations

import asyncio
import doctest
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onlinerl.config import Engine, Settings, Validation, load_settings
from onlinerl.datasets.fim import FimPrompt, is_test
from onlinerl.datasets.users import TASTES
from onlinerl.errors import JudgeError, RunBusy, RunError, SettingsError, VersionNotLoaded
from onlinerl.learning.advantages import advantages
from onlinerl.learning.batches import PolicyModel, pack
from onlinerl.learning.judges import Judge, Judgement, ReferenceJudge, estimate
from onlinerl.records import Finish, FinishReason, Generation, Sample, Token, Verdict
from onlinerl.validate import estimates, evaluate
from onlinerl.validate import report as report_page
from onlinerl.validate.__main__ import main
from onlinerl.validate.course import Course, check
from onlinerl.validate.engine import LocalEngine, int8_round_trip
from onlinerl.validate.estimates import Estimate, ratio
from onlinerl.validate.evaluate import Scores
from onlinerl.validate.ground import laid
from onlinerl.validate.raters import JudgeRater, UserRater
from onlinerl.validate.report import Report
from onlinerl.validate.rollouts import Answer, Rollouts
from onlinerl.validate.run import costs, run
from tests.fims import fim_model, offline
from tests.judge_endpoint import Endpoint, failed, serving

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offline")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fim_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine(model: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(Engine(), batch=8, threads=1)
    made.read(0, model)
    yield made
    made.stop()


def answer(text: str, *, middle: str = "return x + 1", reason: FinishReason = FinishReason.STOP) -> Answer:
    return Answer(
        id="a",
        index=0,
        prompt=FimPrompt("def f(x):\n    ", "\n", middle, "f.py", "python"),
        asked="",
        prompt_ids=(257, 1, 258, 2, 259),
        ids=(*range(len(text)), 256),
        logprobs=(-1.0,) * (len(text) + 1),
        completion=text,
        reason=reason,
        version=0,
        temperature=1.0,
        top_p=1.0,
    )


# -------------------------------------------------------------------------------------------- engine


def request(seed: int, version: int = 0, **changes: Any) -> Generation:
    made = Generation(
        id=f"g{seed}", policy="tab", version=version, prompt_ids=(257, 65, 66, 258, 67, 259), max_tokens=8,
        seed=seed, stop_ids=(256,),
    )  # fmt: skip
    return replace(made, **changes)


def test_a_batch_is_sampled_as_single_requests_are(engine: LocalEngine) -> None:
    async def one(seed: int) -> list[Token | Finish]:
        return [item async for item in engine.generate(request(seed))]

    batch = engine.sample([request(seed) for seed in range(20)])
    assert len({rollout.ids for rollout in batch}) > 15
    for seed, rollout in enumerate(batch):
        *tokens, finish = asyncio.run(one(seed))
        assert tuple(token.id for token in tokens if isinstance(token, Token)) == rollout.ids
        logprobs = [token.logprob for token in tokens if isinstance(token, Token)]
        assert logprobs == pytest.approx(rollout.logprobs, abs=1e-4)
        assert finish == Finish(rollout.reason)


def test_the_engines_logprobs_are_the_trainers(engine: LocalEngine, model: Path) -> None:
    rollouts = Rollouts(engine, model, "tab", seed=1)
    prompts = [FimPrompt(f"x{n} = ", "\n", "1", "a.py", "python") for n in range(6)]
    answers = rollouts.answers(prompts, 0, temperature=0.7, top_p=1.0, max_tokens=9, group=2)
    assert [one.index for one in answers] == [0, 1] * 6
    assert len({one.id for one in answers}) == 6
    samples = [one.sample("tab", user="", verdict=Verdict.ACCEPTED, source="native") for one in answers]
    policy = PolicyModel.load(model, torch.device("cpu"), torch.float32)
    made = pack(samples, range(len(samples)), policy.device, padded=policy.padded)
    with torch.no_grad():
        scored = policy.score(made).logprobs
    said = [logprob for one in samples for logprob in one.behavior_logprobs]
    assert scored.tolist() == pytest.approx(said, abs=1e-3)


def test_weights_from_memory_are_a_version_and_later_changes_of_theirs_are_not(
    engine: LocalEngine, model: Path
) -> None:
    policy = PolicyModel.load(model, torch.device("cpu"), torch.float32)
    engine.put(7, policy.weights())
    requests = [request(seed) for seed in range(8)]
    before = engine.sample(requests)
    assert engine.sample([replace(one, version=7) for one in requests]) == before
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert engine.sample([replace(one, version=7) for one in requests]) == before
    engine.put(8, policy.weights())
    assert engine.sample([replace(one, version=8) for one in requests]) != before
    engine.forget(7)
    with pytest.raises(VersionNotLoaded):
        engine.sample([request(0), request(1, version=7)])
    assert engine.sample(requests) == before  # nothing of the refused batch is in the way


def test_int8_keeps_each_row_within_half_a_step() -> None:
    weight = torch.randn(6, 40) * torch.tensor([1.0, 10.0, 0.1, 1.0, 1.0, 0.0])[:, None]
    rounded = int8_round_trip(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((rounded - weight).abs() <= step / 2 + 1e-7).all())
    assert not torch.equal(rounded, weight)
    wide = int8_round_trip(torch.randn(1, 5000))
    assert 100 < len(set(wide[0].tolist())) <= 255


def test_a_quantised_engine_says_other_logprobs(model: Path) -> None:
    policy = PolicyModel.load(model, torch.device("cpu"), torch.float32)
    said = []
    for quantise in (False, True):
        engine = LocalEngine(Engine(), batch=8, threads=1, quantise=quantise)
        try:
            engine.read(0, model)
            engine.put(1, policy.weights())
            said.append([one.logprobs for one in engine.sample([request(s, version=1) for s in range(4)])])
        finally:
            engine.stop()
    assert said[0] != said[1]
    assert said[0][0][0] == pytest.approx(said[1][0][0], abs=0.5)


# ------------------------------------------------------------------------------------------ raters


class Failing:
    """A judge that fails on every `each`-th completion."""

    name = "failing"

    def __init__(self, each: int = 1) -> None:
        self.each = each

    async def judge(self, pairs: Sequence[tuple[FimPrompt, str]]) -> list[Judgement]:
        return [
            Judgement(None, reason="503 from the endpoint") if n % self.each == 0 else Judgement(8.0)
            for n, _ in enumerate(pairs)
        ]


def test_what_a_judge_fails_on_is_masked_and_counted() -> None:
    rater = JudgeRater(Failing(each=4), "tab")
    samples = asyncio.run(rater.rate([answer("x")] * 8))
    assert [(one.score, one.verdict) for one in samples] == [(0.8, Verdict.ACCEPTED)] * 6
    assert rater.left_out == {"judge failed": 2}
    with pytest.raises(JudgeError, match=r"failed on 4 of 4 completions.*503 from the endpoint"):
        asyncio.run(JudgeRater(Failing(), "tab").rate([answer("x")] * 4))


def rated(count: int = 400, text: str = "return x + 1", **noise: float) -> tuple[UserRater, list[Verdict]]:
    rater = UserRater(Validation(tastes=("line",), users=2, **noise), "tab")
    return rater, [one.verdict for one in asyncio.run(rater.rate([answer(text)] * count))]


def test_users_follow_their_taste_and_the_noise_its_shares() -> None:
    _, verdicts = rated()
    assert 0.95 < verdicts.count(Verdict.ACCEPTED) / 400 < 1.0  # 2 % of `line` is noise of its own
    _, verdicts = rated(noise_flip=0.2)
    assert 0.73 < verdicts.count(Verdict.ACCEPTED) / 400 < 0.87
    rater, verdicts = rated(noise_missing=0.5)
    assert 160 < len(verdicts) < 240
    assert rater.left_out["not rated"] == 400 - len(verdicts)
    _, verdicts = rated(noise_timeout=0.5)
    assert 160 < verdicts.count(Verdict.TIMEOUT) < 240
    assert len(verdicts) == 400


def test_silence_is_drawn_at_the_label_rate_of_the_shown() -> None:
    rater = UserRater(Validation(noise_missing=0.5), "tab")
    asyncio.run(rater.rate([answer("return x")] * 200))
    silent = asyncio.run(rater.rate([answer("")] * 200))
    assert {one.verdict for one in silent} == {Verdict.SILENT}
    assert 70 < len(silent) < 130
    assert rater.left_out["surplus silent"] == 200 - len(silent)


def test_an_answer_that_only_used_its_tokens_up_is_not_silent() -> None:
    assert answer("").silent
    assert not answer("", reason=FinishReason.LENGTH).silent


# --------------------------------------------------------------------------------------- evaluation


def test_a_ratio_and_its_error_by_hand() -> None:
    # R = 6/4; residuals per file: a 1−1.5 + 2−1.5 = 0, b 3 − 3 = 0 … first cluster (a): 1, 2; second (b): 3
    # with weights 1, 1, 2: e_a = 3 − 3 = 0, e_b = 3 − 3 = 0
    assert ratio([1, 2, 3], [1, 1, 2], ["a", "a", "b"]) == Estimate(1.5, 0.0)
    # mean of 0, 1, 1, 2 in three clusters: R = 1; e = −1 + 0, 0, 1 → variance = 3/2 · 2 / 16
    one = ratio([0, 1, 1, 2], [1] * 4, ["a", "a", "b", "c"])
    assert one.mean == 1.0
    assert one.error == pytest.approx(math.sqrt(3 / 2 * 2 / 16))
    assert (one.low, one.high) == pytest.approx((1 - 1.96 * one.error, 1 + 1.96 * one.error))
    assert math.isnan(ratio([], [], []).mean)
    assert math.isnan(ratio([1.0], [1.0], ["a"]).error)


def test_rewards_rates_and_gains_of_scores() -> None:
    prompts = tuple(FimPrompt("", "", "x", f"{n}.py", "python") for n in range(4))
    before = Scores(prompts, {"accept": (0.5, 0.0, 1.0, 0.0), "shown": (1.0, 1.0, 1.0, 0.0)})
    after = Scores(prompts, {"accept": (1.0, 0.0, 1.0, 0.0), "shown": (1.0, 0.0, 1.0, 0.0)})
    assert before.rewards(0.25) == [0.25, -0.25, 0.75, 0.0]
    found = before.estimates(0.25)
    assert found["reward"].mean == pytest.approx(0.1875)
    assert found["accept_shown"].mean == pytest.approx(0.5)
    gain = after.gains(before, 0.25)["reward"]
    assert gain.mean == pytest.approx((0.5 + 0.25 + 0 + 0) / 4)
    assert gain.error < found["reward"].error
    with pytest.raises(ValueError, match="same prompts"):
        after.gains(Scores(prompts[:3], before.columns), 0.25)


def test_scores_of_answers() -> None:
    answers = [answer("return x + 1"), answer(""), answer("return (x")]
    judges: dict[str, Judge] = {"train": ReferenceJudge(), "report": Failing()}
    found = asyncio.run(evaluate.score(answers, [TASTES["similar"]], judges, examples=1))
    assert found.columns["exact"] == (1.0, 0.0, 0.0)
    assert found.columns["shown"] == (1.0, 0.0, 1.0)
    assert found.columns["accept"][0] > 0.9
    assert found.columns["accept"][1] == 0.0
    assert found.columns["parses"] == (1.0, 1.0, 0.0) or found.columns["parses"] == (1.0, 0.0, 0.0)
    assert found.columns["judge/train"][0] == pytest.approx(10.0)
    assert all(math.isnan(score) for score in found.columns["judge/report"])
    assert evaluate.as_json(found.estimates(0.1))["judge/report"]["mean"] is None
    assert found.examples == (("return x + 1", "return x + 1"),)


# ---------------------------------------------------------------------------------------- the course


def report(settings: Settings) -> dict[str, Any]:
    tree = run(settings, quiet=True)
    folder = settings.home / "validation" / settings.validation.name
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(tree))
    return tree


def test_the_whole_course(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = base / "saved"
    settings = offline(
        base,
        f"validation.save={saved}",
        "validation.evaluate_every=3",
        "validation.forgetting_prompts=8",
        "policies.tab.train.version_every=2",
    )
    tree = run(settings)
    assert "reward per opportunity" in capsys.readouterr().out
    assert tree["stopped_by"] is None
    assert [stage["name"] for stage in tree["stages"]] == ["base", "RL"]
    # 32 completions say what τ is, six batches are learned from
    assert (tree["steps"], tree["completions"]) == (6, 128)
    assert 0 < tree["tau"] <= 0.25
    assert [point["step"] for point in tree["curve"]] == [0, 3, 6]
    for how in ("greedy", "sampled"):
        for stage in tree["stages"]:
            for name in ("judge/train", "judge/report", "accept", "shown", "reward", "similarity"):
                one = stage["metrics"][how][name]
                assert one["low"] <= one["mean"] <= one["high"]
    first, last = (stage["losses"]["left_to_right"] for stage in tree["stages"])
    assert first["tokens"] == last["tokens"] > 0
    assert first["mean"] != last["mean"]
    gain = tree["stages"][1]["gains"]["sampled"]["reward"]
    difference = (
        tree["stages"][1]["metrics"]["sampled"]["reward"]["mean"]
        - tree["stages"][0]["metrics"]["sampled"]["reward"]["mean"]
    )
    assert gain["mean"] == pytest.approx(difference)
    folder = settings.home / "validation" / "offline"
    assert {"report.md", "curve.png", "log.jsonl", "tensorboard"} <= {one.name for one in folder.iterdir()}
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 6
    # published after each step, a version every second one: never older than the version before
    assert {step["staleness"] for step in steps} == {0.0}
    # the saved folder is a model like any other, and another one than the base
    old, new = load_file(base / "model" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[name], new[name]) for name in old)
    others = torch.cat([(old[name] != new[name]).flatten() for name in old])
    (told,) = [event for event in events if event["event"] == "saved"]
    assert told["changed"] == pytest.approx(others.double().mean().item())
    again = offline(base, f"policies.tab.model={saved}", "validation.completions=16", "validation.name=again")
    found, expected = report(again)["stages"][0]["metrics"], tree["stages"][1]["metrics"]
    for how in ("greedy", "sampled"):  # but for the rounding to the base's number format
        assert found[how]["accept"]["mean"] == pytest.approx(expected[how]["accept"]["mean"], abs=0.1)


def test_what_cannot_be_written_is_told_and_leaves_nothing_half_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    settings = offline(base, f"validation.save={tmp_path / 'file' / 'saved'}", "validation.name=unsaved")
    with pytest.raises(SettingsError, match=r"validation\.save"):
        run(settings, quiet=True)
    assert not (settings.home / "validation" / "unsaved" / "log.jsonl").exists()  # told before it began
    with pytest.raises(RunError, match="Not a directory"):
        run(settings.model_copy(update={"home": tmp_path / "file"}), quiet=True)

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onlinerl.validate.save.save_file", full)
    saved = tmp_path / "saved"
    settings = offline(base, f"validation.save={saved}", "validation.completions=48")
    with pytest.raises(RunError, match=r"saved cannot be written.*No space left"):
        run(settings, quiet=True)
    assert {one.name for one in tmp_path.iterdir()} == {"file"}
    assert (settings.home / "validation" / "offline" / "report.json").exists()


def test_two_runs_of_one_name_do_not_mix(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = offline(base, "validation.completions=48")
    busy: list[str] = []

    def second(self: Course) -> Report:
        with pytest.raises(RunBusy, match=r"validation\.name"):
            run(settings, quiet=True)
        busy.append("told")
        raise KeyboardInterrupt

    monkeypatch.setattr(Course, "go", second)
    with pytest.raises(KeyboardInterrupt):
        run(settings, quiet=True)
    assert busy
    log = (settings.home / "validation" / "offline" / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["message"] == "interrupted"
    monkeypatch.undo()
    assert run(settings, quiet=True)["steps"]  # an interrupted run is in nobody's way


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number: int, middle: str = "aaaa", **more: str) -> dict[str, str]:
    return {"prefix": f"x{number} = ", "suffix": "\n", "middle": middle, "path": f"{number}.py", **more}


BAD = {
    "data without its columns": ("validation.data={bad}/columns.jsonl", "the columns are"),
    "data of another language": ("validation.languages=[cobol]", "for other languages"),
    "data of one file": ("validation.data={bad}/one.jsonl", "gives no"),
    "data that is no JSON": ("validation.data={bad}/broken.jsonl", "not JSON"),
    "a folder without code": ("validation.data={bad}/empty", "no Python file"),
    "data that is not there": ("validation.data={bad}/nowhere", "does not exist"),
    "held-out prompts that are not there": ("validation.test={bad}/nowhere.jsonl", "cannot be read"),
    "held-out prompts of files that are learned from": ("validation.test={bad}/learned.jsonl", "held out"),
    "answers that are too long": ("policies.tab.sampling.max_tokens=250", "leaves room"),
    "a model that is not there": ("policies.tab.model={bad}/nowhere", "neither a directory"),
    "a model that is no model": ("policies.tab.model={bad}/empty", "has no config.json"),
    "a model without markers": ("policies.tab.model={bad}/plain", "fill-in-the-middle markers"),
    "a model of broken weights": ("policies.tab.model={bad}/torn", "model.safetensors"),
    "layers that cannot be adapted": ("policies.tab.train.lora={rank: 2, targets: [nothing]}", "nothing"),
    "a larger model's file without columns": ("validation.warmstart.source={bad}/columns.jsonl", "must be a"),
    "a larger model's file of long texts": ("validation.warmstart.source={bad}/long.jsonl", "at most 10"),
    "a larger model's file that is not there": (
        "validation.warmstart.source={bad}/x",
        "a file that is there",
    ),
    "a reward that is not there": ("policies.tab.rewards.function=nowhere:f", "no module nowhere"),
    "a reward that fails": ("policies.tab.rewards.function=math:sqrt", "math:sqrt"),
    "a weight of nothing": ("policies.tab.rewards.weights={function: 1}", "no rewards.function"),
    "a taste that there is not": ("validation.tastes=[sweet]", "validation.tastes: no taste"),
    "a taste to report that there is not": ("validation.report_tastes=[sweet]", "report_tastes: no taste"),
    "a user that there is not": ("validation.user=me", "no user"),
    "a judge without an endpoint": ("validation.judge.kind=llm", "LLMASJUDGE_API_URL"),
    "a folder for the weights that is there": ("validation.save={bad}/empty", "exists already"),
    "a place for the weights that cannot be": ("validation.save={bad}/one.jsonl/saved", "cannot be made"),
    "a GPU that is not there": ("policies.tab.train.device=cuda", "sees no GPU"),
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Files that nothing can be done with."""
    place = tmp_path_factory.mktemp("bad")
    offline(base)  # makes model and code
    (place / "empty").mkdir()
    (place / "broken.jsonl").write_text("{")
    lines(place / "columns.jsonl", {"before": "x", "after": "y", "answer": "z"})
    lines(place / "one.jsonl", row(1))
    names = [f"m{number}.py" for number in range(24)]
    lines(place / "learned.jsonl", *(row(1, path=name) for name in names if not is_test(name)))
    lines(place / "long.jsonl", row(1, "a" * 99))
    for name in ("plain", "torn"):
        shutil.copytree(base / "model", place / name)
    tokenizer = json.loads((place / "plain" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if "fim" not in one["content"]]
    (place / "plain" / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = place / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return place


@pytest.fixture(scope="module")
def earlier(base: Path) -> Path:
    """The folder of a run that ended well."""
    settings = offline(
        base, "validation.name=earlier", "validation.completions=48", "validation.evaluate_every=1"
    )
    report(settings)
    return settings.home / "validation" / "earlier"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_used_costs_nothing_of_an_earlier_run(
    base: Path, bad: Path, earlier: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "a GPU that is not there":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LLMASJUDGE_API_URL", raising=False)
    before = contents(earlier)
    assert {"report.json", "report.md", "curve.png", "log.jsonl"} <= before.keys()
    override, said = BAD[what]
    settings = offline(base, "validation.name=earlier", override.replace("{bad}", str(bad)))
    with pytest.raises(SettingsError, match=re.escape(said)):
        run(settings, quiet=True)
    assert contents(earlier) == before


def test_a_file_of_grades_that_cannot_be_used_costs_nothing_either(
    tmp_path: Path, base: Path, earlier: Path
) -> None:
    judge = "validation.judge={kind: llm, url: 'http://127.0.0.1:9/v1', model: m}"
    settings = offline(base, judge).model_copy(update={"home": tmp_path})
    shutil.copytree(earlier, tmp_path / "validation" / "offline")
    (tmp_path / "validation" / "judge-scores.jsonl").mkdir()
    before = contents(tmp_path)
    with pytest.raises(SettingsError, match="cache"):
        run(settings, quiet=True)
    assert contents(tmp_path) == before


def test_a_missing_endpoint_costs_no_report(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMASJUDGE_API_URL", raising=False)
    settings = offline(base, "validation.judge.kind=llm", "validation.name=old")
    folder = settings.home / "validation" / "old"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    with pytest.raises(SettingsError, match="LLMASJUDGE_API_URL"):
        run(settings, quiet=True)
    assert (folder / "report.json").read_text() == "{}"


def test_the_same_seed_gives_the_same_course(base: Path) -> None:
    few = "validation.completions=64"
    first, second, third = (
        report(offline(base, f"validation.seed={seed}", f"validation.name=s{number}", few))
        for number, seed in enumerate((1, 1, 2))
    )
    assert first["stages"] == second["stages"]
    assert first["tau"] == second["tau"]
    assert first["stages"] != third["stages"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many held-out prompts were answered, call by call."""
    calls: list[int] = []
    answers = Rollouts.answers

    def counted(
        self: Rollouts, prompts: Sequence[FimPrompt], *rest: Any, seed: str = "", **named: Any
    ) -> Any:
        if seed:
            calls.append(len(prompts))
        return answers(self, prompts, *rest, seed=seed, **named)

    monkeypatch.setattr(Rollouts, "answers", counted)
    return calls


def test_weights_are_measured_once(base: Path, measured: list[int]) -> None:
    few = ("validation.evaluate_every=4", "validation.evaluate_prompts=8", "policies.tab.rewards.tau=0.1")
    tree = report(offline(base, *few, "validation.completions=96"))
    # the base, the curve after step 4 of 6, the end: each greedy and sampled
    assert measured == [24, 24, 8, 8, 24, 24]
    assert [point["step"] for point in tree["curve"]] == [0, 4, 6]
    measured.clear()
    tree = report(offline(base, *few, "validation.completions=96", "validation.evaluate_prompts=24"))
    assert tree["curve"][0]["metrics"] == tree["stages"][0]["metrics"]
    assert tree["curve"][-1]["metrics"] == tree["stages"][-1]["metrics"]
    measured.clear()
    tree = report(offline(base, *few, "validation.completions=1", "validation.forgetting_prompts=8"))
    assert measured == [24, 24]
    assert len(tree["curve"]) == 1
    first, last = tree["stages"]
    assert all(first[name] == last[name] for name in ("metrics", "losses", "examples"))
    assert last["gains"]["greedy"]["reward"]["mean"] == 0.0


def test_a_start_is_measured_once_for_runs_that_begin_alike(
    base: Path, tmp_path: Path, measured: list[int]
) -> None:
    def told(*overrides: str, starts: Path | None = tmp_path) -> dict[str, Any]:
        settings = offline(
            base,
            "validation.completions=32",
            "validation.evaluate_every=2",
            "validation.forgetting_prompts=4",
            *overrides,
        )
        measured.clear()
        tree = run(settings, quiet=True, starts=starts)
        names = ("stages", "curve", "tau", "tau_report", "steps", "completions", "left_out", "judges")
        return {name: tree[name] for name in names}

    plain = told(starts=None)
    assert told() == plain
    assert measured == [24, 24, 24, 24]
    assert told() == plain  # the start is read now, and nothing that follows is another
    assert measured == [24, 24]
    (kept,) = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    other = told("policies.tab.train.lr=1e-2")  # learns otherwise, begins alike
    assert other["stages"][0] == plain["stages"][0]
    assert other["stages"][-1] != plain["stages"][-1]
    assert [one.stat().st_mtime_ns for one in tmp_path.iterdir()] == [before]


def test_what_a_start_depends_on_and_what_not(base: Path, tmp_path: Path, measured: list[int]) -> None:
    def stage(*overrides: str, starts: Path | None = tmp_path) -> dict[str, Any]:
        few = ("validation.completions=1", "validation.forgetting_prompts=4")
        measured.clear()
        found: dict[str, Any] = run(offline(base, *few, *overrides), quiet=True, starts=starts)["stages"][0]
        return found

    plain = stage()
    assert measured == [24, 24]
    alike = (
        "policies.tab.train.batch=8",
        "policies.tab.train.lr=1",
        "policies.tab.train.seed=5",
        "policies.tab.rewards.tau=0.2",
        "validation.users=3",
        "validation.noise_flip=0.3",
        "validation.train_prompts=20",
    )
    assert stage(*alike) == plain
    assert measured == []
    assert stage(*alike, starts=None) == plain
    assert len(list(tmp_path.iterdir())) == 1
    apart = (
        "validation.seed=1",
        "validation.tastes=[long]",
        "validation.report_tastes=[short]",
        "validation.report_temperature=0.5",
        "validation.test_prompts=23",
        "validation.data_seed=7",
        "validation.forgetting_prompts=3",
        "validation.quantise=int8",
        "validation.report_judge.kind=reference",
        "policies.tab.sampling.max_tokens=9",
        "policies.tab.sampling.top_p=0.9",
        "policies.tab.engine.dtype=bfloat16",
        "policies.tab.train.dtype=bfloat16",
        f"policies.tab.model={shutil.copytree(base / 'model', base / 'other')}",
    )
    for number, override in enumerate(apart, 2):
        stage(override)
        assert len(measured) == 2
        assert len(list(tmp_path.iterdir())) == number, override
    assert not [one for one in tmp_path.iterdir() if one.suffix != ".json"]


def test_a_start_that_a_judge_failed_on_is_not_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = offline(base, "validation.completions=32")
    good = run(settings, quiet=True)
    monkeypatch.setattr("onlinerl.validate.ground.make_judge", lambda settings, cache: Failing(each=5))
    assert run(settings, quiet=True, starts=tmp_path)["judge_faults"]
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert run(settings, quiet=True, starts=tmp_path)["stages"] == good["stages"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policies.tab.train.lr=1.0", "policies.tab.train.guards.kl=0.05"), "guards.kl"),
        (("policies.tab.rewards.weights={verdict: -1}",), "contradict the verdicts"),
        (("policies.tab.trust.owner=false", "validation.users=1"), "trust.dominance"),
    ],
)
def test_a_guard_ends_the_course_and_the_last_good_version_is_kept(
    base: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    saved = tmp_path / "saved"
    settings = offline(base, f"validation.save={saved}", "validation.name=guarded", *overrides)
    tree = report(settings)
    assert said in tree["stopped_by"]
    assert tree["stages"][-1]["step"] == 0
    assert_saved_unchanged(settings, base)
    assert tree["stages"][-1]["metrics"] == tree["stages"][0]["metrics"]


def assert_saved_unchanged(settings: Settings, base: Path) -> None:
    """What was saved is the model that the run began with, and the log says so."""
    saved = settings.validation.save
    assert saved is not None
    old, new = load_file(base / "model" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert all(torch.equal(old[name], new[name]) for name in old)
    log = settings.home / "validation" / settings.validation.name / "log.jsonl"
    *_, told, warning = map(json.loads, log.read_text().splitlines())
    assert (told["event"], told["changed"]) == ("saved", 0.0)
    assert warning["event"] == "warning"
    assert f"{saved} has the very weights of" in warning["text"]


def test_learning_that_rounding_swallows_is_told(base: Path, tmp_path: Path) -> None:
    settings = offline(
        base,
        f"validation.save={tmp_path / 'saved'}",
        "validation.name=swallowed",
        "policies.tab.train.lr=1e-44",
    )
    assert report(settings)["steps"] > 0
    assert_saved_unchanged(settings, base)


def test_a_number_that_is_none_never_reaches_the_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = offline(base, f"validation.save={tmp_path / 'saved'}", "policies.tab.train.version_every=2")
    whole: Callable[..., list[float]] = advantages
    calls = []

    def broken(*arguments: Any, **named: Any) -> list[float]:
        calls.append(1)
        found = whole(*arguments, **named)
        return [math.nan, *found[1:]] if len(calls) == 4 else found

    monkeypatch.setattr("onlinerl.learning.update.advantages", broken)
    tree = report(settings)
    assert "not a number" in tree["stopped_by"]
    assert (tree["steps"], tree["stages"][-1]["step"]) == (3, 2)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.values())


def picky(sample: Sample) -> float:
    """A reward function that passes its check and fails on all that a validation samples."""
    if sample.project == "validation":
        raise ValueError("no")
    return 0.0


def test_a_batch_without_any_reward_is_no_step_and_then_a_guard_ends_the_course(base: Path) -> None:
    tree = report(
        offline(base, "policies.tab.rewards.function=tests.test_validate:picky", "policies.tab.train.batch=4")
    )
    assert "8 of the last 8 samples got no reward" in tree["stopped_by"]
    assert tree["left_out"] == {"reward function failed": 8}
    assert tree["stages"][-1]["metrics"] == tree["stages"][0]["metrics"]


def test_a_judge_that_always_fails_ends_the_course(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlinerl.validate.ground.make_judge", lambda settings, cache: Failing())
    settings = offline(base, "validation.rater=judge", "validation.evaluate_every=1")
    tree = report(settings)
    assert "failed on 16 of 16 completions" in tree["stopped_by"]
    events = (settings.home / "validation" / "offline" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["event"] for line in events].count("point") == 1
    assert tree["steps"] == 0
    assert tree["left_out"] == {"judge failed": 16}
    assert tree["stages"][-1]["metrics"]["greedy"]["judge/train"]["mean"] is None
    assert "503 from the endpoint" in tree["judge_faults"]["report"]


async def test_an_llm_judge_that_refuses_the_key_ends_the_course_and_its_price_is_told_first(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLMASJUDGE_API_KEY", raising=False)
    async with serving(Endpoint(rest=lambda body: failed(401, "wrong key"))) as endpoint:
        settings = offline(
            base,
            "validation.rater=judge",
            f"validation.judge={{kind: llm, url: '{endpoint.url}', model: m}}",
        )
        tree = await asyncio.to_thread(report, settings)
    assert "401" in tree["stopped_by"]
    assert tree["steps"] == 0
    # 128 to learn from, and 24 held-out prompts, greedy and sampled, before and after
    assert "judge to train: 224 calls" in capsys.readouterr().err


def test_the_price_is_that_of_the_very_prompts(base: Path, tmp_path: Path) -> None:
    rows = [row(number, "y = " + "a" * (2000 * (number % 2))) for number in range(60)]
    settings = offline(
        base,
        f"validation.data={lines(tmp_path / 'long.jsonl', *rows)}",
        "validation.rater=judge",
        "validation.completions=96",
        "validation.evaluate_every=2",
        "validation.evaluate_prompts=2",
        "validation.judge={kind: llm, url: 'http://127.0.0.1:9/v1', model: m}",
        "validation.report_judge={kind: llm, url: 'http://127.0.0.1:9/v1', model: m}",
    )
    with laid(settings, base / "model", "tab") as ground:
        train, report = costs(settings, ground)
        test = [len(one.prefix + one.suffix + one.middle) for one in ground.test]
        learn = [len(one.prefix + one.suffix + one.middle) for one in ground.train]
    assert max(test) > 2000 > 100 > min(test)
    # before and after on all prompts, and after steps 2, 4 and 6 on two of them, each greedy and sampled
    held = 4 * sum(test) + 6 * sum(test[:2])
    pairs = 4 * len(test) + 6 * 2
    answer = 10 * 3.5  # sampling.max_tokens
    words = estimate(settings.validation.judge, 1, 0).input_tokens
    for told, characters, calls in (
        (train, held + 96 * sum(learn) / len(learn), pairs + 96),
        (report, held, pairs),
    ):
        said = re.search(r"([\d,]+) calls, about ([\d,]+) tokens in", told)
        assert said is not None
        assert said[1].replace(",", "") == str(calls)
        expected = (characters + calls * answer) / 3.5 + calls * words
        assert float(said[2].replace(",", "")) == pytest.approx(expected, rel=0.001)


SECRET = "sk-0123456789"


async def test_a_key_in_an_address_is_nowhere_in_what_a_run_leaves(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLMASJUDGE_API_KEY", raising=False)
    said = f"no account has the key {SECRET}, at http://127.0.0.1/v1?api_key={SECRET}"
    async with serving(Endpoint(rest=lambda body: failed(400, said))) as endpoint:
        url = endpoint.url.replace("//", f"//me:{SECRET}@") + f"?api_key={SECRET}"
        settings = offline(
            base,
            "validation.rater=judge",
            f"validation.judge={{kind: llm, url: '{url}', model: m}}",
            f"validation.report_judge={{kind: llm, url: '{url}', model: m}}",
            f"validation.save={tmp_path / 'saved'}",
        ).model_copy(update={"home": tmp_path})
        tree = await asyncio.to_thread(report, settings)
    assert endpoint.bodies
    assert SECRET not in json.dumps(tree)
    assert tree["settings"]["validation"]["judge"]["url"].endswith("/v1?api_key=***")
    assert "no account has the key ***" in tree["stopped_by"]
    left = contents(tmp_path)
    assert any("events.out.tfevents" in name for name in left)
    assert [name for name, data in left.items() if SECRET.encode() in data] == []
    assert SECRET not in "".join(capfd.readouterr())


async def test_a_judge_that_hangs_ends_the_course_within_two_deadlines(base: Path) -> None:
    async with serving(Endpoint(delay=60)) as endpoint:
        judge = f"kind: llm, url: '{endpoint.url}', model: m, timeout: 30, deadline: 0.5, concurrency: 4"
        settings = offline(
            base,
            "validation.rater=judge",
            f"validation.judge={{{judge}}}",
            "validation.evaluate_every=1",
            "validation.warmstart={source: accepted, completions: 16}",
        )
        tree = await asyncio.to_thread(report, settings)
    assert "has not answered once, 8 completions were given up in a row" in tree["stopped_by"]
    assert "judge.deadline" in tree["stopped_by"]
    assert len(endpoint.bodies) == 8  # of all that the stages and the learning would have asked
    assert tree["steps"] == 0
    assert tree["stages"][-1]["metrics"]["sampled"]["judge/report"]["mean"] is not None


def test_groups_with_a_judge(base: Path) -> None:
    tree = report(
        offline(base, "validation.rater=judge", "validation.group=4", "policies.tab.train.mode=group")
    )
    assert (tree["steps"], tree["tau"]) == (8, 0.0)
    assert tree["judges"] == {"train": "reference", "report": "similarity"}


def test_offline_learning_from_the_starts_own_completions(base: Path) -> None:
    with pytest.raises(SettingsError, match=r"raise train\.staleness \(2\) to 7"):
        check(offline(base, "validation.publish_every=0", "policies.tab.train.version_every=1"))
    settings = offline(
        base,
        "validation.publish_every=0",
        "policies.tab.train.version_every=2",
        "policies.tab.train.staleness=4",
    )
    assert report(settings)["steps"] == 6
    log = settings.home / "validation" / "offline" / "log.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["staleness"] for one in steps if one["event"] == "step"] == [0, 0, 1, 1, 2, 2]


def test_missing_verdicts_are_counted_and_batches_stay_full(base: Path) -> None:
    tree = report(offline(base, "validation.noise_missing=0.5"))
    assert tree["completions"] == 128
    assert 2 <= tree["steps"] <= 4
    assert tree["left_out"]["not rated"] > 20


def test_warm_starts_are_a_stage_of_their_own(base: Path, tmp_path: Path) -> None:
    settings = ("validation.warmstart.completions=64", "validation.warmstart.lr=1e-3")
    tree = report(offline(base, "validation.warmstart.source=accepted", *settings))
    assert [stage["name"] for stage in tree["stages"]] == ["base", "warm start", "RL"]
    warm = tree["stages"][1]
    assert 0 < warm["samples"] < 64
    assert warm["metrics"] != tree["stages"][0]["metrics"]
    assert warm["gains"]["greedy"]["reward"]["mean"] is not None
    file = tmp_path / "larger.jsonl"
    rows = [{"prefix": f"x{n} = ", "suffix": "\n", "middle": "aaaa"} for n in range(32)]
    file.write_text("\n".join(map(json.dumps, rows)))
    more = ("validation.warmstart.epochs=20", "policies.tab.train.lr=1e-6")
    tree = report(offline(base, f"validation.warmstart.source={file}", *settings, *more))
    assert tree["stages"][1]["samples"] == 32
    taught = [example["completion"] for example in tree["stages"][1]["examples"]]
    assert all(text.startswith("aaaa") for text in taught)


@pytest.mark.parametrize("override", ["validation.quantise=int8", "policies.tab.train.lora.rank=2"])
def test_variants_run(base: Path, override: str) -> None:
    tree = report(offline(base, override, "validation.completions=96"))
    assert tree["stopped_by"] is None
    assert tree["steps"] == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["validation.tastes=[nobody]"], "no taste 'nobody'"),
        (["policies.tab.sampling.temperature=0.1"], "below train.temperature_floor"),
        (["validation.group=3", "policies.tab.train.mode=group"], "must be a multiple"),
        (["validation.group=4"], "mode: group"),
        (["validation.warmstart.source=larger.jsonl"], "a file that is there"),
        (["policies.tab.train.mode=group"], "mode: group"),
        (["validation.policy=other"], "no policy 'other'"),
        (["policies.a.model=x", "policies.b.model=y"], "several policies"),
        (["validation.name=../x"], "letters, digits"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check(load_settings(overrides=overrides))


@pytest.mark.parametrize("name", ["seed_ppo", "seed_grpo_judge", "ours"])
def test_the_examples_run(base: Path, name: str) -> None:
    settings = offline(
        base,
        "policies.tab.train.batch=16",
        "validation.completions=48",
        file=ROOT / "examples" / f"{name}.yaml",
    )
    tree = report(settings)
    assert tree["stopped_by"] is None
    assert tree["steps"] >= 2
    assert tree["name"] == name.replace("_", "-")


def test_the_command_needs_nothing_that_serves_or_stores(base: Path) -> None:
    lacking = ("sqlalchemy", "fastapi", "structlog", "uvicorn", "aiohttp", "alembic", "click", "uvloop")
    script = f"""
import sys
for name in {lacking!r}:
    sys.modules[name] = None
from onlinerl.validate.__main__ import main
sys.argv[1:] = ["--json"]
sys.exit(main())
"""
    settings = offline(base, "validation.completions=48")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ONLINERL_SETTINGS": settings.model_dump_json(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] >= 2


def test_the_command_ends_with_its_codes(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*overrides: str) -> int:
        settings = offline(base, "validation.completions=48", *overrides)
        monkeypatch.setenv("ONLINERL_SETTINGS", settings.model_dump_json())
        monkeypatch.setattr(sys, "argv", ["validate", "--json"])
        return main()

    assert command("policies.tab.rewards.weights={verdict: -1}") == 1
    told = capsys.readouterr()
    assert "contradict" in json.loads(told.out)["stopped_by"]
    assert "contradict" in told.err
    assert command("validation.group=4") == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    monkeypatch.delenv("ONLINERL_SETTINGS")
    monkeypatch.setattr(sys, "argv", ["validate", "validation.nonsense=1"])
    assert main() == 2
    assert "unknown setting validation.nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("module", [estimates, report_page])
def test_examples_in_the_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
