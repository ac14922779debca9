"""Verdict to reward: the table, τ, timeouts by source, retention, a client's own score."""

from __future__ import annotations

import asyncio
import doctest
import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onlinerl.config import Rewards, load_settings
from onlinerl.errors import SettingsError
from onlinerl.flow.channel import Channel
from onlinerl.learning import rewards
from onlinerl.learning.rewards import (
    ComputeReward,
    RewardTable,
    check_function,
    examples,
    load_function,
)
from onlinerl.records import Sample, Scored, Verdict
from onlinerl.worth import auto_tau


def sample(verdict: Verdict, source: str = "native") -> Sample:
    return Sample(
        id="a", index=0, policy="tab", version=0, project="p", user="u", at=0.0, prompt_ids=(1, 2),
        completion_ids=(3, 4), behavior_logprobs=(-1.0, -1.0), loss_mask=(True, True), temperature=1.0,
        top_p=1.0, language="python", multiline=False, verdict=verdict, verdict_source=source,
        completion="return x",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "source", "reward"),
    [
        (Verdict.ACCEPTED, "native", 0.8),
        (Verdict.REJECTED, "native", -0.2),
        (Verdict.SILENT, "server", 0.0),
        (Verdict.TIMEOUT, "native", -0.1),
        (Verdict.TIMEOUT, "tabby", -0.1),
        (Verdict.TIMEOUT, "continue", -0.2),
        (Verdict.TIMEOUT, "fork", -0.2),
    ],
)
def test_table(verdict: Verdict, source: str, reward: float) -> None:
    scored = RewardTable(tau=0.2, timeout_weight=0.5).score(sample(verdict, source))
    assert scored.reward == pytest.approx(reward)
    assert sum(scored.parts.values()) == scored.reward


def test_retention_pays_by_the_share_that_stayed() -> None:
    table = RewardTable.of(Rewards(retention_bonus=0.5), tau=0.2)
    kept = replace(sample(Verdict.ACCEPTED), retained_characters=4)
    assert table.parts(kept) == {"accepted": 0.8, "retained": 0.25}
    grown = replace(kept, retained_characters=80)
    assert table.score(grown).reward == pytest.approx(1.3)
    assert table.parts(replace(sample(Verdict.REJECTED), retained_characters=4)) == {"rejected": -0.2}


def test_own_score_takes_the_verdicts_place() -> None:
    assert RewardTable(tau=0.2).score(replace(sample(Verdict.REJECTED), score=0.7)).reward == 0.7


@pytest.mark.parametrize(
    ("accepted", "opportunities", "tau"), [(0, 0, 0.0), (18, 100, 0.09), (90, 100, 0.25), (0, 50, 0.0)]
)
def test_auto_tau(accepted: int, opportunities: int, tau: float) -> None:
    assert auto_tau(accepted, opportunities, 0.25) == pytest.approx(tau)


def test_auto_tau_does_not_ratchet_with_silence() -> None:
    """Half of the traffic falls silent and the other half is accepted as before: τ must fall, not stay."""
    assert auto_tau(10, 100, 0.25) < auto_tau(20, 100, 0.25)


def test_worker_keeps_the_order() -> None:
    samples: Channel[Sample] = Channel.create("samples", item=Sample)
    scored: Channel[Scored] = Channel.create("scored", item=Scored)
    group = ComputeReward(RewardTable(tau=0.25)).start(input=samples, output=scored)
    for verdict in (Verdict.ACCEPTED, Verdict.SILENT, Verdict.REJECTED):
        samples.put(sample(verdict))
    samples.close()
    assert [one.reward for one in scored] == [0.75, 0.0, -0.25]
    assert group.wait(5)


# ------------------------------------------------------------------------------- weights and functions


