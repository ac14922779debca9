"""Who explores: the share, how it sticks, and who never does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from onlinerl.config import Exploration
from onlinerl.experiments.assignment import EXPLORE, LIVE, Assignment, assign, exploration

USERS = [f"user-{number}" for number in range(10_000)]


def explorers(units: Iterable[str], share: float, salt: str = "s") -> set[str]:
    return {unit for unit in units if assign(unit, share=share, salt=salt).arm == EXPLORE}


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_the_share_is_met_within_binomial_bounds(share: float) -> None:
    bound = 4 * math.sqrt(share * (1 - share) * len(USERS))
    assert abs(len(explorers(USERS, share)) - share * len(USERS)) < bound


@pytest.mark.parametrize(("share", "arm"), [(0.0, LIVE), (1.0, EXPLORE)])
def test_nobody_and_everybody(share: float, arm: str) -> None:
    assert {assign(unit, share=share, salt="s") for unit in USERS[:1000]} == {Assignment(arm, 1.0)}


def test_a_unit_stays_where_it_is_and_the_propensity_is_that_of_its_arm() -> None:
    # written down, so that a later release does not draw everybody again
    arms = {unit: assign(unit, share=0.3, salt="s").arm for unit in ("ann", "cem", "\ud800")}
    assert arms == {"ann": LIVE, "cem": EXPLORE, "\ud800": LIVE}
    for unit in USERS[:100]:
        one = assign(unit, share=0.3, salt="s")
        assert one == assign(unit, share=0.3, salt="s")
        assert one.propensity == pytest.approx(0.3 if one.arm == EXPLORE else 0.7)


def test_a_larger_share_only_adds_units() -> None:
    assert explorers(USERS, 0.05) < explorers(USERS, 0.1) < explorers(USERS, 0.5)


def test_another_salt_draws_anew_and_independently() -> None:
    first, second = explorers(USERS, 0.5, "a"), explorers(USERS, 0.5, "b")
    # both: a quarter of all, if one says nothing of the other
    assert abs(len(first & second) - 0.25 * len(USERS)) < 4 * math.sqrt(0.25 * 0.75 * len(USERS))


def drawn(settings: Exploration, user: str, request: str = "cmpl-1", policy: str = "tab") -> Assignment:
    return exploration(settings, policy=policy, user=user, request=request)


@pytest.mark.parametrize("settings", [Exploration(share=1), Exploration(share=1, users=("someone", "else"))])
def test_who_did_not_opt_in_never_explores(settings: Exploration) -> None:
    assert {drawn(settings, user) for user in ("", *USERS[:1000])} == {Assignment(LIVE, 1.0)}


def test_who_opted_in_is_drawn_by_user_or_by_request() -> None:
    listed = Exploration(users=("ann",), share=0.5)
    requests = [f"cmpl-{number}" for number in range(1000)]
    assert len({drawn(listed, "ann", request) for request in requests}) == 1, "one user, one arm"
    by_request = Exploration(users=("ann",), share=0.5, unit="request")
    explored = sum(drawn(by_request, "ann", request).arm == EXPLORE for request in requests)
    assert abs(explored - 500) < 4 * math.sqrt(250)
    everybody = Exploration(users="all", share=0.5)
    explored = sum(drawn(everybody, "", request).arm == EXPLORE for request in requests)
    assert abs(explored - 500) < 4 * math.sqrt(250), "requests without a user key are no single user"
    explored = sum(drawn(everybody, user).arm == EXPLORE for user in USERS)
    assert abs(explored - 5000) < 4 * math.sqrt(2500)


def test_policies_draw_independently() -> None:
    settings = Exploration(users="all", share=0.5)
    both = sum(
        drawn(settings, user, policy="tab").arm == drawn(settings, user, policy="chat").arm == EXPLORE
        for user in USERS
    )
    assert abs(both - 2500) < 4 * math.sqrt(0.25 * 0.75 * len(USERS))
