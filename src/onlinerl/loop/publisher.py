"""Puts versions into a policy's engines, and says which one new requests get.

The store says what should be live; this module makes it true without stopping or failing a request:
weights are loaded into every reachable engine first, and only then does `live` change. Nothing here waits
for an engine on the way to that change, so a rollback to a version that is loaded takes effect within one
look at the store, whatever the engines are doing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from onlinerl import config
from onlinerl.engines.pool import Member, Pool
from onlinerl.errors import (
    Conflict,
    EngineError,
    EngineUnavailable,
    NotFound,
    StoreError,
    Unfit,
    WeightsError,
)
from onlinerl.observe import LIVE_VERSION, LOAD_FAILURES, PUBLISH, logger
from onlinerl.records import Arm, Experiment, Version, VersionState
from onlinerl.store import experiments
from onlinerl.store import versions as store
from onlinerl.store.database import Database
from onlinerl.weights import directory

LOOK = 0.1
"""Seconds between two looks at the store."""
TEND = 1.0
"""Seconds between two looks at an engine that nothing is known to have happened to."""
RETRY = 5.0
"""Seconds before an engine is asked again to load what it failed to load."""
STRAGGLER = 10.0
"""Seconds that a version which some engine holds waits for the others before it goes live without them."""
PIN_REST = 10.0
"""Seconds after its last use in which a pinned version, or an experiment's arm, is not unloaded."""
ENSURE_TIMEOUT = 60.0
"""Seconds that a request for a pinned version waits for its weights."""

log = logger(component="publisher")


def successor(versions: Mapping[int, Version]) -> Version | None:
    """The newest candidate of a policy (by id), where it may take the live version's place by itself.

    It must be newer than whatever was live before (after a rollback no skipped candidate springs to life),
    and it must not descend from a version that was taken back.
    """
    candidates = [version for version in versions.values() if version.state is VersionState.CANDIDATE]
    candidate = max(candidates, key=lambda version: version.id, default=None)
    newest_lived = max((v.id for v in versions.values() if v.live_at is not None), default=-1)
    if candidate is None or candidate.id < newest_lived:
        return None
    live = next((version for version in versions.values() if version.state is VersionState.LIVE), None)
    ancestor = candidate.parent
    while ancestor is not None and ancestor in versions:
        version = versions[ancestor]
        if live is None or version.id == live.id:
            return candidate
        if version.live_at is not None or version.state is VersionState.REJECTED:
            return None
        ancestor = version.parent
    return candidate if live is None else None


