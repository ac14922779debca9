"""The default judge: how near a completion is to what the author wrote, less what is wrong with it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from onlinerl.datasets.fim import FimPrompt
from onlinerl.datasets.users import repeats
from onlinerl.learning.judges.base import HIGHEST, Judgement, closeness
from onlinerl.learning.judges.syntax import parses

WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"similarity": 0.4, "first_line": 0.2, "parse": 0.25, "repetition": 0.15}
)
"""Shares of the ten points.

similarity: most, since it is the only part that says what was meant. first_line: the line that a user
reads first and takes or refuses by; counted from the cursor on, since a text is of use up to its first
mistake. parse: a completion that breaks the file costs the user a repair, whatever it looks like.
repetition: least, for it also lowers the similarity; it is there because the base model repeats (its card).
"""


class ReferenceJudge:
    """Four parts of a score between 0 and 10 that add up to it.

    With s the similarity, f the share of the first line that is right from its start, p = 1 when the text
    joined with the completion has no more syntax errors than with the author's, r = 1 when nothing is said
    again, and c the mean of s and f under their WEIGHTS:

        score = 10 · (w_s·s + w_f·f + c·(w_p·p + w_r·r))

    So whether a text parses counts only as far as it is the right text: a comment or a `pass` parses
    always, and would be worth four points if the parts were just added. Without a grammar for the language
    w_p is 0, the other weights grow to add up to 1, and `parts` has no `parse`.
    """

    name = "reference"

    async def judge(self, pairs: Sequence[tuple[FimPrompt, str]]) -> list[Judgement]:
        """Never fails."""
        return [self.score(prompt, completion) for prompt, completion in pairs]

    def score(self, prompt: FimPrompt, completion: str) -> Judgement:
        """One judgement, without waiting: about a millisecond of one core for 2,048 characters around."""
        if not completion.strip() or not prompt.middle.strip():
            both = not completion.strip() and not prompt.middle.strip()
            return Judgement(
                HIGHEST if both else 0.0, MappingProxyType({"silence": HIGHEST if both else 0.0})
            )
        shares = {
            "similarity": closeness(completion, prompt.middle),
            "first_line": first_line(completion, prompt.middle),
        }
        weight = sum(WEIGHTS[name] for name in shares)
        near = sum(WEIGHTS[name] * share for name, share in shares.items()) / weight
        found = parses(prompt, completion)
        if found is not None:
            shares["parse"] = near * found
        shares["repetition"] = near * (not says_again(prompt, completion))
        whole = sum(WEIGHTS[name] for name in shares)
        parts = {name: HIGHEST * WEIGHTS[name] / whole * share for name, share in shares.items()}
        return Judgement(min(HIGHEST, sum(parts.values())), MappingProxyType(parts))


def first_line(completion: str, middle: str) -> float:
    """Share of the first line that is right from its start, in [0, 1].

    The common beginning of both first lines over the length of the longer one, space around them aside.

    >>> first_line("return 2 * y", "return 2 * x\\n"), first_line("x = 1", "return 2")
    (0.9166666666666666, 0.0)
    """
    one = completion.strip().partition("\n")[0].rstrip()
    other = middle.strip().partition("\n")[0].rstrip()
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same) / max(len(one), len(other), 1)


def says_again(prompt: FimPrompt, completion: str) -> bool:
    """True when the completion repeats itself, the line above it or the line below it, and the author's
    middle does not.

    >>> says_again(FimPrompt("x = 1\\n", "y = 2\\n", "z = 3\\n"), "x = 1\\n")
    True
    """
    return _says_again(prompt, completion) and not _says_again(prompt, prompt.middle)


def _says_again(prompt: FimPrompt, text: str) -> bool:
    lines = [line.strip() for line in text.strip().split("\n")]
    above = prompt.prefix.rpartition("\n")[0].rstrip().rpartition("\n")[2].strip()
    below = prompt.suffix.partition("\n")[2] if not prompt.suffix.startswith("\n") else prompt.suffix
    below = below.lstrip().partition("\n")[0].strip()
    return repeats(text.strip()) or lines[0] == above != "" or lines[-1] == below != ""
