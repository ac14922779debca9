"""Versions as a drawn line of descent, as version control draws its history. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knot:
    """One row of the drawing. Made by `lanes`, eaten by the page."""

    lane: int
    """Where the version's dot stands."""
    joins: tuple[int, ...]
    """Lanes that come down from children and end at the dot."""
    through: tuple[int, ...]
    """Lanes that pass by."""
    leaves: bool
    """A lane goes on down to the parent."""


def lanes(descent: Sequence[tuple[int, int | None]]) -> list[Knot]:
    """Rows for (version, parent) pairs, given and drawn newest first; a parent stands below its children.

    >>> lanes([(2, 0), (1, 0), (0, None)])[1]
    Knot(lane=1, joins=(), through=(0,), leaves=True)
    """
    awaited: list[int | None] = []  # by lane, the version that it leads to
    knots = []
    for version, parent in descent:
        joins = tuple(lane for lane, wanted in enumerate(awaited) if wanted == version)
        if joins:
            lane = joins[0]
        elif None in awaited:
            lane = awaited.index(None)
        else:
            lane = len(awaited)
            awaited.append(None)
        for ended in joins:
            awaited[ended] = None
        through = tuple(other for other, wanted in enumerate(awaited) if wanted is not None)
        awaited[lane] = parent
        while awaited and awaited[-1] is None:
            awaited.pop()
        knots.append(Knot(lane, joins, through, parent is not None))
    return knots
