"""Mode `session`: small teams, whose file sessions are assigned one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench.experiments.population import BASE, SHOWN, TAU, Mask
from bench.experiments.sequential import chunks, firsts, rank, running, share_of, statistic, without_history
from bench.experiments.studies import ALPHA, TUNED
from numpy.random import Generator
from numpy.typing import NDArray

from onlinerl.experiments.analysis import Contrast, Floats, Totals, contrast, radius

SESSIONS = 8
"""File sessions of a person's working day."""


@dataclass(frozen=True, slots=True)
class Team:
    """The file sessions of some teams in the order of time, arrays of (teams, sessions)."""

    opportunities: Floats
    shown: Floats
    rate: Floats
    """Accept rate of what is shown, under the control."""
    person: NDArray[np.int64]
    """Place in the team, shape (sessions,)."""
    day: NDArray[np.int64]
    before: tuple[Floats, Floats]
    """Reward and opportunities of the person's week before, shape (teams, sessions)."""

    @staticmethod
    def draw(rng: Generator, teams: int, people: int, length: int) -> Team:
        """`length` working days. Sessions of one person are alike (taste), those of a day too (mood)."""
        mean = BASE / SHOWN
        taste = rng.beta(12 * mean, 12 * (1 - mean), (teams, people))
        activity = rng.lognormal(math.log(7), 0.5, (teams, people))

        def sessions(length: int) -> tuple[Floats, Floats, Floats]:
            shape = (teams, length, SESSIONS, people)
            mood = rng.beta(30 * taste, 30 * (1 - taste), (length, teams, people)).transpose(1, 0, 2)
            mood = np.clip(mood, 0.001, 0.999)[:, :, None, :]
            rate = rng.beta(15 * mood, 15 * (1 - mood), shape)
            asked = 1 + rng.poisson(activity[:, None, None, :] * rng.lognormal(0.0, 0.7, shape))
            shown = rng.binomial(asked, SHOWN)
            flat = [part.reshape(teams, -1).astype(np.float64) for part in (asked, shown, rate)]
            return flat[0], flat[1], flat[2]

        asked, shown, rate = sessions(5)
        accepted = rng.binomial(shown.astype(np.int64), rate)
        earned = (accepted - TAU * shown).reshape(teams, -1, people).sum(axis=1)
        begun = asked.reshape(teams, -1, people).sum(axis=1)
        asked, shown, rate = sessions(length)
        times = length * SESSIONS
        person = np.tile(np.arange(people), times)
        before = np.tile(earned, (1, times)), np.tile(begun, (1, times))
        return Team(asked, shown, rate, person, np.repeat(np.arange(length), SESSIONS * people), before)

    def rewards(self, rng: Generator, lift: Floats | float) -> tuple[Floats, Floats]:
        """Reward and accepts of every session with an accept rate higher by `lift`."""
        accepted = rng.binomial(self.shown.astype(np.int64), np.clip(self.rate * (1 + lift), 0, 1))
        return accepted - TAU * self.shown, accepted.astype(np.float64)


def assigned(rng: Generator, team: Team, by: str) -> Mask:
    """Half of the sessions, of the days of a person, or of the people."""
    teams, people = len(team.rate), int(team.person.max()) + 1
    if by == "session":
        return np.asarray(rng.random(team.rate.shape) < 0.5)
    if by == "day":
        lots = rng.random((teams, int(team.day.max()) + 1, people)) < 0.5
        return np.asarray(lots[:, team.day, team.person])
    lots = rng.permuted(np.tile(np.arange(people) % 2 == 0, (teams, 1)), axis=1)
    return np.asarray(lots[:, team.person])


def sessions(rng: Generator, *, teams: int = 2_000, people: int = 10, length: int = 60) -> dict[str, Any]:
    """Mode `session` with a team of ten: sessions of one person are alike. What does that do?"""
    hits: dict[str, int] = {}

    def count(name: str, found: Contrast) -> None:
        crossed = statistic(found) > radius(found.size, alpha=ALPHA, tuned=TUNED)
        hits[name] = hits.get(name, 0) + int(crossed.any(axis=1).sum())

    for some in chunks(teams):
        team = Team.draw(rng, some, people, length)
        reward, accepted = team.rewards(rng, 0.0)
        treated = assigned(rng, team, "session")
        count("by session, analysed by session", contrast(*running(treated, [reward, team.opportunities])))
        columns = [reward, team.opportunities, *team.before]
        name = "by session, analysed by session, with each one's week before"
        count(name, contrast(*running(treated, columns)))
        count("by session, analysed by request", contrast(*_requests(treated, team, reward, accepted)))
        for by in ("day", "person"):
            arms = running(assigned(rng, team, by), [reward, team.opportunities])
            count(f"by {by}, analysed by session", contrast(*arms))
        # a version that some like and some do not: first such that this very team is as well off with it,
        # then such that people in general are
        taste = rng.normal(0.0, 0.2, (some, people))
        weight = (team.opportunities * team.rate).reshape(some, -1, people).sum(axis=1)
        fair = taste - (taste * weight).sum(axis=1, keepdims=True) / weight.sum(axis=1, keepdims=True)
        for name, effect in (("this team", fair), ("people in general", taste)):
            other, _ = team.rewards(rng, effect[:, team.person])
            columns = [np.where(treated, other, reward), team.opportunities]
            count(f"tastes differ, no better for {name}", contrast(*running(treated, columns)))
    return {
        "teams": teams,
        "people": people,
        "days": length,
        "sessions": length * SESSIONS * people,
        "alpha": ALPHA,
        "false promotions": {name: share_of(hit, teams) for name, hit in hits.items()},
        "days until found": _team_power(rng, max(20, teams // 10)),
    }


def _requests(treated: Mask, team: Team, reward: Floats, accepted: Floats) -> tuple[Totals, Totals]:
    """Totals as if every request were a unit: what is wrong when sessions were assigned."""
    squares = accepted * (1 - TAU) ** 2 + (team.shown - accepted) * TAU**2
    sums = []
    for inside in (~treated, treated):
        y, n, yy = (np.cumsum(part * inside, axis=1) for part in (reward, team.opportunities, squares))
        sums.append(Totals(n, np.zeros_like(n), np.stack([y, n]), np.stack([[yy, y], [y, n]])))
    return sums[0], sums[1]


def _team_power(rng: Generator, teams: int) -> list[dict[str, Any]]:
    """Working days until a better version is found, by size of team and lift."""
    rows = []
    for people, length in ((5, 130), (10, 130), (20, 90), (50, 50)):
        for lift in (0.1, 0.2, 0.3):
            times: dict[str, list[Floats]] = {"plain": [], "history": []}
            for some in chunks(teams):
                team = Team.draw(rng, some, people, length)
                reward, _ = team.rewards(rng, 0.0)
                better, _ = team.rewards(rng, lift)
                treated = assigned(rng, team, "session")
                columns = [np.where(treated, better, reward), team.opportunities, *team.before]
                control, treatment = running(treated, columns)
                plain = without_history(control), without_history(treatment)
                for name, arms in (("plain", plain), ("history", (control, treatment))):
                    found = contrast(*arms)
                    bound = radius(found.size, alpha=ALPHA, tuned=TUNED)
                    times[name].append(firsts(statistic(found) > bound))
            row: dict[str, Any] = {"people": people, "lift": lift, "most days": length}
            for name, parts in times.items():
                joined = np.concatenate(parts) / (people * SESSIONS)
                row[name] = {"half found": rank(joined, 0.5), "80 % found": rank(joined, 0.8)}
            rows.append(row)
    return rows
