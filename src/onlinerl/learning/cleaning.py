"""What is not worth learning from: rules about requests, as pure functions, and a memory of what was learned.

One principle holds for all of them: **a rule chooses among requests, never among answers.** None looks at the
verdict, and what the policy answered (silence included) decides nothing; so shown and silent answers to a
request are dropped or kept alike, and cleaning moves neither the show rate nor which answers pay. The one
rule that compares answers drops a repeated one only where chance all but excludes the repetition, whatever
the answer was.

There is no rule against users who accept everything, or refuse everything, over a long time: that is what
somebody says for whom the policy is good, or bad. To drop them would make the numbers better and the policy
worse. How much one user may say is a matter of `trust`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from onlinerl import config
from onlinerl.datasets.sources import LONGEST_LINE, generated, minified
from onlinerl.records import Sample, text_hash
from onlinerl.text.templates import TEMPLATES

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "encoding": "requests whose text is broken (cleaning.broken)",
        "language": "requests in a language that is not in cleaning.languages",
        "short": "requests with too little text around the cursor (cleaning.shortest)",
        "minified": "requests from minified files (cleaning.minified)",
        "blob": "requests with encoded data around the cursor (cleaning.minified)",
        "generated": "requests from generated files (cleaning.generated)",
        "duplicate": "copies of an answer (cleaning.copies)",
        "repeated": "requests that a user made too often (cleaning.repeats)",
        "near_duplicate": "requests that a user made nearly the same too often (cleaning.repeats)",
        "burst": "requests of a user who judged more than a person can (cleaning.per_minute)",
        "bot": "requests of a user who judged faster than a person can (cleaning.fastest)",
    }
)
"""Why a sample is dropped, and a sentence for people."""

BROKEN = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")
"""Characters that no text file holds: controls (but tab, newline, return, form feed), the replacement
character, lone surrogates."""
BLOB = re.compile(r"[A-Za-z0-9+/=_-]{256,}")
"""As long as no name is: base64 or hex."""
BLOB_KINDS = 12
"""Different characters in a blob at least; a ruler of dashes has one."""
TYPED_SPACE = 0.1
"""Share of white space from which long lines are prose, not minified code (prose has 0.15, bundles 0.05)."""
BEFORE, AFTER = 200, 100
"""Characters before and after the cursor by which places are compared. The whole prompt would not do: its
window moves with the cursor, and half a file away most of it is still the same."""
SHINGLE = 3
"""Words in a row that are compared as one."""
MINUTE = 60.0
SURE = 20
"""Verdicts by hand from which on their median delay says something."""
_WORD = re.compile(r"\w+|\S")
Key = TypeVar("Key")


def around(prompt: str) -> tuple[str, str]:
    """Text before and after the cursor. A prompt that is no fill-in-the-middle has its cursor at the end.

    >>> around("<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>")
    ('def f(', '):')
    """
    for template in TEMPLATES:
        parts = template.parse(prompt)
        if parts is not None:
            return parts
    return prompt, ""


def fault(sample: Sample, rules: config.Cleaning) -> str:
    """What is wrong with a request by itself: one of REASONS, or ""."""
    before, after = around(sample.prompt)
    text = before + after
    if rules.broken is not None and len(BROKEN.findall(text)) > rules.broken * len(text):
        return "encoding"
    if rules.languages and sample.language and sample.language not in rules.languages:
        return "language"
    if sum(map(len, text.split())) < rules.shortest:
        return "short"
    if rules.minified:
        if any(len(set(blob)) >= BLOB_KINDS for blob in BLOB.findall(text)):
            return "blob"
        if _minified(text):
            return "minified"
    if rules.generated and generated(before):
        return "generated"
    return ""


def _minified(text: str) -> bool:
    """The rule for files, for a piece of text that may be prose (a paragraph is one long line, and some
    languages write it without spaces) or too short to have a mean."""
    ascii = text.encode("ascii", "ignore").decode("ascii")
    if len(ascii) < LONGEST_LINE:
        return False
    return minified(ascii) and sum(map(str.isspace, ascii)) < TYPED_SPACE * len(ascii)


# ------------------------------------------------------------------------------------------ repetition


def place(prompt: str) -> frozenset[int]:
    """Where the cursor stands, as the set of SHINGLE words in a row near it, on either side.

    Python's hashes stand for the words: they differ between processes, and mean something in one only.
    """
    before, after = around(prompt)
    found: set[int] = set()
    for side, text in (("<", before[-BEFORE:]), (">", after[:AFTER])):
        words = _WORD.findall(text)
        for start in range(max(1, len(words) - SHINGLE + 1)):
            found.add(hash((side, *words[start : start + SHINGLE])))
    return frozenset(found)


def near(one: frozenset[int], other: frozenset[int], similarity: float) -> bool:
    """Whether the Jaccard similarity |A ∩ B| / |A ∪ B| is at least `similarity`.

    >>> near(frozenset({1, 2, 3}), frozenset({2, 3, 4}), 0.5)
    True
    """
    few, many = sorted((len(one), len(other)))
    if few < similarity * many:
        return False  # it is at most few / many
    both = len(one & other)
    return both >= similarity * (few + many - both)


def prefix(place: frozenset[int], similarity: float) -> list[int]:
    """The first |A| − ⌈s·|A|⌉ + 1 of a place's shingles in the order of their numbers.

    Two places that are near have one of these in common, so only those that do must be compared (prefix
    filtering: Chaudhuri et al., ICDE 2006; Bayardo et al., WWW 2007).
    """
    # A hair less, so that a product that is rounded up loses nobody: more are compared, none fewer.
    least = math.ceil(similarity * len(place) - 1e-9)
    return sorted(place)[: len(place) - least + 1]


@dataclass(frozen=True, slots=True)
class _Learned:
    """What is remembered of a sample."""

    id: str
    user: str
    prompt: str
    """Its hash."""
    place: frozenset[int]
    answer: tuple[int, ...]


class _Own:
    """What is remembered of one user, to be found by prompt and by place."""

    def __init__(self, similarity: float) -> None:
        self.order: deque[_Learned] = deque()
        self._similarity = similarity
        self._prompts: defaultdict[str, deque[_Learned]] = defaultdict(deque)
        self._shingles: defaultdict[int, deque[_Learned]] = defaultdict(deque)

    def add(self, one: _Learned) -> None:
        self.order.append(one)
        self._prompts[one.prompt].append(one)
        for shingle in prefix(one.place, self._similarity):
            self._shingles[shingle].append(one)

    def forget_oldest(self) -> None:
        one = self.order.popleft()
        _forget_first(self._prompts, one.prompt)
        for shingle in prefix(one.place, self._similarity):
            _forget_first(self._shingles, shingle)

    def same(self, prompt: str) -> Sequence[_Learned]:
        return self._prompts.get(prompt, ())

    def near(self, place: frozenset[int]) -> Iterable[_Learned]:
        """Those at nearly that place, each once or more."""
        for shingle in prefix(place, self._similarity):
            for one in self._shingles.get(shingle, ()):
                if near(one.place, place, self._similarity):
                    yield one


def _forget_first(index: dict[Key, deque[_Learned]], key: Key) -> None:
    # Everything is in the order of time: what is the oldest of a user is the first wherever it stands.
    index[key].popleft()
    if not index[key]:
        del index[key]


class Recent:
    """The last samples that were learned from, `cleaning.window` of them over all users."""

    def __init__(self, rules: config.Cleaning) -> None:
        self.rules = rules
        self._order: deque[_Learned] = deque()
        self._of: dict[str, _Own] = {}
        self._here: tuple[str, frozenset[int]] = ("", frozenset())
        """The prompt that was looked at last, and its place: one that is added was looked at just before."""

    @property
    def needed(self) -> bool:
        """Whether any rule looks at it."""
        return self.rules.copies > 0 or self.rules.repeats is not None

    def __len__(self) -> int:
        return len(self._order)

    def fault(self, sample: Sample) -> str:
        """What of the sample was there before: one of REASONS, or "".

        `duplicate`: the user got the same answer to the same prompt before, and among n answers to it
        n·p ≤ `cleaning.copies` of this one were to be expected, p = exp(Σ behavior_logprobs) being its
        probability. So it is no second draw but a copy: an import done twice, a request that was replayed,
        a client that fixes the seed. A likely answer, such as silence, may come again as often as it likes.

        `repeated` and `near_duplicate`: the window holds `cleaning.repeats` requests of the user for this
        prompt, or for places that are nearly this one. The answers play no part.
        """
        rules = self.rules
        mine = self._of.get(sample.user)
        if mine is None:
            return ""
        same = mine.same(text_hash(sample.prompt))
        if rules.copies > 0 and any(one.answer == sample.completion_ids for one in same):
            chance = math.exp(min(0.0, sum(sample.behavior_logprobs)))
            if len(same) * chance <= rules.copies:
                return "duplicate"
        if rules.repeats is None:
            return ""
        requests = {one.id for one in same} - {sample.id}
        if len(requests) >= rules.repeats:
            return "repeated"
        if rules.similarity < 1.0 and len(mine.order) >= rules.repeats:
            for one in mine.near(self._place(sample.prompt)):
                if one.id != sample.id:
                    requests.add(one.id)
                if len(requests) >= rules.repeats:
                    return "near_duplicate"
        return ""

    def add(self, sample: Sample) -> None:
        """It is learned from; the oldest is forgotten where the window is full."""
        here = self._place(sample.prompt)
        one = _Learned(sample.id, sample.user, text_hash(sample.prompt), here, sample.completion_ids)
        self._order.append(one)
        if one.user not in self._of:
            self._of[one.user] = _Own(self.rules.similarity)
        self._of[one.user].add(one)
        if len(self._order) > self.rules.window:
            oldest = self._order.popleft()
            own = self._of[oldest.user]
            own.forget_oldest()
            if not own.order:
                del self._of[oldest.user]

    def _place(self, prompt: str) -> frozenset[int]:
        if self._here[0] != prompt:
            self._here = (prompt, place(prompt))
        return self._here[1]


# ------------------------------------------------------------------------------------ bots and bursts


def bursts(times: Iterable[float], most: int, span: float = MINUTE) -> list[tuple[float, float]]:
    """Stretches of time, (first, last), in which more than `most` of `times` lie within `span` seconds.

    `times` are in seconds: when the answers were asked for that one user judged by hand. (When the verdicts
    came in says less: a client that was offline sends an hour's verdicts at once.)

    >>> bursts([0, 100, 101, 102, 103, 200], most=3)
    [(100, 103)]
    """
    ordered = sorted(times)
    found: list[tuple[float, float]] = []
    first = 0
    for last, time in enumerate(ordered):
        while time - ordered[first] > span:
            first += 1
        if last - first + 1 > most:
            if found and ordered[first] <= found[-1][1]:
                found[-1] = (found[-1][0], time)
            else:
                found.append((ordered[first], time))
    return found


def inhuman(delays: Sequence[float], least: float) -> bool:
    """Whether verdicts by hand came faster than a person can read: their median is under `least` seconds,
    over SURE of them or more. `delays` are from request to verdict."""
    return len(delays) >= SURE and statistics.median(delays) < least


class Pace:
    """How fast each user judges. An owner's verdicts may come from a script, and are not looked at; neither
    are those of requests that name no user, since many may stand behind them."""

    def __init__(
        self,
        asked: Mapping[str, Sequence[float]],
        delays: Mapping[str, Sequence[float]],
        rules: config.Cleaning,
    ) -> None:
        """`asked`: by user, when the requests were made whose answers they judged by hand; `delays`: by user,
        the seconds from request to verdict. Both empty: nobody is too fast."""
        most = rules.per_minute
        self._bursts = {} if most is None else {user: bursts(times, most) for user, times in asked.items()}
        self._bots = {user for user, those in delays.items() if inhuman(those, rules.fastest)}

    def fault(self, sample: Sample) -> str:
        """`bot`, `burst` or "": all that the user asked for in that stretch, silent answers too."""
        if not sample.user:
            return ""
        if sample.user in self._bots:
            return "bot"
        stretches = self._bursts.get(sample.user, ())
        return "burst" if any(first <= sample.at <= last for first, last in stretches) else ""


# ------------------------------------------------------------------------------------------ all of them


def sift(
    samples: Sequence[Sample], rules: config.Cleaning, pace: Pace, recent: Recent
) -> tuple[list[Sample], dict[str, list[Sample]]]:
    """(those that are worth learning from, the others by their reason). `recent` gets to know the former.

    The order counts: of repetitions the first stay. So give them in the order in which they were served.
    """
    kept: list[Sample] = []
    left_out: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        reason = fault(sample, rules) or pace.fault(sample) or recent.fault(sample)
        if reason:
            left_out[reason].append(sample)
        else:
            kept.append(sample)
            recent.add(sample)
    return kept, left_out
