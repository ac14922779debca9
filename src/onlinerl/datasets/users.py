"""Simulated users: what they like, how they behave, and what they do with a completion.

Everything here is pure: the same user, prompt, completion and random generator give the same
reaction, whichever server answered.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from onlinerl.datasets.fim import FimPrompt

_SAME_PIECE = re.compile(r"(\S.{1,20}?)\1\1", re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s)#+ *[^\W\d_]{2,}|\"{3}|'{3}")
_SAME_WORD = re.compile(r"\b([A-Za-z_]\w{2,})\b(?:\W+\1\b){2}")


@dataclass(frozen=True, slots=True)
class Taste:
    """What a user likes. Made by hand or taken from TASTES, eaten by `decide`.

    >>> TASTES["line"].chance("return self.name", "anything")
    0.98
    """

    words: str
    """In plain words, for reports."""
    threshold: float | None = None
    """Similarity with the true middle at which half is accepted; None: similarity does not matter."""
    slope: float = 12.0
    """How sharply acceptance rises around the threshold."""
    shortest: int = 1
    """Least characters, without surrounding space."""
    longest: int | None = None
    """Most characters, without surrounding space."""
    single_line: bool = False
    """Refuses completions that hold a line break."""
    no_repetition: bool = False
    """Refuses completions that say the same thing three times in a row."""
    comments: bool | None = None
    """True: refuses completions without a comment or docstring. False: those with one. None: takes both."""
    noise: float = 0.0
    """Probability that the verdict is the opposite of what the taste says, in [0, 0.5]."""

    def chance(self, completion: str, middle: str) -> float:
        """Probability that `completion` is accepted where the author wrote `middle`."""
        text = completion.strip()
        fits = (
            len(text) >= self.shortest
            and (self.longest is None or len(text) <= self.longest)
            and not (self.single_line and "\n" in completion.rstrip())
            and not (self.no_repetition and repeats(text))
            and (self.comments is None or self.comments == explains(text))
        )
        liked = 0.0
        if fits:
            liked = 1.0
            if self.threshold is not None:
                liked = 1 / (1 + math.exp(-self.slope * (similarity(text, middle) - self.threshold)))
        return liked * (1 - self.noise) + (1 - liked) * self.noise


@functools.lru_cache(maxsize=4096)  # judges and the tastes of many users ask about the same pairs in turn
def similarity(completion: str, middle: str) -> float:
    """difflib's ratio of the two texts without trailing space, in [0, 1]; 0 for an empty completion."""
    left, right = completion.rstrip(), middle.rstrip()
    if not left.strip():
        return 0.0
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()


def repeats(text: str) -> bool:
    """True when a piece of two or more characters, or a word, or a line comes back at once.

    >>> repeats("self.self.self."), repeats("x = 1\\nx = 1"), repeats("name=name, size=size")
    (True, True, False)
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    same_line = any(one == other for one, other in itertools.pairwise(lines))
    return same_line or bool(_SAME_PIECE.search(text)) or bool(_SAME_WORD.search(text))


def explains(text: str) -> bool:
    """True when the text holds a comment that says a word, or begins or ends a docstring.

    A `#` inside of a string counts where a space stands before it and a word after it, which is rare.

    >>> explains("x = 1  # the first"), explains("color = '#fff'"), explains("#")
    (True, False, False)
    """
    return bool(_COMMENT.search(text))


TASTES: Mapping[str, Taste] = MappingProxyType(
    {
        "line": Taste(
            "one short line: 8 to 24 characters, no line break, nothing said three times in a row "
            "(2 % of the verdicts are the opposite of what they should be)",
            shortest=8,
            longest=24,
            single_line=True,
            no_repetition=True,
            noise=0.02,
        ),
        "similar": Taste(
            "what the author wrote there: accepted with probability sigmoid(12·(similarity − 0.7))",
            threshold=0.7,
        ),
        "lenient": Taste(
            "roughly what the author wrote there: accepted with probability sigmoid(12·(similarity − 0.45))",
            threshold=0.45,
        ),
        "generous": Taste(
            "not far from what the author wrote there: sigmoid(12·(similarity − 0.38)), which accepts a "
            "quarter of what the built-in model shows at temperature 1",
            threshold=0.38,
        ),
        "short": Taste("at most 20 characters that go in the right direction", threshold=0.35, longest=20),
        "long": Taste("at least 25 characters that go in the right direction", threshold=0.35, shortest=25),
        "commented": Taste(
            "code with a comment or docstring in it, nothing said three times in a row",
            shortest=8,
            no_repetition=True,
            comments=True,
        ),
        "bare": Taste(
            "code without comments and docstrings that goes in the right direction",
            threshold=0.35,
            comments=False,
        ),
    }
)
"""Tastes by name. short and long oppose each other, and so do commented and bare."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How a user behaves around a completion, whatever it says. All shares are probabilities."""

    cancel: float = 0.04
    """Types on while the answer is under way: the client closes the request."""
    timeout: float = 0.3
    """Of the refusals: does nothing until the client's clock runs out, instead of dismissing."""
    late: float = 0.05
    """Of the accepts: comes after the client's clock ran out."""
    unrated: float = 0.06
    """Moves on so soon that the client reports nothing."""
    cache: float = 0.06
    """Comes back to the same place, or types the first characters: the client shows its cached answer."""
    reading: float = 1.5
    """Mean seconds until a decision, half a second at least and nine at most."""
    pause: float = 1.0
    """Mean seconds until the next request."""


