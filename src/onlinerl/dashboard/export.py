"""Interactions as CSV, and the links that download them without a key in their address."""

from __future__ import annotations

import csv
import hashlib
import hmac
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlencode

from onlinerl.dashboard.views import worth_of
from onlinerl.errors import Forbidden
from onlinerl.records import iso
from onlinerl.store.charts import Served

VALID = 60.0
"""Seconds in which a link must be followed; the download itself may take longer."""
ROWS = 200
"""Rows that are written together."""
COLUMNS = (
    "id", "index", "at", "seconds", "version", "arm", "experiment", "project", "user", "language", "kind",
    "finish", "verdict", "verdict_source", "verdict_at", "score", "reward", "trained", "use", "dropped",
    "untrainable", "run", "tokens", "logprob", "completion",
)  # fmt: skip
"""`reward` is what a run trained with (`trained` 1), else what the verdict is worth at the page's τ;
`logprob` is the sum over the answer's tokens."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be downloaded. Made by the page, with the key; signed, it is the link."""

    policy: str
    since: float
    until: float
    tau: float
    expires: int

    def signature(self, key: str) -> str:
        """HMAC-SHA256 of all its fields: any process that has the admin key can check it."""
        text = repr((self.policy, self.since, self.until, self.tau, self.expires))
        return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()

    def query(self, key: str) -> str:
        """As the query of a URL."""
        fields = {name: getattr(self, name) for name in ("policy", "since", "until", "tau", "expires")}
        return urlencode({**fields, "signature": self.signature(key)})

    def check(self, key: str, signature: str, now: float) -> None:
        """Raise Forbidden for a link that was not made here, or is too old."""
        if not hmac.compare_digest(self.signature(key), signature):
            raise Forbidden("this link was not made by this server; export again from the dashboard")
        if now > self.expires:
            raise Forbidden("this link is no longer valid; export again from the dashboard")


def rows(served: Iterable[Served], *, tau: float, weight: float, code: bool) -> Iterator[str]:
    """The file, piece by piece, its header first. code: whether completions are in it."""
    columns = COLUMNS if code else COLUMNS[:-1]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for number, one in enumerate(served, start=1):
        writer.writerow([_cell(value) for value in _values(one, tau, weight)][: len(columns)])
        if number % ROWS == 0:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _values(one: Served, tau: float, weight: float) -> list[object]:
    value = worth_of(one, tau, weight)
    return [
        one.id, one.index, iso(one.at), round(one.finished_at - one.at, 3), one.version, one.arm,
        one.experiment, one.project, one.user, one.language, one.kind, one.finish, one.verdict,
        one.verdict_source, iso(one.verdict_at), one.score, value["reward"], int(value["trained"]), one.use,
        one.dropped, one.untrainable, one.run, len(one.logprobs), round(sum(one.logprobs), 4),
        one.completion,
    ]  # fmt: skip


def _cell(value: object) -> object:
    """Text that a spreadsheet would take for a formula gets an apostrophe: clients choose users and text."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
