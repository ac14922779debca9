"""The baseline and what is made of it, against numbers worked by hand."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from onlinerl.learning.advantages import Baseline, advantages, margin
from onlinerl.learning.rewards import RewardTable
from onlinerl.records import Sample, Scored, Verdict

TABLE = RewardTable(tau=0.2, timeout_weight=0.5)


def sample(verdict: Verdict, **changes: object) -> Sample:
    base = Sample(
        id="a", index=0, policy="tab", version=0, project="p", user="u1", at=0.0, prompt_ids=(1, 2),
        completion_ids=(3,), behavior_logprobs=(-1.0,), loss_mask=(True,), temperature=1.0, top_p=1.0,
        language="python", multiline=False, verdict=verdict, verdict_source="native",
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def scored(*verdicts: Verdict, **changes: object) -> list[Scored]:
    return [TABLE.score(sample(verdict, **changes)) for verdict in verdicts]


A, R, S, T = Verdict.ACCEPTED, Verdict.REJECTED, Verdict.SILENT, Verdict.TIMEOUT


def run(batch: list[Scored], baseline: Baseline, mode: str = "baseline", silent: bool = True) -> list[float]:
    return advantages(
        batch, mode=mode, baseline=baseline, table=TABLE, staleness=[0] * len(batch), limit=3.0,
        silent_expected=silent,
    )  # fmt: skip


def test_mean_is_shrunk_through_the_buckets() -> None:
    baseline = Baseline(decay=1.0, prior=2.0)
    baseline.update(scored(A, R, R, S), TABLE)
    # Σ rewards = 0.8 − 0.2 − 0.2 + 0 = 0.4, n = 4 in each of the four buckets; (0.4 + 2·m) / 6 from m = 0
    level = 0.0
    for _ in range(4):
        level = (0.4 + 2 * level) / 6
    assert baseline.mean(sample(A), 0.2) == pytest.approx(level)
    # another user shares all but the last bucket; another language only the first
    third = (0.4 + 2 * (0.4 + 2 * 0.4 / 6) / 6) / 6
    assert baseline.mean(sample(A, user="u2"), 0.2) == pytest.approx(third)
    assert baseline.mean(sample(A, language="go", user="u2"), 0.2) == pytest.approx(0.4 / 6)


def test_without_normalisation_an_advantage_is_the_distance_from_the_mean() -> None:
    batch = scored(A, R, S)  # nothing counted yet: the mean is 0
    plain = advantages(
        batch, mode="baseline", baseline=Baseline(), table=TABLE, staleness=[0] * 3, limit=3.0,
        silent_expected=True, normalise=False,
    )  # fmt: skip
    assert plain == pytest.approx([0.8, -0.2, 0.0])
    assert run(batch, Baseline()) == pytest.approx([a / spread([0.8, -0.2, 0.0]) for a in plain])


def spread(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def test_mean_follows_tau_since_counts_are_kept_not_means() -> None:
    baseline = Baseline(decay=1.0, prior=2.0)
    baseline.update(scored(A, R, R, S), TABLE)
    # τ = 0.5: 0.5 − 0.5 − 0.5 = −0.5
    assert baseline.mean(sample(A, language="go"), 0.5) == pytest.approx(-0.5 / 6)


def test_counts_decay_per_batch() -> None:
    baseline = Baseline(decay=0.5, prior=2.0)
    baseline.update(scored(A), TABLE)
    baseline.update(scored(R), TABLE)
    # accepted 0.5, rejected 1: (0.5·0.8 − 0.2) / 1.5, shrunk: (0.2) / 3.5
    assert baseline.mean(sample(A, language="go"), 0.2) == pytest.approx(0.2 / 3.5)


def test_weighted_timeouts_count_so_that_the_mean_is_the_mean_reward() -> None:
    baseline = Baseline(decay=1.0, prior=1e-9)
    batch = scored(A, T, T, R)
    baseline.update(batch, TABLE)
    expected = sum(one.reward for one in batch) / 4
    assert baseline.mean(sample(A), 0.2) == pytest.approx(expected, abs=1e-6)


def test_hand_worked_advantages() -> None:
    # Empty baseline: mean 0, so A = r / std. Rewards 0.8, −0.2, −0.2, 0; mean 0.1,
    # variance (0.49 + 0.09 + 0.09 + 0.01)/4 = 0.17
    std = math.sqrt(0.17)
    got = run(scored(A, R, R, S), Baseline())
    assert got == pytest.approx([0.8 / std, -0.2 / std, -0.2 / std, 0.0])


def test_batch_is_never_centred_on_itself() -> None:
    """A batch of rejects alone, on an empty baseline, keeps its sign: all are pushed down."""
    assert run(scored(R, R, R, S), Baseline())[0] < 0
    assert run(scored(A, A, A, S), Baseline())[0] > 0


def test_small_spread_is_not_blown_up() -> None:
    got = run(scored(R, R, S, S), Baseline())  # std = 0.1 exactly; halve it
    assert got == pytest.approx([-2.0, -2.0, 0.0, 0.0])
    batch = [replace(one, reward=one.reward / 10) for one in scored(R, R, S, S)]
    assert run(batch, Baseline()) == pytest.approx([-0.2, -0.2, 0.0, 0.0])


def test_clip_at_three() -> None:
    batch = scored(*([S] * 40), A)
    assert run(batch, Baseline())[-1] == 3.0


def test_stale_data_gets_a_lower_baseline() -> None:
    assert margin(0) == 0.0
    assert 0 < margin(1) < margin(2) == margin(7)
    fresh = run(scored(R, A, S, S), Baseline())
    stale = advantages(
        scored(R, A, S, S), mode="baseline", baseline=Baseline(), table=TABLE, staleness=[1, 1, 1, 1],
        limit=3.0, silent_expected=True,
    )  # fmt: skip
    assert all(new > old for new, old in zip(stale, fresh, strict=True))


def test_batch_without_its_silent_rows_is_not_centred() -> None:
    baseline = Baseline(decay=1.0)
    baseline.update(scored(A, A, A, R), TABLE)  # a memory of shown answers alone
    batch = scored(A, R, R, R)
    rewards = [one.reward for one in batch]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    assert run(batch, baseline, silent=True) == pytest.approx([r / std for r in rewards])
    # where the policy is never silent there is nothing that could be missing
    assert run(batch, baseline, silent=False) != pytest.approx([r / std for r in rewards])
    # and one silent row in the batch makes it whole
    whole = run([*batch, *scored(S)], baseline, silent=True)
    assert whole[-1] < 0, "silence is worth less than what is expected here"


def test_raw_is_the_reward_itself() -> None:
    baseline = Baseline()
    baseline.update(scored(A, A, R), TABLE)
    assert run(scored(A, R, S), baseline, mode="raw") == pytest.approx([0.8, -0.2, 0.0])


def test_what_comes_on_top_of_the_verdict_is_in_the_mean_and_the_verdict_still_follows_tau() -> None:
    table = RewardTable(tau=0.2, function=lambda one: 0.5 if one.verdict is A else -0.1)
    batch = [table.score(sample(verdict)) for verdict in (A, R, S, T)]
    assert [one.reward for one in batch] == pytest.approx([1.3, -0.3, -0.1, -0.2])
    baseline = Baseline(decay=1.0, prior=1e-9)
    baseline.update(batch, table)
    assert baseline.mean(sample(A), 0.2) == pytest.approx(0.7 / 4, abs=1e-6)
    # under τ = 0.4 the accept earns 0.2 less, the reject 0.2 and the timeout (weight ½) 0.1 less
    assert baseline.mean(sample(A), 0.4) == pytest.approx((0.7 - 0.5) / 4, abs=1e-6)


def test_a_weighted_verdict_is_kept_as_a_number_and_silence_is_still_counted() -> None:
    table = RewardTable(tau=0.2, weights={"verdict": 0.5, "score": 2.0})
    batch = [
        *(table.score(sample(verdict)) for verdict in (A, R, S)),
        table.score(sample(R, score=0.3)),
    ]
    # 0.5·0.8, −0.5·0.2, 0, and −0.5·0.2 + 2·0.3: the weights name both
    assert [one.reward for one in batch] == pytest.approx([0.4, -0.1, 0.0, 0.5])
    baseline = Baseline(decay=1.0, prior=1e-9)
    baseline.update(batch, table)
    assert baseline.mean(sample(A), 0.2) == pytest.approx(0.8 / 4, abs=1e-6)
    assert baseline.silent == 1.0


def test_timeouts_are_no_memory_of_silence() -> None:
    """A timeout of half a reject is no silence: a batch without silent rows must still not be centred."""
    baseline = Baseline(decay=1.0)
    baseline.update(scored(A, T, T), TABLE)
    assert baseline.silent == 0.0
    batch = scored(A, R)
    assert run(batch, baseline, silent=True) == pytest.approx([0.8 / 0.5, -0.2 / 0.5])


def test_group_by_hand() -> None:
    def rated(id: str, *rewards: float) -> list[Scored]:
        return [
            Scored(sample(A, id=id, index=index), reward, {"score": reward})
            for index, reward in enumerate(rewards)
        ]

    one, two, three = rated("one", 1.0, 0.0, 0.0, 0.0), rated("two", 0.3, 0.3), rated("three", 5.0)
    # mixed, as a batch may be; "one": mean ¼, std √((0.5625 + 3·0.0625) / 3) = ½
    batch = [one[0], two[0], one[1], three[0], one[2], two[1], one[3]]
    got = run(batch, Baseline(), mode="group")
    high, low = 0.75 / (0.5 + 1e-6), -0.25 / (0.5 + 1e-6)
    assert got == pytest.approx([high, 0.0, low, 0.0, low, 0.0, low], abs=1e-12)
    # a request with two prompts has two groups
    other = [
        replace(scored, sample=replace(scored.sample, prompt_ids=(7, 8))) for scored in rated("one", 9.0)
    ]
    assert run([*one, *other], Baseline(), mode="group") == pytest.approx([high, low, low, low, 0.0])
    # a hundred choices of which one was accepted: no clip at the limit of the baseline's advantages
    many = run(rated("many", *([0.0] * 99), 1.0), Baseline(), mode="group")
    assert many[-1] == pytest.approx(0.99 / (0.1 + 1e-6))


def test_group_knows_neither_baseline_nor_tau() -> None:
    baseline = Baseline()
    baseline.update(scored(A, A, R), TABLE)
    for tau in (0.0, 0.25):
        table = RewardTable(tau)
        batch = [table.score(sample(verdict)) for verdict in (A, R, R)]
        got = run(batch, baseline, mode="group")
        assert got == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], abs=1e-4)


def test_state_survives_json() -> None:
    baseline = Baseline()
    rng = random.Random(0)
    for _ in range(5):
        baseline.update(scored(*rng.choices([A, R, S, T], k=16), user=f"u{rng.randrange(3)}"), TABLE)
    baseline.update([replace(TABLE.score(sample(A, score=0.5)))], TABLE)
    other = Baseline()
    other.restore(json.loads(json.dumps(baseline.state())))
    for user in ("u0", "u1", "u9"):
        assert other.mean(sample(A, user=user), 0.1) == baseline.mean(sample(A, user=user), 0.1)
    other.update(scored(A), TABLE)
    assert other.mean(sample(A), 0.1) != baseline.mean(sample(A), 0.1)


def test_baseline_adds_no_bias_and_takes_variance_off() -> None:
    """Two contexts with different accept rates: centred advantages vary less, and still favour the better
    of two answers within each."""
    rng = random.Random(1)
    baseline = Baseline(decay=0.99)
    rate = {"easy": 0.8, "hard": 0.1}

    def draw() -> list[Scored]:
        return [
            TABLE.score(sample(A if rng.random() < rate[user] else R, user=user))
            for user in rng.choices(["easy", "hard"], k=64)
        ]

    for _ in range(30):
        baseline.update(draw(), TABLE)
    batch = draw()
    residual = [one.reward - baseline.mean(one.sample, TABLE.tau) for one in batch]
    rewards = [one.reward for one in batch]

    def variance(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / len(values)

    assert variance(residual) < 0.75 * variance(rewards)
