"""The table of decisions: each line, and which line wins."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl import config
from onlinerl.experiments.analysis import LEAST, Observations, Reading, read
from onlinerl.experiments.decisions import HELD, MISMATCH, decide
from onlinerl.experiments.guardrails import Guard, watch
from onlinerl.records import Arm, Decision, DecisionKind, Experiment, ExperimentState

HOUR = 3600.0
PLAN = config.Experiments()
LAST = len(PLAN.stages) - 1


def experiment(stage: int = LAST, *, state: str = "running", **plan: Any) -> Experiment:
    """v7 against v6, begun at 0."""
    frozen = json.loads(json.dumps(config.Experiments(**plan).model_dump(mode="json")))
    return replace(
        Experiment.example(),
        state=ExperimentState(state),
        control=Arm("tab", 6),
        treatment=Arm("tab", 7),
        plan=frozen,
        stage=stage,
        stage_at=0.0,
    )


def reading(low: float, high: float, units: tuple[int, int] = (498, 512)) -> Reading:
    middle = (low + high) / 2
    return Reading(middle, low, high, (high - low) / 6, 0.17, 0.17 + middle, units, 0.03, 0.0)


UNKNOWN = Reading(math.nan, -math.inf, math.inf, math.inf, math.nan, math.nan, (3, 2), 0.03, 0.0)
BETTER = reading(0.012, 0.040)
UNCLEAR = reading(-0.003, 0.022)
WORSE = reading(-0.040, -0.012)


def guard(name: str, value: float = 0.0, **changes: Any) -> Guard:
    """One with a standard error of 0.01 and bounds at three of them; nothing is wrong with it."""
    plain = Guard(name, value, 0.01, value - 0.03, value + 0.03, 0.05, 0.05, (900, 100), 0.05, 0.05 + value)
    return replace(plain, **changes)


def missing(name: str) -> Guard:
    return guard(
        name, math.nan, error=math.inf, low=-math.inf, high=math.inf, units=(2, 3), control=math.nan,
        treatment=math.nan,
    )  # fmt: skip


NAMES = ("reward", "latency", "errors", "shown", "reverted", "length")


def guards(**changed: Guard) -> list[Guard]:
    calm = {name: guard(name, tolerance=0.075 if name == "reward" else 0.05) for name in NAMES}
    return list((calm | changed).values())


def made(
    one: Experiment,
    found: Reading,
    watched: list[Guard] | None = None,
    *,
    imbalance: float = 1.0,
    hours: float = 30.0,
) -> Decision:
    return decide(one, found, guards() if watched is None else watched, imbalance, hours * HOUR)


BROKEN = guard("errors", 0.2)


# ------------------------------------------------------------------------------------ line by line


def test_1_arms_that_do_not_match_abort() -> None:
    decision = made(experiment(1), UNCLEAR, imbalance=MISMATCH / 2)
    assert decision.kind is DecisionKind.ABORT
    assert decision.reason == (
        "the arms cannot be compared: of 1000 users 100 have v7, 50 were to be expected (p = 0.0005)"
    )
    assert made(experiment(1), UNCLEAR, imbalance=MISMATCH).kind is not DecisionKind.ABORT


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            guard("reward", 0.1),
            "v7 is worse: it loses at least 7.0 points of reward per 100 requests, 5.0 are allowed",
        ),
        (
            guard("latency", 0.3),
            "v7 is too slow: at least 27.0% more of its requests are beyond the control's 95th percentile, "
            "5.0% are allowed",
        ),
        (
            guard("errors", 0.2),
            "v7 fails too often: at least 17.0% more of its requests end in an error, 5.0% are allowed",
        ),
        (guard("shown", 0.2), "v7 is too silent: it shows 25.0% of requests, the control 5.0%"),
        (
            guard("reverted", 0.2),
            "v7 is taken back too often: at least 17.0% more of its accepted answers are gone a minute "
            "later, 5.0% are allowed",
        ),
        (guard("length", 90.0, low=80.0), "v7 is too long: 90 characters an answer, the control 0"),
    ],
    ids=NAMES,
)
@pytest.mark.parametrize("stage", range(LAST + 1))
def test_2_a_broken_guardrail_aborts_in_every_stage(stage: int, broken: Guard, words: str) -> None:
    decision = made(experiment(stage), UNKNOWN, guards(**{broken.name: broken}), hours=0.01)
    assert decision.kind is DecisionKind.ABORT
    assert decision.reason == f"{words} (seen on 100 units)"
    assert not decision.proposed


def test_3_an_interval_below_zero_aborts() -> None:
    decision = made(experiment(), WORSE)
    assert decision.kind is DecisionKind.ABORT
    assert decision.reason == (
        "v7 is worse: worse by 1.2 to 4.0 points of reward per 100 requests (512 against 498 users)"
    )
    equal = experiment(goal="equal", margin=0.05)
    assert made(equal, WORSE).kind is DecisionKind.PROMOTE, "so much is allowed"
    assert made(equal, reading(-0.09, -0.06)).kind is DecisionKind.ABORT


def test_4_who_waits_for_a_person_only_aborts() -> None:
    waiting = experiment(state="waiting", decide="ask")
    assert made(waiting, BETTER).kind is DecisionKind.CONTINUE
    assert made(waiting, UNCLEAR, hours=1_000).kind is DecisionKind.CONTINUE
    assert made(waiting, BETTER, guards(errors=BROKEN)).kind is DecisionKind.ABORT
    assert made(waiting, WORSE).kind is DecisionKind.ABORT
    assert made(waiting, BETTER, imbalance=1e-6).kind is DecisionKind.ABORT


def test_6_better_in_the_last_stage_is_promoted() -> None:
    decision = made(experiment(), BETTER)
    assert decision.kind is DecisionKind.PROMOTE
    assert decision.reason == (
        "v7 is better than v6: better by 1.2 to 4.0 points of reward per 100 requests (512 against 498 users)"
    )
    assert decision.numbers["low"] == 0.012
    assert decision.numbers["units/treatment"] == 512


@pytest.mark.parametrize(
    ("found", "watched", "hours", "words"),
    [
        (
            reading(0.0, 0.04),
            None,
            30.0,
            "between 0.00 points of reward per 100 requests worse and 4.0 better (512 against 498 users)",
        ),
        (
            reading(0.01, 0.04, (99, 500)),
            None,
            30.0,
            "99 users of the smaller arm have been seen to the end, 100 are needed",
        ),
        (BETTER, None, 23.9, "23.9 of 24 hours are over"),
        (
            BETTER,
            guards(latency=guard("latency", 0.03)),
            30.0,
            "latency is not yet shown to be within its margin",
        ),
    ],
)
def test_6_not_before_everything_is_met(
    found: Reading, watched: list[Guard] | None, hours: float, words: str
) -> None:
    decision = made(experiment(), found, watched, hours=hours)
    assert decision.kind is DecisionKind.CONTINUE
    assert decision.reason == words


@pytest.mark.parametrize("stage", range(LAST))
def test_6_never_before_the_last_stage(stage: int) -> None:
    assert made(experiment(stage), BETTER).kind is DecisionKind.RAMP


def test_6_what_nobody_reports_stops_no_promotion() -> None:
    unseen = guards(reverted=missing("reverted"), length=missing("length"))
    assert made(experiment(), BETTER, unseen).kind is DecisionKind.PROMOTE


def test_6_fewer_units_than_an_interval_needs_cannot_be_asked_for() -> None:
    small = experiment(least_units=1)
    assert made(small, reading(0.01, 0.04, (LEAST - 1, 500))).kind is DecisionKind.CONTINUE
    assert made(small, reading(0.01, 0.04, (LEAST, 500))).kind is DecisionKind.PROMOTE


def test_7_without_an_answer_in_time_it_is_given_up() -> None:
    decision = made(experiment(), UNCLEAR, hours=336)
    assert decision.kind is DecisionKind.FUTILE
    assert decision.reason == (
        "no answer in 336 hours: between 0.3 points of reward per 100 requests worse and 2.2 better "
        "(512 against 498 users)"
    )
    assert made(experiment(), BETTER, hours=1_000).kind is DecisionKind.PROMOTE, "late, but proven"
    assert (
        made(experiment(1), UNCLEAR, guards(errors=guard("errors", 0.06)), hours=336).kind
        is DecisionKind.FUTILE
    )


def test_7_a_stage_in_doubt_that_nobody_enters_any_more_is_given_up() -> None:
    doubtful = guards(reward=guard("reward", 0.065, tolerance=0.075, margin=0.0, low=-0.01))
    all_over = reading(-0.1, 0.02, (900, 100))
    hours = HELD * PLAN.window_hours
    decision = made(experiment(1), all_over, doubtful, hours=hours)
    assert decision.kind is DecisionKind.FUTILE
    assert decision.reason == (
        "no more users come in this stage: it looks worse, by 6.5 points of reward per 100 requests"
    )
    assert made(experiment(1), all_over, doubtful, hours=hours - 1).kind is DecisionKind.CONTINUE
    still_open = reading(-0.1, 0.02, (900, 99))
    assert made(experiment(1), still_open, doubtful, hours=hours).kind is DecisionKind.CONTINUE
    assert made(experiment(1), all_over, hours=hours).kind is DecisionKind.RAMP


def test_8_on_to_the_next_stage() -> None:
    decision = made(experiment(1), UNKNOWN, hours=1.0)
    assert decision.kind is DecisionKind.RAMP
    assert decision.reason == "v7 does no visible harm to 100 users: on to 25%"
    assert made(experiment(1), UNKNOWN, hours=0.9).kind is DecisionKind.CONTINUE
    few = guards(reward=guard("reward", tolerance=0.075, units=(900, 4)))
    assert made(experiment(1), UNKNOWN, few).reason == "4 of 10 users have come in this stage"


def test_8_a_loss_must_be_unlikely() -> None:
    def loses(value: float) -> list[Guard]:
        return guards(reward=guard("reward", value, margin=0.0, tolerance=0.075, low=value - 0.2))

    # 0.075 is two standard errors of 0.01 from 0.055
    assert made(experiment(1), UNKNOWN, loses(0.054), hours=2).kind is DecisionKind.RAMP
    decision = made(experiment(1), UNKNOWN, loses(0.056), hours=2)
    assert decision.kind is DecisionKind.CONTINUE
    assert decision.reason == "a loss of 7.5 points of reward per 100 requests cannot be ruled out yet"
    # after a window a standard error below 0 is what counts
    assert made(experiment(1), UNKNOWN, loses(0.0099), hours=25).kind is DecisionKind.RAMP
    assert made(experiment(1), UNKNOWN, loses(0.0101), hours=25).kind is DecisionKind.CONTINUE


def test_8_no_guardrail_may_look_broken() -> None:
    decision = made(experiment(1), UNKNOWN, guards(errors=guard("errors", 0.051)))
    assert decision.kind is DecisionKind.CONTINUE
    assert decision.reason == "errors looks worse than its margin"


# ------------------------------------------------------------------------------------- precedence


def test_earlier_lines_win() -> None:
    everything = guards(errors=BROKEN)
    late = 1_000.0
    assert "cannot be compared" in made(experiment(), WORSE, everything, imbalance=0.0, hours=late).reason
    assert "fails too often" in made(experiment(), WORSE, everything, hours=late).reason
    assert "is worse" in made(experiment(), WORSE, hours=late).reason
    both = guards(errors=BROKEN, latency=guard("latency", 0.3))
    assert made(experiment(), BETTER, both).reason.count(";") == 1


def test_a_better_reward_does_not_excuse_a_broken_guardrail() -> None:
    assert made(experiment(), BETTER, guards(errors=BROKEN)).kind is DecisionKind.ABORT


@pytest.mark.parametrize(
    ("found", "hours", "kind", "proposed"),
    [
        (BETTER, 30, DecisionKind.PROMOTE, True),
        (UNCLEAR, 336, DecisionKind.FUTILE, True),
        (WORSE, 30, DecisionKind.ABORT, False),
        (UNCLEAR, 30, DecisionKind.CONTINUE, False),
    ],
)
def test_a_person_is_asked_for_all_but_an_abort(
    found: Reading, hours: float, kind: DecisionKind, proposed: bool
) -> None:
    asked, alone = (made(experiment(decide=who), found, hours=hours) for who in ("ask", "automatic"))
    assert (asked.kind, asked.proposed) == (kind, proposed)
    assert (alone.kind, alone.proposed) == (kind, False)


def test_a_ramp_needs_no_person() -> None:
    decision = made(experiment(1, decide="ask"), UNKNOWN)
    assert (decision.kind, decision.proposed) == (DecisionKind.RAMP, False)


# ------------------------------------------------------------------------------------ missing data


@given(
    st.integers(0, LAST),
    st.floats(0, 100_000),
    st.integers(0, LEAST // 2 - 1),
    st.sampled_from(("better", "equal")),
    st.sampled_from(("ask", "automatic")),
)
def test_missing_data_triggers_nothing(stage: int, hours: float, few: int, goal: str, who: str) -> None:
    control = Observations.of(opportunities=[5.0] * (19 * few), reward=[1.0] * (19 * few))
    treatment = Observations.of(opportunities=[5.0] * few, reward=[-5.0] * few, errors=[5.0] * few)
    plan = config.Experiments(goal=goal, decide=who)
    one = experiment(stage, goal=goal, decide=who)
    found = read(control, treatment, alpha=0.03, tuned=1000)
    decision = decide(one, found, watch(control, treatment, plan), 1.0, hours * HOUR)
    assert decision.kind is DecisionKind.CONTINUE
    assert "are needed to say anything" in decision.reason
    json.loads(json.dumps(dict(decision.numbers), allow_nan=False))


def test_open_windows_decide_nothing_in_the_last_stage() -> None:
    open_ = replace(UNKNOWN, units=(15, 12))
    decision = made(experiment(), open_, hours=1_000)
    assert decision.kind is DecisionKind.CONTINUE
    assert decision.reason.startswith("12 users with v7 and 15 without have been seen to the end")


# ------------------------------------------------------------------------------------------- words


def test_sessions_and_upstreams_are_called_what_they_are() -> None:
    small = replace(
        experiment(unit="session", goal="equal", margin=0.02),
        control=Arm("tab", None, "big"),
        treatment=Arm("other", 3),
    )
    decision = made(small, reading(-0.011, 0.02))
    assert decision.reason == (
        "other@3 is as good as upstream:big: between 1.1 points of reward per 100 requests worse and 2.0 "
        "better, 2.0 worse are allowed (512 against 498 sessions)"
    )


def test_a_decision_carries_its_numbers() -> None:
    decision = made(experiment(), BETTER, guards(reverted=missing("reverted")), imbalance=0.4)
    assert decision.at == 30 * HOUR
    assert decision.stage == LAST
    numbers = decision.numbers
    assert numbers["imbalance"] == 0.4
    assert numbers["hours"] == 30
    assert numbers["share"] == 0.5
    assert numbers["latency/low"] == pytest.approx(-0.03)
    assert numbers["reverted/units/treatment"] == 3
    assert "reverted/value" not in numbers
    assert all(math.isfinite(value) for value in numbers.values())
