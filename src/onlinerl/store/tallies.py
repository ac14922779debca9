"""Running counts by policy and version, kept by the very transactions that change what they count."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from onlinerl.store.schema import tallies as table

NAMES = ("opportunities", "shown", "silent", "accepted", "rejected", "timeout")


# Statements on the path of every request are built once: building one costs as much as running it.
_ADD = (
    table.update()
    .where(table.c.policy == sa.bindparam("of_policy"), table.c.version == sa.bindparam("of_version"))
    .values({name: table.c[name] + sa.bindparam(f"more_{name}") for name in NAMES})
)
_INSERT = table.insert()


def add(c: Connection, policy: str, version: int, **changes: int) -> None:
    """Add to counts of NAMES; a change may be negative."""
    more = {f"more_{name}": changes.get(name, 0) for name in NAMES}
    updated = c.execute(_ADD, {"of_policy": policy, "of_version": version, **more})
    if updated.rowcount == 0:
        row = dict.fromkeys(NAMES, 0) | changes
        c.execute(_INSERT, {"policy": policy, "version": version, **row})


def totals(c: Connection, policy: str) -> dict[str, int]:
    """The counts of a policy over all its versions."""
    sums = [sa.func.coalesce(sa.func.sum(table.c[name]), 0).label(name) for name in NAMES]
    return dict(c.execute(sa.select(*sums).where(table.c.policy == policy)).one()._mapping)


def by_version(c: Connection, policy: str) -> list[dict[str, Any]]:
    """One mapping a version: `version` and NAMES."""
    columns = [table.c[name] for name in ("version", *NAMES)]
    query = sa.select(*columns).where(table.c.policy == policy).order_by(table.c.version)
    return [dict(row._mapping) for row in c.execute(query)]
