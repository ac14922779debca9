"""A gateway whose versions have real files, and what the tests of the controller's interface share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from onlinerl.store import versions
from onlinerl.weights import directory
from tests.gateways import ADMIN_KEY, CODEC, Gateway, running
from tests.versions import make_version, tiny_model

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
BASE = "/admin/v1/policies/tab"
PROMPT = "def f(x):\n    return "
ANSWER = "x + 1"


@contextlib.asynccontextmanager
async def controlled(home: Path, *overrides: str) -> AsyncIterator[Gateway]:
    """A gateway of the policy `tab` with version 0 live and version 1 a candidate, their files on disk."""
    async with running(home, *overrides, versions_=()) as gateway:
        base = directory.import_base(gateway.settings.weights_url, "tab", tiny_model(home / "model"))
        with gateway.database.write() as c:
            versions.register(c, base)
        make_version(gateway.settings, gateway.database)
        yield gateway


def pushed(id: str, **changes: Any) -> dict[str, Any]:
    """An interaction as a controller pushes it; `...` takes a field away."""
    ids = [*CODEC.encode(ANSWER), CODEC.eos_ids[0]]
    item = {
        "id": id,
        "version": 0,
        "prompt_ids": CODEC.encode(PROMPT),
        "completion_ids": ids,
        "behavior_logprobs": [-0.5] * len(ids),
        "user": "u1",
        **changes,
    }
    return {name: value for name, value in item.items() if value is not ...}
