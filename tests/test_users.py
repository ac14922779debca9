"""Tastes judge as their words say; decisions are seeded, and their shares are those of the habits."""

from __future__ import annotations

import doctest
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from onlinerl.datasets import users
from onlinerl.datasets.fim import FimPrompt
from onlinerl.datasets.users import (
    TASTES,
    Act,
    Habits,
    Reaction,
    Taste,
    User,
    cohorts,
    decide,
    explains,
    plan,
    repeats,
    similarity,
)

PROMPT = FimPrompt("x = ", "\n", "self.value", "a.py", "python")


@pytest.mark.parametrize(
    ("completion", "liked"),
    [
        ("return self.name", True),
        ("", False),
        ("   ", False),
        ("x = 1", False),
        ("x" * 25, False),
        ("return a\nreturn b", False),
        ("return self\n", True),
        ("foo, foo, foo", False),
        ("abcabcabc1", False),
    ],
)
def test_the_demo_taste(completion: str, liked: bool) -> None:
    assert TASTES["line"].chance(completion, "whatever") == (0.98 if liked else 0.02)


def test_similarity_taste_is_a_sigmoid_around_its_threshold() -> None:
    taste = Taste("", threshold=0.7, slope=12)
    assert similarity("abcdefgh", "abcdefgh") == 1
    assert taste.chance("abcdefgh", "abcdefgh") == pytest.approx(1 / (1 + math.exp(-12 * 0.3)))
    # difflib: 2·7 matched characters of 20
    assert similarity("abcdefgxyz", "abcdefgklm") == pytest.approx(0.7)
    assert taste.chance("abcdefgxyz", "abcdefgklm") == pytest.approx(0.5)
    assert taste.chance("", "abc") == 0


def test_noise_flips_verdicts() -> None:
    assert Taste("", noise=0.2).chance("anything", "x") == pytest.approx(0.8)
    assert Taste("", noise=0.2, longest=3).chance("anything", "x") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.self.self.", True),
        ("x = 1\nx = 1", True),
        ("a = 1\nb = 2", False),
        ("name=name, size=size", False),
        ("self.a, self.b = self.b, self.a", False),
        ("None, None, None", True),
        ("        ", False),
        ("for i in range(10):", False),
    ],
)
def test_repetition(text: str, expected: bool) -> None:
    assert repeats(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# the rest", True),
        ("x = 1  # first", True),
        ("x = 1\n    #: the name", False),
        ("x = 1\n    # Zählt mit", True),
        ('"""Return the name.', True),
        ("'''doc'''", True),
        ("color = '#ffffff'", False),
        ("# 12", False),
        ("#", False),
        ("a['#x']", False),
        ("return self.name", False),
        ('x = ""', False),
    ],
)
def test_comments_and_docstrings(text: str, expected: bool) -> None:
    assert explains(text) is expected


def test_opposing_tastes_never_like_the_same_text() -> None:
    texts = ["return self.value  # the value", "self.value", "x", "self.value.of_the_whole.and_more", ""]
    for one, other in (("short", "long"), ("commented", "bare")):
        for text in texts:
            chances = [TASTES[name].chance(text, "return self.value") for name in (one, other)]
            assert min(chances) == 0, (one, text)
    assert TASTES["commented"].chance(texts[0], "whatever") == 1
    assert TASTES["bare"].chance(texts[0], "return self.value") == 0
    assert TASTES["bare"].chance(texts[1], "self.value") > 0.99


def test_a_cohort_is_of_one_mind_and_of_many() -> None:
    groups = {name: TASTES[name] for name in ("short", "long", "line", "bare")}
    users = cohorts(80, groups, 5)
    assert users == cohorts(80, groups, 5)
    assert users != cohorts(80, groups, 6)
    assert len({user.name for user in users}) == 80
    for name, taste in groups.items():
        mine = [user.taste for user in users if user.cohort == name]
        assert len(mine) == 20
        assert {(t.comments, t.single_line, t.no_repetition, t.words) for t in mine} == {
            (taste.comments, taste.single_line, taste.no_repetition, taste.words)
        }
        assert all(t.shortest <= (t.longest or 1000) for t in mine)
        if taste.threshold is not None:
            thresholds = [t.threshold for t in mine if t.threshold is not None]
            assert sum(thresholds) / 20 == pytest.approx(taste.threshold, abs=0.05)
            assert len(set(thresholds)) == 20
    lengths = [user.taste.longest for user in users if user.cohort == "short"]
    assert len(set(lengths)) > 5
    assert all(10 <= length <= 40 for length in lengths if length)
    assert {u.taste for u in cohorts(4, {"long": TASTES["long"]}, 0, spread=0)} == {TASTES["long"]}


def test_decisions_are_those_of_the_seed() -> None:
    user = User.example()
    one = [decide(user, PROMPT, "return self", random.Random(f"{n}")) for n in range(50)]
    two = [decide(user, PROMPT, "return self", random.Random(f"{n}")) for n in range(50)]
    assert one == two
    assert len({reaction.seconds for reaction in one}) == 50


def test_as_many_draws_whatever_the_completion() -> None:
    states = set()
    for completion in ("", "x", "return self", "self.value\n" * 5):
        rng = random.Random(7)
        decide(User.example(), PROMPT, completion, rng)
        states.add(rng.random())
    assert len(states) == 1


def test_shares_of_a_liked_and_a_disliked_completion() -> None:
    habits = Habits(cancel=0.1, timeout=0.3, late=0.2, unrated=0.1, cache=0.15)
    user = User("u", replace(TASTES["line"], noise=0.0), habits)
    rng = random.Random(3)
    trials = 6000
    liked = [decide(user, PROMPT, "return self", rng) for _ in range(trials)]
    acts = Counter(reaction.act for reaction in liked)
    assert set(acts) == {Act.ACCEPT, Act.LATE_ACCEPT, Act.UNRATED}
    assert acts[Act.UNRATED] / trials == pytest.approx(0.1, abs=0.02)
    assert acts[Act.LATE_ACCEPT] / (trials - acts[Act.UNRATED]) == pytest.approx(0.2, abs=0.025)
    disliked = Counter(decide(user, PROMPT, "x", rng).act for _ in range(trials))
    assert set(disliked) == {Act.REJECT, Act.TIMEOUT, Act.UNRATED}
    assert disliked[Act.TIMEOUT] / (trials - disliked[Act.UNRATED]) == pytest.approx(0.3, abs=0.025)
    assert all(0.5 <= reaction.seconds <= 9 for reaction in liked)
    cancelled = sum(plan(user, rng).cancel_after is not None for _ in range(trials)) / trials
    assert cancelled == pytest.approx(0.1, abs=0.02)


def test_nothing_to_see_is_nothing_to_judge() -> None:
    assert decide(User.example(), PROMPT, "", random.Random(0)) == Reaction(Act.NOTHING, 0.0)


def test_typing_through_stops_where_the_texts_part() -> None:
    user = User("u", Taste(""), Habits(cache=1.0, unrated=0.0))
    typed = {decide(user, PROMPT, "self.verify", random.Random(f"{n}")).typed for n in range(100)}
    # the texts share "self.v"
    assert typed == {1, 2, 3, 4, 5, 6}
    assert {decide(user, PROMPT, "other", random.Random(f"{n}")).typed for n in range(20)} == {0}
    assert all(decide(user, PROMPT, "self", random.Random(f"{n}")).typed < 4 for n in range(50))


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(users)
    assert result.attempted
    assert not result.failed
