"""What was counted before: a look counts again only what may have changed since.

Nearly all verdicts come within minutes of their answers. So the newest slices are counted at every look, and
the whole, where a late verdict may have changed an old slice, not before THRIFT times as long has passed as
it took: however busy the day, looking costs about a twentieth of a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from onlinerl.records import FeedbackStatus
from onlinerl.store import charts
from onlinerl.store.charts import Slice

RECENT = 1800.0
"""Seconds in which what is counted changes often."""
THRIFT = 20.0
"""Times as long as a whole count took pass before the next."""


@dataclass(slots=True)
class Past:
    """Of one process; looks at one policy and stretch of time come one after the other."""

    _found: dict[tuple[str, ...], tuple[float, Any]] = field(default_factory=dict)
    """By what was counted: when it may be counted again, by the monotonic clock, and what it was."""

    def traffic(
        self, c: Connection, *, policy: str, since: float, until: float, width: float, now: float
    ) -> list[Slice]:
        """As `charts.traffic`; `since` is a multiple of `width`."""

        def count(start: float) -> list[Slice]:
            return charts.traffic(c, policy=policy, since=start, until=until, width=width)

        name = ("traffic", policy, str(width))
        kept: list[Slice] = self._whole(name, lambda: count(since))
        recent = max(since, (now - RECENT) // width * width)
        found = [one for one in kept if since <= one.start < recent] + count(recent)
        self._found[name] = (self._found[name][0], found)
        return found

    def statuses(self, c: Connection, *, since: float, span: str) -> dict[FeedbackStatus, int]:
        """As `charts.statuses`."""
        found: dict[FeedbackStatus, int] = self._whole(
            ("statuses", span), lambda: charts.statuses(c, since=since)
        )
        return found

    def _whole(self, name: tuple[str, ...], count: Callable[[], Any]) -> Any:
        started = time.monotonic()
        again, found = self._found.get(name, (0.0, None))
        if found is None or started >= again:
            found = count()
            ended = time.monotonic()
            self._found[name] = (ended + min(THRIFT * (ended - started), RECENT / 2), found)
        return found