class Publisher:
    """One policy's publisher. `run()` until cancelled, or `tick()` by hand: one full round."""

    def __init__(self, policy: str, settings: config.Policy, database: Database, pool: Pool) -> None:
        self.policy = policy
        self.live: int | None = None
        """The version that new requests get; None until an engine holds one."""
        self._settings = settings
        self._database = database
        self._pool = pool
        self._versions: Mapping[int, Version] = {}
        self._previous: int | None = None
        """What a rollback would bring back."""
        self._mark: tuple[int, int, int] | None = None
        self._open: tuple[Experiment, ...] = ()
        """Experiments of all policies that run: ours may serve in another one's."""
        self._arms: dict[int, float] = {}
        """Versions of ours that experiments serve, and when they were last seen to."""
        self._first_held: dict[int, float] = {}
        self._failed: dict[tuple[str, int], float] = {}
        self._broken: dict[int, str] = {}
        self.unfit = ""
        """Why no engine can serve the policy's first model, as an engine said of it."""
        self._pins: dict[int, float] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------------------ for the gateway

    def exists(self, version: int) -> bool:
        """Whether the policy has that version, loaded or not."""
        if version not in self._versions:
            with self._database.read() as c:
                return store.find(c, self.policy, version) is not None
        return True

    @property
    def experiment(self) -> Experiment | None:
        """The policy's experiment whose arms requests are assigned to now."""
        own = self._own()
        return own if own is not None and own.begun else None

    @property
    def ready(self) -> bool:
        """Whether a request would find an engine now."""
        return self.live is not None and self.live in self._pool.servable()

    async def ensure(self, version: int) -> None:
        """Return once some engine holds `version`, which a request pins.

        Raises NotFound for a version that does not exist, Conflict for one whose weights are broken,
        EngineUnavailable when no engine could take it in time.
        """
        now = time.monotonic()
        if version not in self._pool.servable():
            if not self.exists(version):
                raise NotFound(f"the policy {self.policy} has no version {version}", code="model_not_found")
            self._refuse_broken(version)
            recent = [pin for pin, used in self._pins.items() if pin != version and now - used < PIN_REST]
            if len(recent) >= max(1, self._settings.engine.resident - 2):
                raise EngineUnavailable(
                    f"{len(recent)} other pinned versions of {self.policy} are in use; try again soon",
                    retry_after=PIN_REST,
                )
        self._pins[version] = now
        if version not in self._pool.servable():
            self.wake()
            try:
                async with asyncio.timeout(ENSURE_TIMEOUT):
                    await self._until_held(version)
            except TimeoutError:
                raise EngineUnavailable(
                    f"version {version} of {self.policy} could not be loaded in time"
                ) from None

    async def _until_held(self, version: int) -> None:
        while version not in self._pool.servable():
            self._refuse_broken(version)
            self._changed.clear()
            await self._changed.wait()

    def holds(self, version: int) -> bool:
        """Whether a request for it would find an engine now."""
        return version in self._pool.servable()

    def _refuse_broken(self, version: int) -> None:
        fault = self.fault(version)
        if fault is not None:
            raise Conflict(f"version {version} of {self.policy} cannot be served: {fault}")

    def fault(self, id: int) -> str | None:
        """Why no engine can ever load that version; None: nothing is known against it."""
        version = self._versions.get(id)
        if version is not None and version.collected_at is not None:
            return "its files were collected by gc"
        return self._broken.get(id)

    # --------------------------------------------------------------------------- for the supervisor

    def wake(self, engine: str | None = None) -> None:
        """Look at that engine now (None: at all of them): it started, or something is wanted of it."""
        for name, event in self._wake.items():
            if engine in (None, name):
                event.set()

    def lost(self, engine: str) -> None:
        """That engine's process is gone: count on nothing that it held."""
        for member in self._pool.engines:
            if member.name == engine:
                member.lost()
        self._decide()

    # ------------------------------------------------------------------------------------ the rounds

    async def run(self) -> None:
        """Follow the store and the engines."""
        tending: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    await self._look()
                except StoreError as error:  # isolated: what is loaded goes on serving
                    log.warning("publisher cannot read the store", policy=self.policy, error=str(error))
                engines = {engine.name: engine for engine in self._pool.engines}
                for name in tending.keys() - engines.keys():
                    tending.pop(name).cancel()
                for name in engines.keys() - tending.keys():
                    tending[name] = asyncio.create_task(self._tend_forever(engines[name]))
                for task in tending.values():
                    if task.done():
                        task.result()  # a fault in this very code: let it be seen
                await asyncio.sleep(LOOK)
        finally:
            for task in tending.values():
                task.cancel()
            await asyncio.gather(*tending.values(), return_exceptions=True)

    async def tick(self) -> None:
        """One full round: read the store, bring every engine up to date, let the newest candidate go live."""
        await self._look()
        await asyncio.gather(*(self._tend(engine) for engine in self._pool.engines))
        await self._look()

    async def _look(self) -> None:
        """Read the store, decide what is live, promote a candidate that may go live at once and is loaded."""
        before = self._wanted()
        await asyncio.to_thread(self._read)
        now = time.monotonic()
        self._arms = {arm: seen for arm, seen in self._arms.items() if now - seen < PIN_REST}
        self._arms |= dict.fromkeys(self._assigned(), now)
        candidate = self._publishable()
        if candidate is not None and self._ready(candidate.id):
            await asyncio.to_thread(self._promote, candidate)
        self._decide()
        if self._wanted() != before:
            self.wake()

    def _read(self) -> None:
        with self._database.read() as c:
            mark = store.mark(c)
            if mark == self._mark:
                return
            self._versions = {version.id: version for version in store.list_(c, self.policy)}
            previous = store.previous(c, self.policy)
            self._previous = None if previous is None else previous.id
            self._open = tuple(experiments.open_(c))
            self._mark = mark

    def _own(self) -> Experiment | None:
        return next((one for one in self._open if one.policy == self.policy), None)

    def _assigned(self) -> list[int]:
        """Versions that requests are assigned to beside the live one: arms, and the hold-out's."""
        arms: list[Arm] = [arm for one in self._open for arm in (one.control, one.treatment)]
        found = [arm.version for arm in arms if arm.policy == self.policy and arm.version is not None]
        return [*found, 0] if self._settings.experiments.holdout > 0 else found

    def _promote(self, candidate: Version) -> None:
        try:
            with self._database.write() as c:
                store.promote(c, self.policy, candidate.id, actor="publisher")
        except Conflict as error:  # a person was faster: theirs is the word that counts
            log.info("not published", policy=self.policy, version=candidate.id, reason=str(error))
        self._read()

    def _decide(self) -> None:
        """Let new requests choose the version that the store calls live, once the engines hold it."""
        now = time.monotonic()
        servable = self._pool.servable()
        for version in servable:
            self._first_held.setdefault(version, now)
        for version in self._first_held.keys() - servable:
            del self._first_held[version]
        wish = self._wish()
        if wish is not None and wish.id != self.live:
            # With nothing to serve, any engine that holds the version is better than none.
            # And whoever takes a version back is in a hurry.
            at_once = self.live is None or self.live not in servable or wish.id < self.live
            if wish.id in servable if at_once else self._ready(wish.id):
                self._activate(wish)
        self._changed.set()

    def _activate(self, version: Version) -> None:
        before, self.live = self.live, version.id
        seconds = max(0.0, time.time() - version.live_at) if version.live_at is not None else 0.0
        LIVE_VERSION.labels(self.policy).set(version.id)
        if before is not None:
            PUBLISH.labels(self.policy, "activate").observe(seconds)
        log.info("live", policy=self.policy, version=version.id, before=before, seconds=round(seconds, 3))

    def _ready(self, version: int) -> bool:
        """Whether every reachable engine holds it, but for those that cannot or take too long."""
        now = time.monotonic()
        if version not in self._first_held:
            return False
        reachable = [member for member in self._pool.engines if member.reachable]
        lacking = [member.name for member in reachable if version not in member.versions]
        return (
            all((name, version) in self._failed for name in lacking)
            or now - self._first_held[version] > STRAGGLER
        )

    # ------------------------------------------------------------------------------ what is wanted

    def _wish(self) -> Version | None:
        """The version that should be live: the store's, or the one before it if its files are broken."""
        return next((version for version in self._succession() if version.id not in self._broken), None)

    def _succession(self) -> list[Version]:
        """The live version, the one that a rollback would bring back, then others that were live."""
        lived = [v for v in self._versions.values() if v.live_at is not None and v.collected_at is None]
        lived.sort(key=lambda version: version.live_at or 0.0, reverse=True)
        lived.sort(key=lambda version: (version.state is not VersionState.LIVE, version.id != self._previous))
        return lived

    def _publishable(self) -> Version | None:
        """The candidate that may go live by itself. Not while an experiment runs: its arms are frozen, and
        what is live is one of them."""
        if self._settings.publish != "immediately" or self._own() is not None:
            return None
        candidate = successor(self._versions)
        return None if candidate is None or candidate.id in self._broken else candidate

    def _wanted(self) -> list[int]:
        """Ids of the versions that engines should hold, the most important first, at most `resident`."""
        now = time.monotonic()
        order: list[int] = [] if self.live is None else [self.live]
        succession = [version.id for version in self._succession()]
        order += succession[:1]
        candidate = self._publishable()
        order += self._assigned()
        order += [] if candidate is None else [candidate.id]
        pins = sorted(self._pins, key=self._pins.__getitem__, reverse=True)
        resting = [pin for pin in pins if now - self._pins[pin] < PIN_REST]
        order += resting + succession[1:2] + pins + succession[2:]
        unique = [id for id in dict.fromkeys(order) if self.fault(id) is None]
        room = self._settings.engine.resident
        # What a request is about to name stays even beyond the room: a pin in use, an arm, and for a moment
        # that of an experiment that has just ended.
        resting += [arm for arm, seen in self._arms.items() if now - seen < PIN_REST]
        beyond = dict.fromkeys(unique[room:] + [arm for arm in resting if arm not in unique])
        return unique[:room] + [id for id in beyond if id in resting and self.fault(id) is None]

    # -------------------------------------------------------------------------------- one engine

    async def _tend_forever(self, engine: Member) -> None:
        wake = self._wake[engine.name] = asyncio.Event()
        try:
            while True:
                wake.clear()
                await self._tend(engine)
                try:
                    async with asyncio.timeout(TEND):
                        await wake.wait()
                except TimeoutError:
                    pass
        finally:
            self._wake.pop(engine.name, None)

    async def _tend(self, engine: Member) -> None:
        """Ask what it holds, load what is missing, unload what nobody wants."""
        try:
            await engine.status()
            self._decide()
            while (version := self._next_load(engine)) is not None:
                await self._make_room(engine)
                await self._load(engine, version)
                self._decide()
            await self._make_room(engine, spare=0)
        except EngineUnavailable:
            # Its process died, or does not answer: the supervisor's business. Others go on serving.
            self._decide()
        except EngineError as error:
            log.warning("engine failed", policy=self.policy, engine=engine.name, error=str(error))

    def _next_load(self, engine: Member) -> Version | None:
        now = time.monotonic()
        for version in self._wanted():
            failed_at = self._failed.get((engine.name, version))
            rested = failed_at is None or now - failed_at > RETRY
            if version not in engine.versions and version in self._versions and rested:
                return self._versions[version]
        return None

    async def _make_room(self, engine: Member, *, spare: int = 1) -> None:
        """Unload unwanted versions until there is room for `spare` more."""
        unwanted = sorted(engine.versions - set(self._wanted()) - {self.live})
        excess = len(engine.versions) + spare - self._settings.engine.resident
        for version in unwanted[: max(0, excess)]:
            await engine.unload(version)

    async def _load(self, engine: Member, version: Version) -> None:
        started = time.monotonic()
        try:
            await engine.load(version)
        except EngineUnavailable:
            raise
        except EngineError as error:
            self._failed[engine.name, version.id] = time.monotonic()
            LOAD_FAILURES.labels(self.policy).inc()
            log.warning(
                "load failed", policy=self.policy, engine=engine.name, version=version.id, error=str(error)
            )
            await self._examine(version)
            if isinstance(error, Unfit) and version.id == 0 and self.live is None and not self.fault(0):
                self.unfit = str(error)
            return
        self._failed.pop((engine.name, version.id), None)
        seconds = time.monotonic() - started
        PUBLISH.labels(self.policy, "stage").observe(seconds)
        log.info(
            "loaded", policy=self.policy, engine=engine.name, version=version.id, seconds=round(seconds, 3)
        )

    async def _examine(self, version: Version) -> None:
        """After a failed load: are the files at fault? Then nobody is asked to load them again."""
        try:
            await asyncio.to_thread(directory.verify, version.url, version.digest)
        except WeightsError as error:
            self._broken[version.id] = str(error)
            log.error("weights broken", policy=self.policy, version=version.id, error=str(error))
            if version.state in (VersionState.CANDIDATE, VersionState.CANARY):
                await asyncio.to_thread(self._reject, version, str(error))

    def _reject(self, version: Version, reason: str) -> None:
        try:
            with self._database.write() as c:
                store.reject(c, self.policy, version.id, actor="publisher", reason=reason)
        except (Conflict, StoreError) as error:  # it stays unusable here either way
            log.warning("not rejected", policy=self.policy, version=version.id, error=str(error))