def test_each_source_is_multiplied_with_its_weight_and_all_are_summed() -> None:
    def function(one: Sample) -> Mapping[str, float]:
        return {"short": 1.0, "tidy": -2.0}

    weights = {"verdict": 2.0, "retained": 0.5, "function": 0.1, "function/tidy": 0.25}
    table = RewardTable(0.2, retention_bonus=0.4, weights=weights, function=function)
    scored = table.score(replace(sample(Verdict.ACCEPTED), retained_characters=4))
    expected = {"accepted": 1.6, "retained": 0.1, "function/short": 0.1, "function/tidy": -0.5}
    assert scored.parts == pytest.approx(expected)
    assert scored.reward == pytest.approx(1.3)
    assert sum(scored.parts.values()) == scored.reward


def test_own_score_stands_beside_the_verdict_where_weights_name_both() -> None:
    rated = replace(sample(Verdict.ACCEPTED), score=0.5)
    assert RewardTable(0.2, weights={"score": 2.0}).score(rated).parts == {"score": 1.0}
    both = RewardTable(0.2, weights={"score": 2.0, "verdict": 1.0}).score(rated)
    assert both.parts == {"accepted": 0.8, "score": 1.0}


def test_weights_of_one_change_nothing() -> None:
    """Bit for bit, over every kind of sample."""
    weighted = RewardTable(0.17, 0.3, 0.4, weights={"verdict": 1.0, "retained": 1.0})
    for one in examples():
        plain = RewardTable(0.17, 0.3, 0.4).score(one)
        assert weighted.score(one) == plain
        assert plain.reward == sum(plain.parts.values())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of the user's own and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    numbers = itertools.count()

    def write(text: str) -> str:
        name = f"rewards_of_mine_{tmp_path.name.replace('-', '_')}_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_function_of_ones_own(module: Any) -> None:
    name = module(
        "def reward(sample):\n"
        "    return -0.5 if sample.completion.startswith('return') and not sample.silent else 0.25\n"
        "class Tidy:\n"
        "    @staticmethod\n"
        "    def reward(sample):\n"
        "        return {'lines': -float(sample.completion.count('\\n'))}\n"
    )
    table = RewardTable.of(Rewards(function=f"{name}:reward"), tau=0.2)
    assert table.score(sample(Verdict.ACCEPTED)).parts == {"accepted": 0.8, "function": -0.5}
    silent = replace(sample(Verdict.SILENT), completion="")
    assert table.score(silent).parts == {"silent": 0.0, "function": 0.25}
    inner = Rewards(function=f"{name}:Tidy.reward", weights={"function/lines": 0.1, "verdict": 0.0})
    scored = RewardTable.of(inner, tau=0.2).score(replace(sample(Verdict.ACCEPTED), completion="a\nb\n"))
    assert scored.parts == pytest.approx({"accepted": 0.0, "function/lines": -0.2})


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "no_such_module_of_mine:reward", "there is no module no_such_module_of_mine"),
        ("import no_such_thing", "reward", "there is no module no_such_thing"),
        ("1 / 0", "reward", "cannot be imported: ZeroDivisionError: division by zero"),
        ("def other(sample): return 1", "reward", "reward is not in that module"),
        ("reward = 3", "reward", "reward is not a function"),
        ("def reward(): return 1", "reward", "for a sample that is accepted it raised TypeError"),
        ("def reward(s): return 1 / (len(s.completion))", "reward", "a sample that is silent it raised Zero"),
        ("def reward(s): return float('nan') if s.silent else 1", "reward", "returned nan as function"),
        (
            "def reward(s): return {'a': float('inf')}",
            "reward",
            "returned inf as function/a, which is not fi",
        ),
        ("def reward(s): return 'good'", "reward", "returned str as function, which is not a number"),
        ("def reward(s): return 10**400", "reward", "returned a number as function that is too large"),
        ("raise SystemExit(3)", "reward", "cannot be imported: SystemExit: 3"),
        ("def reward(s): raise SystemExit(3)", "reward", "it raised SystemExit"),
        ("def reward(s): return None", "reward", "returned NoneType as function"),
        ("def reward(s): return {}", "reward", "an empty mapping"),
        ("import random\ndef reward(s): return random.random()", "reward", "must not depend on chance"),
        ("def reward(s): return {s.verdict.value: 1.0}", "reward", "the names must be the same"),
        ("def reward(s): s.user = 'me'", "reward", "FrozenInstanceError"),
        ("async def reward(s): return 1.0", "reward", "is a coroutine"),
    ],
)
def test_a_function_that_breaks_the_contract_is_refused(
    module: Any, text: str | None, name: str, said: str
) -> None:
    path = name if text is None else f"{module(text)}:{name}"
    with pytest.raises(SettingsError) as refused:
        RewardTable.of(Rewards(function=path), tau=0.2)
    assert said in str(refused.value)
    assert f"rewards.function {path}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_check_says_what_names_it_found() -> None:
    def one(sample: Sample) -> float:
        return np.float32(len(sample.completion))  # type: ignore[return-value]  # numpy's are numbers too

    assert check_function(one) == {"function"}
    assert check_function(lambda s: {"a": 1.0, "b": True}) == {"function/a", "function/b"}
    with pytest.raises(SettingsError, match="test_rewards:test_the_check_says"):
        check_function(lambda s: random.random())
    assert {one.verdict for one in examples()} == set(Verdict)
    assert asyncio.iscoroutinefunction(load_function("asyncio:sleep"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["function=nonsense"], "write module:function"),
        (["function=a b:c"], "write module:function"),
        (["weights={verdicts: 1}"], "there is no source 'verdicts': verdict, retained, score, function"),
        (["weights={verdict: .inf}"], "finite"),
        (["weights.verdict=much"], "policies.tab.rewards.weights.verdict"),
    ],
)
def test_settings_of_rewards_that_cannot_be_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(overrides=[f"policies.tab.rewards.{one}" for one in overrides])