@dataclass(frozen=True, slots=True)
class User:
    """A simulated developer. `name` is the sticky key sent to the server and seeds the randomness."""

    name: str
    taste: Taste
    habits: Habits = Habits()
    cohort: str = ""
    """Name of the group whose taste the user's own is a variation of; "" for a user of no group."""

    @staticmethod
    def example() -> User:
        """A small one, for tests and documentation."""
        return User("dev-1", TASTES["line"])


def cohorts(
    count: int, tastes: Mapping[str, Taste], seed: int, *, spread: float = 0.15, habits: Habits | None = None
) -> tuple[User, ...]:
    """`count` users over the groups `tastes` in turn, each with a taste around that of the group.

    A user's threshold differs from the group's by a normal deviate of standard deviation spread / 3, and
    bounds of length by a common factor exp(normal · spread). What a taste demands by yes or no (line breaks,
    repetition, comments) is the same in the whole group. The same arguments give the same users.

    >>> [user.name for user in cohorts(3, {"short": TASTES["short"], "long": TASTES["long"]}, 0)]
    ['short-1', 'long-1', 'short-2']
    """
    users = []
    names = list(tastes)
    for number in range(count):
        cohort = names[number % len(names)]
        name = f"{cohort}-{number // len(names) + 1}"
        rng = random.Random(f"{seed}/{name}")
        taste = _vary(tastes[cohort], rng.gauss(0, spread / 3), math.exp(rng.gauss(0, spread)))
        users.append(User(name, taste, habits or Habits(), cohort))
    return tuple(users)


def _vary(taste: Taste, shift: float, factor: float) -> Taste:
    threshold = None if taste.threshold is None else min(max(taste.threshold + shift, 0.05), 0.95)
    shortest = max(1, round(taste.shortest * factor))
    longest = None if taste.longest is None else max(shortest, round(taste.longest * factor))
    return replace(taste, threshold=threshold, shortest=shortest, longest=longest)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a user will do whatever the answer is; drawn before the request."""

    cancel_after: float | None
    """Seconds after which the user types on; None: waits for the answer."""
    pause: float
    """Seconds before the request."""


class Act(StrEnum):
    """What a user does with a completion that was shown."""

    ACCEPT = "accept"
    REJECT = "reject"
    """Dismisses it by hand."""
    TIMEOUT = "timeout"
    """Looks at it until the client's clock runs out."""
    LATE_ACCEPT = "late accept"
    """Accepts it after the client's clock ran out."""
    UNRATED = "unrated"
    """Moves on before the client counts it as seen."""
    NOTHING = "nothing"
    """There was nothing to see."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a user does with a completion. Made by `decide`, eaten by the simulator."""

    act: Act
    seconds: float
    """Until it happens, after display; for a timeout the client's clock counts, not this."""
    cached: bool = False
    """The client showed it once more from its cache before the user reacted."""
    typed: int = 0
    """Characters of the completion that the user typed before that second display."""


def plan(user: User, rng: random.Random) -> Plan:
    """Draw what does not depend on the answer."""
    pause = rng.expovariate(1 / user.habits.pause) if user.habits.pause > 0 else 0.0
    cancels, after = rng.random() < user.habits.cancel, rng.uniform(0.02, 0.3)
    return Plan(cancel_after=after if cancels else None, pause=pause)


def decide(user: User, prompt: FimPrompt, completion: str, rng: random.Random) -> Reaction:
    """What `user` does with the displayed `completion` of `prompt`.

    Draws the same number of random values whatever the completion says, so two servers that answer
    differently still meet the same moods.
    """
    liking, moving, waiting, returning, typing = (rng.random() for _ in range(5))
    habits = user.habits
    # Continue reports nothing that was displayed for less than 0.5 s, and times out after 10 s;
    # both have acts of their own (unrated, timeout), so that no wire form favours one verdict.
    seconds = min(0.5 + rng.expovariate(1 / max(habits.reading - 0.5, 1e-3)), 9.0)
    if not completion:
        return Reaction(Act.NOTHING, 0.0)
    if moving < habits.unrated:
        return Reaction(Act.UNRATED, seconds)
    cached = returning < habits.cache
    # Typing through works only while what the user types is what the completion says.
    common = _common(completion, prompt.middle)
    typed = min(common, len(completion) - 1, 1 + int(typing * 6)) if cached else 0
    if liking < user.taste.chance(completion, prompt.middle):
        act = Act.LATE_ACCEPT if waiting < habits.late else Act.ACCEPT
    else:
        act = Act.TIMEOUT if waiting < habits.timeout else Act.REJECT
    return Reaction(act, seconds, cached, typed)


def _common(one: str, other: str) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
