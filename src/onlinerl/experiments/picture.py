"""An interval that narrows over time, in characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onlinerl.records import Decision

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Point:
    """One look. Made by `points`."""

    low: float
    estimate: float
    high: float


def points(decisions: Sequence[Decision]) -> list[Point]:
    """The looks of the newest stage that has any with an interval, oldest first.

    Each stage is analysed by itself, so that intervals of two stages make no one picture.
    """
    looks = [one for one in decisions if {"low", "estimate", "high"} <= one.numbers.keys()]
    return [
        Point(one.numbers["low"], one.numbers["estimate"], one.numbers["high"])
        for one in looks
        if one.stage == looks[-1].stage
    ]


def sparkline(looks: Sequence[Point], width: int = 12) -> str:
    """How wide the interval was: it falls as the answer comes near.

    >>> sparkline([Point(-8, 0, 8), Point(-4, 1, 4), Point(-1, 1, 3)])
    '█▄▂'
    """
    widths = [look.high - look.low for look in _thinned(looks, width)]
    top = max(widths, default=0.0) or 1.0
    return "".join(BLOCKS[max(0, -int(-len(BLOCKS) * one / top // 1) - 1)] for one in widths)


def chart(looks: Sequence[Point], width: int = 60, height: int = 9) -> list[str]:
    """Lines of a picture, the largest value first: │ is the interval, ● the estimate, ─ and ┼ no difference.

    Numbers are points: 100 times the reward per opportunity. It shows what is within twice the newest
    interval's width of it and of 0; early ones are wider than that.

    >>> print("\\n".join(chart([Point(-0.02, 0, 0.03), Point(0, 0.01, 0.02)], height=6)))
     +3.0 │
          ││
          │●
     +0.0 ●┼
          │
     -2.0 │
    """
    if not looks:
        return []
    shown = _thinned(looks, width)
    last = looks[-1]
    room = 2 * (last.high - last.low)
    top = max(min(max(look.high for look in shown), last.high + room), 0.0)
    bottom = min(max(min(look.low for look in shown), last.low - room), 0.0)
    step = (top - bottom) / (height - 1) or 1.0

    def row(value: float) -> int:
        return round((top - value) / step)

    lines = []
    for place in range(height):
        outside, inside = ("─", "┼") if place == row(0.0) else (" ", "│")
        cells = [
            "●"
            if place == row(look.estimate)
            else inside
            if row(look.high) <= place <= row(look.low)
            else outside
            for look in shown
        ]
        told = {0: top, height - 1: bottom, row(0.0): 0.0}
        label = f"{100 * told[place]:+.1f}" if place in told else ""
        lines.append(f"{label:>5} {''.join(cells)}".rstrip())
    return lines


def _thinned(looks: Sequence[Point], width: int) -> Sequence[Point]:
    """At most `width` of them, evenly, the newest among them."""
    if len(looks) <= width:
        return looks
    return [looks[-1 - place * (len(looks) - 1) // (width - 1)] for place in reversed(range(width))]