def test_weights_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"names function/x, but there is no rewards\.function"):
        RewardTable.of(Rewards(weights={"function/x": 1.0}), 0.2)
    settings = Rewards(function="tests.test_rewards:two_numbers", weights={"function/c": 1.0})
    with pytest.raises(SettingsError, match="returns nothing named function/c, only function/a, function/b"):
        RewardTable.of(settings, 0.2)
    dotted = load_settings(overrides=["policies.tab.rewards.weights.function/a=0.5"])
    assert dotted.policies["tab"].rewards.weights == {"function/a": 0.5}


def two_numbers(sample: Sample) -> dict[str, float]:
    return {"a": 1.0, "b": 2.0}


def test_one_sample_on_which_the_function_fails_is_isolated() -> None:
    def picky(one: Sample) -> float:
        if "secret" in one.completion:
            raise ValueError(f"what is {one.completion}?")
        return float("nan") if one.completion == "odd" else 1.0

    table = RewardTable(0.25, function=picky)
    fine = table.score(sample(Verdict.ACCEPTED))
    assert (fine.reward, fine.fault) == (1.75, "")
    failed = table.score(replace(sample(Verdict.ACCEPTED), completion="the secret"))
    assert failed.fault.startswith("rewards.function: it raised ValueError in line ")
    assert failed.fault.endswith("of picky")
    assert "secret" not in failed.fault, "what people type stays out of logs"
    assert (failed.reward, dict(failed.parts)) == (0.0, {})
    odd = table.score(replace(sample(Verdict.ACCEPTED), completion="odd"))
    assert "not finite" in odd.fault
    huge = RewardTable(0.25, weights={"score": 1e308}).score(replace(sample(Verdict.ACCEPTED), score=1e308))
    assert "not a finite number" in huge.fault


def test_examples_of_the_documentation() -> None:
    assert doctest.testmod(rewards).failed == 0
    assert doctest.testmod(rewards).attempted >= 4


def test_the_function_of_the_page_keeps_the_contract() -> None:
    page = (Path(__file__).parents[1] / "docs" / "learning.md").read_text("utf-8")
    (text,) = re.findall(r"^```python\n(.*?def reward\(.*?)^```", page, re.MULTILINE | re.DOTALL)
    there: dict[str, Any] = {}
    exec(text, there)
    assert check_function(there["reward"]) == {"function"}
    commented = replace(sample(Verdict.ACCEPTED), completion="  # later")
    assert RewardTable(0.25, function=there["reward"]).score(commented).reward == 0.25
