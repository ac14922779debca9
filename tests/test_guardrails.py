"""Which guardrails break, and which must not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from bench.experiments import studies
from bench.experiments.population import COLUMNS, People, Table, Version, days
from hypothesis import given, settings
from hypothesis import strategies as st

from onlinerl import config
from onlinerl.experiments import analysis, guardrails
from onlinerl.experiments.analysis import LEAST, Observations, contrast, radius, totals
from onlinerl.experiments.guardrails import Guard, watch

PLAN = config.Experiments()


def observed(table: Table, rows: slice) -> Observations:
    return Observations.of(**{name: table[name][rows] for name in COLUMNS})


def forgotten(arm: Observations) -> Observations:
    """The same units without their history."""
    return Observations.of(**{name: getattr(arm, name) for name in COLUMNS if "before" not in name})


def stage(seed: int, version: Version, *, control: int = 1_900, treatment: int = 100) -> dict[str, Guard]:
    """A stage of 5 % with a version of this kind."""
    rng = np.random.default_rng(seed)
    people = People.draw(rng, control + treatment)
    old, new = days(rng, people, Version()), days(rng, people, version)
    arms = observed(old, slice(treatment, None)), observed(new, slice(treatment))
    return {guard.name: guard for guard in watch(*arms, PLAN)}


def names(guards: dict[str, Guard]) -> set[str]:
    return {name for name, guard in guards.items() if guard.broken}


def test_the_same_version_breaks_nothing() -> None:
    for seed in range(20):
        guards = stage(seed, Version())
        assert names(guards) == set()
        assert all(guard.known for guard in guards.values())


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (Version(lift=-0.5), {"reward"}),
        (Version(slow=0.57), {"latency"}),
        (Version(errors=0.06), {"errors"}),
        (Version(shown=0.1), {"shown", "reward"}),
        (Version(reverted=0.8), {"reverted"}),
        (Version(length=300.0), {"length"}),
        (Version(lift=0.5, slow=0.0, errors=0.005, length=20.0, reverted=0.0), set()),
    ],
    ids=["reward", "latency", "errors", "shown", "reverted", "length", "better"],
)
def test_each_is_broken_by_what_it_is_for(version: Version, expected: set[str]) -> None:
    assert names(stage(1, version, treatment=200)) == expected


def test_worse_than_before_but_within_the_margin_breaks_nothing() -> None:
    mild = Version(slow=0.08, errors=0.01, shown=0.7, reverted=0.22, length=90.0, lift=0.3)
    assert names(stage(2, mild, control=5_000, treatment=5_000)) == set()


def test_it_is_safe_when_it_is_shown_to_be_within_the_margin() -> None:
    few, many = stage(3, Version(), treatment=20), stage(3, Version(), control=4_000, treatment=4_000)
    assert not few["latency"].safe
    assert all(guard.safe for name, guard in many.items() if name != "reward")
    assert not many["reward"].safe, "no worse at all cannot be shown"


def test_the_bound_is_beyond_the_margin_by_hand() -> None:
    # every tenth request of the control ends in an error, every second of the treatment
    asked = np.tile([10.0, 20.0], 20)
    wobble = np.tile([1.0, 0.0, 0.0, -1.0], 10)
    control = Observations.of(opportunities=asked, errors=asked / 10 + wobble)
    treatment = Observations.of(opportunities=asked, errors=asked / 2 + wobble)
    guard = {guard.name: guard for guard in watch(control, treatment, PLAN)}["errors"]
    spread = math.sqrt(2 * (20 / 15**2) / 39 / 40)
    assert guard.value == pytest.approx(0.4)
    assert guard.error == pytest.approx(spread)
    level = 0.1 * 0.05
    bound = spread * float(radius(40, alpha=level, tuned=guardrails.TUNED, two_sided=False))
    assert guard.low == pytest.approx(0.4 - bound)
    whole = spread * float(radius(40, alpha=0.05, tuned=guardrails.TUNED, two_sided=False))
    assert guard.high == pytest.approx(0.4 + whole)
    assert guard.broken == (0.4 - bound > 0.01)


def test_they_share_alpha() -> None:
    assert sum(guardrails.SHARES.values()) == pytest.approx(1.0)
    assert set(guardrails.SHARES) == set(studies.RATIOS)


def test_a_smaller_worth_is_a_loss_only_beyond_the_margin_where_equal_is_the_goal() -> None:
    rng = np.random.default_rng(4)
    people = People.draw(rng, 8_000)
    control = observed(days(rng, people, Version()), slice(4_000))
    arms = control, observed(days(rng, people, Version(lift=-0.1)), slice(4_000, None))
    better = watch(*arms, config.Experiments(goal="better"))[0]
    equal = watch(*arms, config.Experiments(goal="equal", margin=0.05))[0]
    assert better.broken
    assert not equal.broken
    assert better.value == equal.value
    assert (better.margin, equal.margin) == (0.0, 0.05)


# ------------------------------------------------------------------------------------ missing data


def test_nothing_seen_is_nothing_known() -> None:
    nobody = Observations.of()
    for guard in watch(nobody, nobody, PLAN):
        assert not guard.known
        assert not guard.broken
        assert guard.safe
        assert not guard.doubtful
        assert not guard.likely
        assert guard.units == (0, 0)


@settings(max_examples=50)
@given(
    st.integers(0, 60),
    st.integers(0, 60),
    st.sets(st.sampled_from(("shown", "retained", "characters", "accepted"))),
)
def test_what_nobody_reports_breaks_nothing(control: int, treatment: int, missing: set[str]) -> None:
    """Everything there is breaks, what is missing does not."""

    def arm(size: int, bad: bool) -> Observations:
        ones = np.full(size, 20.0)
        columns = {
            "opportunities": ones,
            "shown": ones * (0.1 if bad else 1),
            "accepted": ones / 2,
            "reward": -ones if bad else ones,
            "errors": ones * bad,
            "slow": ones * bad,
            "retained": ones / 2,
            "reverted": ones / 2 * bad,
            "characters": ones * (900 if bad else 10),
        }
        hidden = missing | ({"reverted"} if "retained" in missing else set())
        hidden |= {"characters"} if "shown" in missing else set()
        return Observations.of(
            **{name: np.zeros(size) if name in hidden else column for name, column in columns.items()}
        )

    found = {guard.name: guard for guard in watch(arm(control, False), arm(treatment, True), PLAN)}
    enough = min(control, treatment) >= LEAST // 2 and 2 / (1 / control + 1 / treatment) >= LEAST
    assert found["errors"].broken == enough
    assert found["latency"].broken == enough
    assert found["reverted"].broken == (enough and "retained" not in missing)
    assert found["length"].broken == (enough and not missing & {"shown", "characters"})
    # that nothing was shown is a fact and no gap: but then the control shows nothing either
    assert found["shown"].broken == (enough and "shown" not in missing)


def test_few_alike_units_are_not_trusted() -> None:
    # twelve treated users who all happen to have had two errors in ten, beside a control that varies
    rng = np.random.default_rng(7)
    control = Observations.of(
        opportunities=np.full(500, 10.0), errors=rng.binomial(10, rng.beta(0.3, 3, 500))
    )
    treatment = Observations.of(opportunities=np.full(12, 10.0), errors=np.full(12, 2.0))
    guard = {guard.name: guard for guard in watch(control, treatment, PLAN)}["errors"]
    assert guard.known
    assert not guard.broken
    sums = [totals(arm.errors, arm.opportunities) for arm in (control, treatment)]
    bare = contrast(sums[0], sums[1], least=LEAST // 2)
    assert guard.error > 3 * math.sqrt(float(bare.variance))


# ---------------------------------------------------------------------- the simulation means the same


def test_the_simulated_guardrails_are_these() -> None:
    rng = np.random.default_rng(8)
    people = People.draw(rng, 600)
    old, new = days(rng, people, Version()), days(rng, people, Version(lift=-0.2, errors=0.02, slow=0.1))
    arms = observed(old, slice(200, None)), observed(new, slice(200))
    bare = forgotten(arms[0]), forgotten(arms[1])
    limits = PLAN.guardrails
    margins = {"latency": limits.latency, "errors": limits.errors, "reverted": limits.reverted}
    for guard in watch(*bare, PLAN):
        above, below, worse, scale = studies.RATIOS[guard.name]
        sums = [totals(getattr(arm, above), getattr(arm, below)) for arm in bare]
        found = contrast(sums[0], sums[1], scale=scale, cautious=True)
        assert guard.value == pytest.approx(worse * float(found.estimate))
        assert guard.error == pytest.approx(math.sqrt(float(found.variance)))
        assert guard.margin == margins.get(guard.name, 0.0)
    assert studies.EDGES.keys() == studies.RATIOS.keys() == guardrails.SHARES.keys()


def test_history_helps_the_reward_too() -> None:
    rng = np.random.default_rng(9)
    people = People.draw(rng, 2_000)
    table = days(rng, people, Version())
    arms = observed(table, slice(200, None)), observed(table, slice(200))
    bare = forgotten(arms[0]), forgotten(arms[1])
    with_history, without = watch(*arms, PLAN)[0], watch(*bare, PLAN)[0]
    assert with_history.error < 0.92 * without.error
    assert analysis.read(*arms, alpha=0.05, tuned=1000).cuped
