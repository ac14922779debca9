"""The interval, CUPED, α over versions and the sample-ratio test: closed forms, published numbers, and
libraries that compute the same."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from scipy.stats import ttest_ind

from onlinerl.experiments import analysis
from onlinerl.experiments.analysis import (
    LEAST,
    Floats,
    Observations,
    Reading,
    Totals,
    contrast,
    imbalance,
    radius,
    read,
    secondary,
    spend,
    totals,
)

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25)
"""Random data vary enough by themselves."""


def people(rng: Generator, size: int, *, lift: float = 0.0, history: float = 1.0) -> Observations:
    """Units with rates of their own and very different numbers of opportunities."""
    rate, activity = rng.beta(2, 6, size), rng.lognormal(2.5, 1.0, size)
    asked, asked_before = (1 + rng.poisson(activity * rng.lognormal(0, 0.3, size)) for _ in range(2))
    known = rng.random(size) < history
    return Observations.of(
        opportunities=asked,
        reward=rng.binomial(asked, np.minimum(rate * (1 + lift), 1)) - 0.1 * asked,
        before_opportunities=asked_before * known,
        before_reward=(rng.binomial(asked_before, rate) - 0.1 * asked_before) * known,
    )


def take(arm: Observations, rows: Floats | list[int] | np.ndarray) -> Observations:
    """Some units, in the order of `rows`."""
    columns = {name: getattr(arm, name) for name in analysis._COLUMNS}
    return Observations(**{name: column[rows] if len(column) else column for name, column in columns.items()})


def both(seed: int, size: int = 60) -> tuple[Observations, Observations]:
    rng = np.random.default_rng(seed)
    return people(rng, size), people(rng, size + 7, lift=0.2)


def numbers(reading: Reading) -> tuple[float, ...]:
    return reading.estimate, reading.low, reading.high, reading.error


# ------------------------------------------------------------------------- against libraries and papers

# gbstats 0.8.0 (GrowthBook): RatioStatistic in SequentialTwoSidedTTest, whose n is both arms' units together
GBSTATS = [
    (0.05, 100, (-0.06908728992673413, 0.18609900725968054)),
    (0.01, 1000, (-0.18400805298051764, 0.30101977031346405)),
]


def formula(k: int, lift: float) -> Observations:
    i = np.arange(30)
    asked = (7 * i + k) % 11 + 1.0
    return Observations.of(opportunities=asked, reward=((5 * i + 3 * k) % 7) / 7 * asked * 0.5 + lift * asked)


@pytest.mark.parametrize(("alpha", "tuned", "interval"), GBSTATS)
def test_the_interval_of_a_ratio_is_growthbooks(
    alpha: float, tuned: int, interval: tuple[float, float]
) -> None:
    found = read(formula(1, 0.0), formula(2, 0.06), alpha=alpha, tuned=tuned)
    assert found.estimate == pytest.approx(0.058505858666473204, rel=1e-12)
    assert found.error**2 == pytest.approx(0.0015901937417558258, rel=1e-12)
    assert (found.low, found.high) == pytest.approx(interval, rel=1e-12)


# confseq 0.0.11, normal_mixture_bound(n, α, n*, α), two-sided and one-sided; the two-sided one takes the
# exact ρ where ours takes the approximation of the papers
CONFSEQ = [
    (20, 0.05, 50, 13.9699647914, 12.8108108017),
    (100, 0.05, 1000, 38.5505463353, 36.3430508997),
    (1000, 0.05, 1000, 95.9817358421, 87.4708415997),
    (1000, 0.0304, 1000, 101.5930089447, 93.6942960721),
    (1000, 0.002, 50, 134.9016259316, 129.2629653768),
    (5000, 0.05, 1000, 222.9529204473, 204.3416821489),
    (5000, 0.002, 1000, 291.4171770870, 278.3690609336),
]


@pytest.mark.parametrize(("size", "alpha", "tuned", "two_sided", "one_sided"), CONFSEQ)
def test_the_radius_is_howards_normal_mixture(
    size: int, alpha: float, tuned: int, two_sided: float, one_sided: float
) -> None:
    found = math.sqrt(size) * float(radius(size, alpha=alpha, tuned=tuned))
    assert found == pytest.approx(two_sided, rel=0.006)
    above = math.sqrt(size) * float(radius(size, alpha=alpha, tuned=tuned, two_sided=False))
    assert above == pytest.approx(one_sided, rel=1e-9)
    assert above < found


def test_the_radius_is_that_of_algorithms_by_hand() -> None:
    eta2 = (-2 * math.log(0.05) + math.log(1 - 2 * math.log(0.05))) / 1000
    n, sigma2 = 400, 0.3
    by_hand = math.sqrt(sigma2) * math.sqrt(
        2 * (n * eta2 + 1) / (n**2 * eta2) * math.log(math.sqrt(n * eta2 + 1) / 0.05)
    )
    assert math.sqrt(sigma2 / n) * float(radius(n, alpha=0.05, tuned=1000)) == pytest.approx(by_hand)


def test_it_pays_half_as_much_again_for_peeking() -> None:
    ratio = float(radius(1000, alpha=0.05, tuned=1000)) / 1.959964
    assert ratio == pytest.approx(1.55, abs=0.005)


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_the_interval_is_tightest_where_it_is_tuned(alpha: float, two_sided: bool) -> None:
    grid = np.geomspace(100, 10_000, 81)
    widths = [float(radius(1000, alpha=alpha, tuned=n, two_sided=two_sided)) for n in grid]
    assert grid[int(np.argmin(widths))] == pytest.approx(1000, rel=0.3)
    assert float(radius(1000, alpha=alpha, tuned=1000, two_sided=two_sided)) < 1.001 * min(widths)


def test_a_published_simulation_is_reproduced() -> None:
    # seqabpy's "Sequential Testing Guide" (GAVI): normal data, 500 units an arm, tuned at 500, 0.05 for one
    # end of the two-sided bound, so α is twice that. Of 100,000 A/A runs 1.8 % go up. With an effect of 0.1
    # standard deviations 22.2 % do, half of these by unit 285
    rng = np.random.default_rng(11)
    size = np.arange(1, 501)
    bound = math.sqrt(2) / np.sqrt(size) * radius(size, alpha=0.1, tuned=500)
    noise = np.cumsum(rng.normal(0, math.sqrt(2), (20_000, 500)), axis=1) / size
    assert (noise > bound).any(axis=1).mean() == pytest.approx(0.018, abs=0.003)
    crossed = noise[:8_000] + 0.1 > bound
    found = crossed.any(axis=1)
    assert found.mean() == pytest.approx(0.222, abs=0.013)
    assert np.median(crossed.argmax(axis=1)[found] + 1) == pytest.approx(285, abs=12)


def test_with_one_opportunity_each_it_is_welchs() -> None:
    rng = np.random.default_rng(3)
    control, treatment = rng.normal(1, 1, 40), rng.normal(1.3, 2, 55)
    found = read(
        Observations.of(opportunities=np.ones(40), reward=control),
        Observations.of(opportunities=np.ones(55), reward=treatment),
        alpha=0.05,
        tuned=1000,
    )
    welch = ttest_ind(treatment, control, equal_var=False)
    assert found.estimate / found.error == pytest.approx(float(welch.statistic), rel=1e-12)


def test_the_delta_method_is_least_squares_with_clustered_errors() -> None:
    rng = np.random.default_rng(5)
    requests, arm, unit = [], [], []
    sums: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
    for number in range(80):
        treated = number % 2 == 1
        asked, rate = int(1 + rng.poisson(rng.lognormal(2, 1))), rng.beta(2, 6)
        outcomes = (rng.random(asked) < rate).astype(float)
        requests += list(outcomes)
        arm += [float(treated)] * asked
        unit += [number] * asked
        sums[treated][0].append(asked)
        sums[treated][1].append(outcomes.sum())
    arms = [Observations.of(opportunities=sums[key][0], reward=sums[key][1]) for key in (False, True)]
    found = read(*arms, alpha=0.05, tuned=1000)
    model = sm.OLS(np.array(requests), sm.add_constant(np.array(arm)))
    options = {"groups": np.array(unit), "use_correction": False}
    fitted = model.fit(cov_type="cluster", cov_kwds=options)
    assert found.estimate == pytest.approx(fitted.params[1], rel=1e-9)
    # theirs divides by the units, ours by one less
    assert found.error**2 == pytest.approx(fitted.bse[1] ** 2 * 40 / 39, rel=1e-9)


def test_cuped_of_a_mean_is_the_analysis_of_covariance() -> None:
    rng = np.random.default_rng(6)
    before = rng.normal(0, 1, 100)
    after = 0.8 * before + rng.normal(0, 0.5, 100)
    treated = np.arange(100) % 3 == 0
    after[treated] += 0.3
    arms = [
        Observations.of(
            opportunities=np.ones(int(part.sum())),
            reward=after[part],
            before_opportunities=np.ones(int(part.sum())),
            before_reward=before[part],
        )
        for part in (~treated, treated)
    ]
    found = read(*arms, alpha=0.05, tuned=1000)
    fitted = sm.OLS(after, np.column_stack([np.ones(100), treated, before])).fit(cov_type="HC0")
    assert found.estimate == pytest.approx(fitted.params[1], rel=1e-9)
    assert found.error == pytest.approx(fitted.bse[1], rel=0.03)
    plain = sm.OLS(after, np.column_stack([np.ones(100), treated])).fit(cov_type="HC0")
    assert found.saved == pytest.approx(1 - (fitted.bse[1] / plain.bse[1]) ** 2, abs=0.02)


# ssrm-test 0.1.5 (Optimizely), concentration 100; the first is seqabpy's published 0.075
MISMATCHES = [
    ((156, 212), 0.5, 0.0748645),
    ((930, 70), 0.05, 0.123155793782371),
    ((2600, 2400), 0.5, 0.14156727084275555),
    ((260, 140), 0.5, 1.0523218357051356e-06),
    ((4000, 1200), 0.25, 0.04251730964749446),
    ((950, 50), 0.05, 1.0),
]


@pytest.mark.parametrize(("units", "share", "value"), MISMATCHES)
def test_the_sample_ratio_test_is_optimizelys(units: tuple[int, int], share: float, value: float) -> None:
    assert float(imbalance(units, share)) == pytest.approx(value, rel=1e-6)


def test_the_sample_ratio_test_holds_its_level_at_every_look() -> None:
    rng = np.random.default_rng(8)
    for share in (0.01, 0.5):
        treated = np.cumsum(rng.random((1_000, 2_000)) < share, axis=1)
        found = imbalance((np.arange(1, 2_001) - treated, treated), share)
        ever = (found < 0.05).any(axis=1).mean()
        assert 0.0 < ever <= 0.05
    # and a wrong share is found
    treated = np.cumsum(rng.random((100, 2_000)) < 0.42, axis=1)
    assert (imbalance((np.arange(1, 2_001) - treated, treated), 0.5)[:, -1] < 0.001).mean() > 0.95


# --------------------------------------------------------------------------------------- properties


@few
@given(seeds)
def test_the_order_of_units_says_nothing(seed: int) -> None:
    control, treatment = both(seed)
    rng = np.random.default_rng(seed)
    shuffled = (
        take(control, rng.permutation(control.units)),
        take(treatment, rng.permutation(treatment.units)),
    )
    expected = numbers(read(control, treatment, alpha=0.05, tuned=1000))
    assert numbers(read(*shuffled, alpha=0.05, tuned=1000)) == pytest.approx(expected, rel=1e-9)


@few
@given(seeds)
def test_arms_are_alike(seed: int) -> None:
    control, treatment = both(seed)
    one = read(control, treatment, alpha=0.05, tuned=1000)
    other = read(treatment, control, alpha=0.05, tuned=1000)
    assert numbers(other) == pytest.approx((-one.estimate, -one.high, -one.low, one.error), rel=1e-9)


@few
@given(seeds, st.floats(0.01, 100), st.floats(-1, 1))
def test_points_of_another_scale_are_scaled(seed: int, factor: float, shift: float) -> None:
    def other(arm: Observations) -> Observations:
        moved = factor * (arm.reward + shift * arm.opportunities)
        return replace(arm, reward=moved, before_reward=5 * arm.before_reward)

    control, treatment = both(seed)
    expected = np.array(numbers(read(control, treatment, alpha=0.05, tuned=1000))) * factor
    found = numbers(read(other(control), other(treatment), alpha=0.05, tuned=1000))
    assert found == pytest.approx(tuple(expected), rel=1e-6, abs=1e-9 * factor)


@few
@given(seeds, st.floats(0.0001, 0.2), st.floats(1.1, 3))
def test_certainty_costs_width(seed: int, alpha: float, factor: float) -> None:
    control, treatment = both(seed)
    wide = read(control, treatment, alpha=alpha, tuned=1000)
    narrow = read(control, treatment, alpha=min(0.45, alpha * factor), tuned=1000)
    assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high


@few
@given(seeds, st.integers(2, 6))
def test_more_of_the_same_narrows_it(seed: int, times: int) -> None:
    control, treatment = both(seed)
    more = [take(arm, np.tile(np.arange(arm.units), times)) for arm in (control, treatment)]
    once, often = read(control, treatment, alpha=0.05, tuned=1000), read(*more, alpha=0.05, tuned=1000)
    assert often.estimate == pytest.approx(once.estimate, rel=1e-9)
    assert often.high - often.low < (once.high - once.low) / math.sqrt(times)


def test_the_width_goes_to_zero() -> None:
    size = np.geomspace(20, 1e12, 50)
    width = radius(size, alpha=0.05, tuned=1000) / np.sqrt(size)
    assert np.all(np.diff(width) < 0)
    assert width[-1] < 1e-5


@few
@given(seeds)
def test_arrays_of_looks_are_the_looks_one_by_one(seed: int) -> None:
    control, treatment = both(seed)
    sums = []
    for arm in (control, treatment):
        columns = arm.reward, arm.opportunities, arm.before_reward, arm.before_opportunities
        looks = [totals(*(column[:n] for column in columns)) for n in (10, 30, arm.units)]
        sums.append(
            Totals(
                np.stack([look.units for look in looks]),
                np.stack([look.history for look in looks]),
                np.stack([look.first for look in looks], axis=-1),
                np.stack([look.second for look in looks], axis=-1),
            )
        )
    found = contrast(sums[0], sums[1])
    assert list(found.known) == [False, True, True]
    half = np.sqrt(found.variance) * radius(found.size, alpha=0.05, tuned=1000)
    for place, n in ((1, (30, 30)), (2, (control.units, treatment.units))):
        arms = take(control, np.arange(n[0])), take(treatment, np.arange(n[1]))
        one = read(*arms, alpha=0.05, tuned=1000)
        assert found.estimate[place] == pytest.approx(one.estimate, rel=1e-9)
        assert found.estimate[place] - half[place] == pytest.approx(one.low, rel=1e-9)


# -------------------------------------------------------------------------------------------- CUPED


def test_history_narrows_and_does_not_shift() -> None:
    rng = np.random.default_rng(9)
    plain, adjusted, saved = [], [], []
    for _ in range(200):
        arms = people(rng, 150), people(rng, 150, lift=0.2)
        bare = [
            replace(arm, before_reward=0 * arm.reward, before_opportunities=0 * arm.reward) for arm in arms
        ]
        with_history, without = (read(*pair, alpha=0.05, tuned=1000) for pair in (arms, bare))
        assert with_history.cuped
        assert not without.cuped
        plain.append(without.estimate)
        adjusted.append(with_history.estimate)
        saved.append(with_history.saved)
    assert np.mean(saved) > 0.5
    assert np.var(adjusted) < 0.6 * np.var(plain)
    error = math.sqrt(np.var(np.subtract(adjusted, plain)) / 200)
    assert abs(np.mean(adjusted) - np.mean(plain)) < 3 * error


def test_units_without_history_take_part_unadjusted() -> None:
    rng = np.random.default_rng(10)
    control, treatment = people(rng, 200, history=0.5), people(rng, 200, history=0.5)
    half = read(control, treatment, alpha=0.05, tuned=1000)
    assert half.units == (200, 200)
    assert 0.1 < half.saved < 0.6


def test_a_history_of_few_is_not_used() -> None:
    rng = np.random.default_rng(10)
    control, treatment = people(rng, 100), people(rng, 100)
    known = np.arange(100) < LEAST - 1
    short = replace(
        treatment,
        before_opportunities=treatment.before_opportunities * known,
        before_reward=treatment.before_reward * known,
    )
    assert read(control, treatment, alpha=0.05, tuned=1000).cuped
    assert read(control, short, alpha=0.05, tuned=1000).saved == 0.0


# ------------------------------------------------------------------------------- what is not enough


def test_below_the_least_number_of_units_nothing_is_said() -> None:
    control, treatment = both(1)
    fewer = take(treatment, np.arange(LEAST - 1))
    found = read(control, fewer, alpha=0.05, tuned=1000)
    assert not found.known
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert found.units == (control.units, LEAST - 1)
    assert read(control, take(treatment, np.arange(LEAST)), alpha=0.05, tuned=1000).known


def test_nothing_at_all_is_no_error() -> None:
    nobody = Observations.of()
    found = read(nobody, nobody, alpha=0.05, tuned=1000)
    assert not found.known
    assert found.units == (0, 0)
    assert dict(secondary(nobody, nobody, alpha=0.05, tuned=1000)) == {}


def test_units_that_never_asked_do_not_count() -> None:
    idle = Observations.of(opportunities=np.zeros(50), reward=np.zeros(50))
    assert read(idle, idle, alpha=0.05, tuned=1000).units == (0, 0)


def test_a_unit_counts_when_its_window_is_over() -> None:
    control, treatment = both(2)
    open_ = replace(treatment, ended=np.arange(treatment.units) < 40)
    expected = read(control, take(treatment, np.arange(40)), alpha=0.05, tuned=1000)
    assert read(control, open_, alpha=0.05, tuned=1000) == expected


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        Observations.of(opportunities=np.ones(3), reward=np.ones(1))
    with pytest.raises(ValueError, match="one length"):
        Observations.of(opportunities=np.ones(3), cost=np.ones(2))


# -------------------------------------------------------------------------------------- secondary, α


def test_what_nobody_reports_is_left_out() -> None:
    rng = np.random.default_rng(4)

    def arm(size: int, price: float) -> Observations:
        shown = 1.0 + rng.poisson(20, size)
        accepted = rng.binomial(shown.astype(int), 0.3).astype(float)
        return Observations.of(
            opportunities=shown + 5, reward=accepted, shown=shown, accepted=accepted, cost=price * shown
        )

    found = secondary(arm(300, 1.0), arm(300, 0.1), alpha=0.05, tuned=1000)
    assert set(found) == {"accepted", "accepts", "shown", "cost"}
    assert found["accepted"].control == pytest.approx(0.3, abs=0.02)
    assert found["cost"].control == pytest.approx(1 / 0.3, rel=0.1)
    assert found["cost"].high < -2.5, "a tenth of the price is cheaper"
    assert found["accepted"].low < 0 < found["accepted"].high


def test_the_cost_of_those_who_accept_nothing_counts() -> None:
    accepted = np.tile([0.0, 2.0], 20)
    arm = Observations.of(opportunities=np.full(40, 5.0), accepted=accepted, cost=np.full(40, 3.0))
    assert secondary(arm, arm, alpha=0.05, tuned=1000)["cost"].control == pytest.approx(3.0)


@given(st.floats(0.0001, 0.49), st.integers(1, 5_000))
def test_all_experiments_together_spend_no_more_than_alpha(alpha: float, number: int) -> None:
    shares = [spend(alpha, k) for k in range(1, number + 1)]
    assert all(one > two > 0 for one, two in pairwise(shares))
    # what comes after number is at most ∫ 6α/(π²x²) from there
    assert alpha - 6 * alpha / (math.pi**2 * number) <= sum(shares) < alpha


def test_experiments_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        spend(0.05, 0)


@given(st.integers(0, 5_000), st.integers(0, 5_000), st.floats(0.01, 0.99))
def test_a_mismatch_is_seen_alike_from_both_sides(control: int, treatment: int, share: float) -> None:
    found = float(imbalance((control, treatment), share))
    assert 0.0 <= found <= 1.0
    assert found == pytest.approx(float(imbalance((treatment, control), 1 - share)), rel=1e-6, abs=1e-12)
    assert float(imbalance((0, 0), share)) == 1.0
