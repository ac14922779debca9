"""Tells others what happens: posts the store's history to the `webhooks`, signed, until they have it.

Each event goes out at least once, with an id by which the receiver tells a repetition, and the events of one
policy in order: while one of them is refused the later ones of that policy wait. One is given up when it has
been tried for KEEP. A restart goes on where the store says that each receiver has come to.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import time
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

import httpx
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential, wait_random

import onlinerl
from onlinerl.config import Settings, Webhook
from onlinerl.errors import SettingsError, StoreError
from onlinerl.observe import WEBHOOKS, logger
from onlinerl.records import Notice
from onlinerl.store import notices
from onlinerl.store.database import Database
from onlinerl.store.notices import Place

SIGNATURE = "x-onlinerl-signature"
LOOK = 0.5
"""Seconds between two looks at the store."""
TIMEOUT = 10.0
"""Seconds that a receiver may take to answer."""
FIRST_DELAY = 1.0
"""Seconds before the second attempt; doubled each time, up to LONGEST_DELAY."""
LONGEST_DELAY = 300.0
KEEP = 3 * 86_400.0
"""Seconds after which an event that a receiver does not take is given up, however often it was tried."""
_BATCH = 100

log = logger(component="webhooks")


class Refused(Exception):
    """The receiver answered with something else than 2xx."""


def sign(secret: str, body: bytes, now: float) -> str:
    """`t=SECONDS,v1=HEX`: the HMAC-SHA256, by the secret, of the seconds, a dot and the body."""
    at = str(int(now))
    digest = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def secrets_of(settings: Settings) -> dict[str, str]:
    """The webhooks' keys, by URL. Raises SettingsError where the environment lacks one."""
    found = {}
    for number, webhook in enumerate(settings.webhooks):
        value = os.environ.get(webhook.secret, "")
        if not value:
            # Without its name: who wrote the key itself there must not find it in a log.
            raise SettingsError(
                f"webhooks.{number}.secret must name an environment variable that holds the key, and the one "
                "that it names is not set"
            )
        found[webhook.url] = value
    return found


class Webhooks:
    """All webhooks of an installation: `run()` until cancelled."""

    def __init__(self, settings: Settings, database: Database) -> None:
        """Raises SettingsError where a secret is missing."""
        self._secrets = secrets_of(settings)
        self._webhooks = settings.webhooks
        self._policies = tuple(settings.policies)
        self._database = database

    async def run(self) -> None:
        """Tell everybody, each receiver and policy at its own pace."""
        await asyncio.to_thread(self._enrol)
        async with httpx.AsyncClient(timeout=TIMEOUT) as client, asyncio.TaskGroup() as group:
            for webhook in self._webhooks:
                for policy in self._policies:
                    teller = Teller(webhook, policy, self._secrets[webhook.url], self._database, client)
                    group.create_task(teller.run())

    def _enrol(self) -> None:
        with self._database.write() as c:
            notices.enrol(c, [notices.target(webhook.url) for webhook in self._webhooks], self._policies)


class Teller:
    """Tells one receiver about one policy."""

    def __init__(
        self, webhook: Webhook, policy: str, secret: str, database: Database, client: httpx.AsyncClient
    ) -> None:
        self._webhook = webhook
        self._policy = policy
        self._secret = secret
        self._database = database
        self._client = client
        self._target = notices.target(webhook.url)
        self._host = urlsplit(webhook.url).hostname or ""
        """All of the address that is ever logged: the rest may hold keys."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                told = await self.tick()
            except StoreError as error:  # isolated: the next look may find the disk free again
                log.warning("webhook waits", host=self._host, policy=self._policy, error=str(error))
                told = 0
            if told < _BATCH:
                await asyncio.sleep(LOOK)

    async def tick(self) -> int:
        """Tell what there is; returns how much of history that was."""
        found = await asyncio.to_thread(self._read)
        for number, (notice, place) in enumerate(found):
            if notice.type.partition(".")[0] in self._webhook.events:
                delivered = await self._deliver(notice)
                outcome = {"delivered": 1} if delivered else {"dropped": 1}
                await asyncio.to_thread(self._keep, place, outcome)
            elif number == len(found) - 1:  # what it does not want costs no transaction each
                await asyncio.to_thread(self._keep, place, {})
        return len(found)

    async def _deliver(self, notice: Notice) -> bool:
        """Post it until it is taken; False once it is older than KEEP and still is not."""
        attempts = AsyncRetrying(
            wait=wait_exponential(multiplier=FIRST_DELAY, max=LONGEST_DELAY) + wait_random(0, FIRST_DELAY),
            stop=lambda state: time.time() - notice.at > KEEP,
            retry=retry_if_exception_type((httpx.HTTPError, Refused)),
            before_sleep=partial(self._failed, notice),
            retry_error_callback=partial(self._given_up, notice),
        )
        return bool(await attempts(self._post, notice))

    async def _post(self, notice: Notice) -> bool:
        body = orjson.dumps(notice.describe())
        headers = {
            "content-type": "application/json",
            "user-agent": f"onlinerl/{onlinerl.__version__}",
            SIGNATURE: sign(self._secret, body, time.time()),
        }
        async with self._client.stream("POST", self._webhook.url, content=body, headers=headers) as reply:
            if not reply.is_success:  # what it says is not read: it may be long, and hold anything
                raise Refused(f"it answered {reply.status_code}")
        WEBHOOKS.labels("delivered").inc()
        return True

    async def _failed(self, notice: Notice, state: RetryCallState) -> None:
        WEBHOOKS.labels("failed").inc()
        error = _words(state)
        await asyncio.to_thread(self._keep_failure, error)
        log.warning("webhook failed", host=self._host, policy=self._policy, notice=notice.id, error=error)

    def _given_up(self, notice: Notice, state: RetryCallState) -> bool:
        WEBHOOKS.labels("dropped").inc()
        log.error(
            "webhook given up", host=self._host, policy=self._policy, notice=notice.id, error=_words(state)
        )
        return False

    def _read(self) -> list[tuple[Notice, Place]]:
        with self._database.read() as c:
            place = notices.place(c, self._target, self._policy)
            return notices.after(c, self._policy, place, _BATCH)

    def _keep(self, place: Place, outcome: Mapping[str, int]) -> None:
        with self._database.write() as c:
            notices.told(c, self._target, self._policy, place, **outcome)

    def _keep_failure(self, error: str) -> None:
        with self._database.write() as c:
            notices.failed(c, self._target, self._policy, error, time.time())


def _words(state: RetryCallState) -> str:
    """Why an attempt failed. Of the transport's errors the name alone: their text may hold the address."""
    error = state.outcome.exception() if state.outcome else None
    return str(error) if isinstance(error, Refused) else type(error).__name__
