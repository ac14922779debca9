"""Which interaction a piece of feedback means. Pure functions; the store and the answers under way give the
candidates.

By id where the client knows it. Else by what the client saw: the same prompt and the displayed text, or
(the client's cache, typing through a suggestion) a prompt that was never sent, whose text and completion
run together into the same line as an earlier prompt and its completion.

A wrong join teaches the wrong thing, a missing one only loses a sample: in doubt nothing is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onlinerl.records import Feedback, Interaction
from onlinerl.store.feedback import displayed_characters

Parse = Callable[[Interaction], "tuple[str, str] | None"]
"""(text before the cursor, text after it) of an interaction's prompt; None where it is no such prompt."""

OVERLAP = 64
"""Characters that two texts before the cursor must share at least where one of them was cut on the left."""


@dataclass(frozen=True, slots=True)
class Match:
    """The interaction that was meant."""

    interaction: Interaction
    displayed: int
    """Characters of the completion that the client showed."""
    by: str
    """`prompt` or `text`."""

    @property
    def key(self) -> tuple[str, int]:
        """Name of the interaction."""
        return self.interaction.id, self.interaction.index


def displayed(completion: str, text: str) -> int | None:
    """How many characters of `completion` the displayed `text` covers; None when it is another text.

    The text may be a beginning (the client cut the stream), and may lack the leading space (Continue).

    >>> displayed("return x", "retu"), displayed(" return x", "return x"), displayed("return x", "x")
    (4, 9, None)
    """
    if not text:
        return len(completion) if not completion.strip() else None
    return displayed_characters(completion, text)


def by_prompt(feedback: Feedback, candidates: Sequence[Interaction]) -> list[Match]:
    """Those of the candidates (same prompt) whose completion is what was displayed."""
    text = feedback.displayed_text
    if text is None:
        return []
    return [
        Match(one, length, "prompt")
        for one in candidates
        if (length := displayed(one.completion, text)) is not None
    ]


def by_text(feedback: Feedback, candidates: Sequence[Interaction], parse: Parse) -> list[Match]:
    """Those of the candidates (same text after the cursor) that run together into the same text.

    The feedback's prefix P' and text C', the candidate's prefix P and completion C: P' is P and the
    beginning of C (all of it typed through, none of it in a cache hit), and C' follows in C.
    """
    prefix, text = feedback.prefix, feedback.displayed_text
    if prefix is None or not text:
        return []
    matches = []
    for one in candidates:
        parts = parse(one)
        if parts is None or (feedback.suffix is not None and parts[1] != feedback.suffix):
            continue
        length = _continued(parts[0], one.completion, prefix, text)
        if length is not None:
            matches.append(Match(one, length, "text"))
    return matches


def _continued(prefix: str, completion: str, later: str, text: str) -> int | None:
    """Characters of `completion` typed or displayed; None when `later` + `text` do not continue it."""
    spaces = len(completion) - len(completion.lstrip(" "))
    for lead in {0, spaces}:  # a leading space that the client strips is neither shown nor typed
        shown = completion[lead:]
        place = shown.find(text)
        while place >= 0:
            for typed in (place, place - 1) if shown[place - 1 : place] == " " else (place,):
                # after typing, too, the rest may begin with a space that the client strips
                if _ends(later, shown[:typed]) and _same_end(prefix + shown[:typed], later):
                    return lead + place + len(text)
            place = shown.find(text, place + 1)
    return None


def _ends(text: str, end: str) -> bool:
    """Whether both end alike, as far as the shorter goes: cheap, and nearly always the answer is no."""
    return text.endswith(end) if len(end) <= len(text) else end.endswith(text)


def _same_end(one: str, other: str) -> bool:
    """Equal, or one is the other's end, long enough to be sure (clients cut prompts on the left)."""
    if len(one) == len(other):
        return one == other
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    return len(shorter) >= OVERLAP and longer.endswith(shorter)


def find(
    feedback: Feedback,
    same: Sequence[Interaction],
    near: Callable[[], Sequence[Interaction]],
    parse: Parse,
) -> Match | None:
    """The interaction that is meant, or None where that is not certain.

    same: candidates with the feedback's very prompt; near: those with its text after the cursor, asked for
    only when `same` does not settle it.

    Where the feedback's user is among those who asked, only that user's answers count. Where not (a client
    may name users in requests and not in feedback), all that fits must be of one user.
    """
    user = feedback.user
    prompted = _theirs(by_prompt(feedback, same), same, user)
    own = [match for match in prompted if user and match.interaction.user == user]
    if own:
        return min(own, key=_order)
    others = near()
    told = {match.key for match in prompted}
    texts = [match for match in by_text(feedback, others, parse) if match.key not in told]
    matches = prompted + _theirs(texts, others, user)
    matches = [match for match in matches if user and match.interaction.user == user] or matches
    if len({match.interaction.user for match in matches}) > 1:
        return None
    return min(matches, key=_order, default=None)


def _theirs(matches: list[Match], asked: Sequence[Interaction], user: str) -> list[Match]:
    """Only the user's own, where the user is among those who asked: somebody else's answer fits, but this
    user got another one."""
    if user and any(one.user == user for one in asked):
        return [match for match in matches if match.interaction.user == user]
    return matches


def _order(match: Match) -> tuple[bool, bool, bool, float, int]:
    """First those without a verdict, then those with the same prompt, displayed whole, the newest."""
    one = match.interaction
    return (
        one.verdict is not None,
        match.by != "prompt",
        match.displayed < len(one.completion),
        -one.at,
        one.index,
    )
