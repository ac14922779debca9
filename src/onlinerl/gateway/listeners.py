"""GET /admin/v1/webhooks: whether those who are told what happens have heard it."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from onlinerl.config import Webhook
from onlinerl.gateway.bodies import JSONReply
from onlinerl.gateway.keys import Gate
from onlinerl.records import iso
from onlinerl.store import notices
from onlinerl.store.database import Database


class Listeners:
    """The endpoint."""

    def __init__(self, gate: Gate, database: Database, webhooks: tuple[Webhook, ...]) -> None:
        self._gate = gate
        self._database = database
        self._webhooks = webhooks

    async def list_(self, request: Request) -> Response:
        """GET /admin/v1/webhooks, in the order of the settings."""
        self._gate.allow(request)
        return JSONReply(await asyncio.to_thread(self._read))

    def _read(self) -> list[dict[str, Any]]:
        with self._database.read() as c:
            return [
                {
                    # the rest of an address may hold keys
                    "host": urlsplit(webhook.url).hostname or "",
                    "events": list(webhook.events),
                    "policies": [
                        {
                            "policy": one.policy,
                            "waiting": notices.waiting(c, one, webhook.events),
                            "delivered": one.delivered,
                            "dropped": one.dropped,
                            "failing_since": iso(one.failing_at),
                            "error": one.error,
                        }
                        for one in notices.state(c, notices.target(webhook.url))
                    ],
                }
                for webhook in self._webhooks
            ]
