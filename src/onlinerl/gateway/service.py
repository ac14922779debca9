"""What the gateway knows of each policy, and how a client's `model` finds one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from onlinerl.config import Policy
from onlinerl.errors import EngineUnavailable, NotFound, RequestError
from onlinerl.experiments.assignment import LIVE
from onlinerl.records import Experiment, Finish, Generation, Token
from onlinerl.text.codec import Codec
from onlinerl.text.templates import Template

PINNED = "pinned"
"""The arm of requests that name a version: nothing is decided for them."""


class Generates(Protocol):
    """The part of the pool of engines that the gateway needs."""

    def generate(self, request: Generation) -> AsyncGenerator[Token | Finish, None]:
        """Tokens as they come, then one Finish; closing it aborts."""
        ...

    def servable(self) -> frozenset[int]:
        """Versions that at least one reachable engine holds."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """One policy as the gateway sees it. Made by `serve`, which knows the store and the publisher."""

    name: str
    settings: Policy
    codec: Codec
    template: Template | None
    pool: Generates
    live: Callable[[], int | None]
    """The version that new requests get; None while none is loaded."""
    ensure: Callable[[int], Awaitable[None]]
    """Load a version on demand; returns when it is servable."""
    exists: Callable[[int], bool]
    """Whether the store has such a version."""
    experiment: Callable[[], Experiment | None] = lambda: None
    """The experiment whose arms the policy's requests are assigned to now, as the publisher knows it."""

    @property
    def context(self) -> int:
        """Longest prompt plus answer, in tokens."""
        limits = (self.settings.engine.context, self.codec.context)
        return min((limit for limit in limits if limit), default=int(1e9))

    def ready(self) -> str:
        """Why it cannot serve; "" when it can."""
        live = self.live()
        if live is None:
            return "no version is live yet"
        if live not in self.pool.servable():
            return f"no replica holds the live version {live}"
        return ""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes: a policy, the version that it starts on, and how it is sampled."""

    service: Service
    version: int
    arm: str
    """`live`, `explore`, `control`, `treatment`, `holdout`, or `pinned` where the client named a version."""
    propensity: float = 1.0
    """Probability of that arm; see `experiments.assignment`."""
    experiment: int | None = None
    """The experiment that the arm is of."""
    unit: str = ""
    """What was assigned in it."""

    @property
    def fingerprint(self) -> str:
        """`policy@version`."""
        return f"{self.service.name}@{self.version}"


class Services:
    """All policies, by name and alias."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self.by_name = dict(services)
        self._names = dict(services)
        for service in services.values():
            for alias in service.settings.aliases:
                self._names[alias] = service
        self._only = next(iter(services.values())) if len(services) == 1 else None

    def find(self, model: str | None) -> tuple[Service, int | None]:
        """(policy, pinned version or None) for a client's `model`.

        Where there is exactly one policy any name reaches it, since clients send names of their own.
        Raises NotFound for an unknown model or version, RequestError where one must be named.
        """
        if model is None:
            if self._only is not None:
                return self._only, None
            raise RequestError(f"model must be given: one of {self._known()}", parameter="model")
        service = self._names.get(model)
        if service is not None:
            return service, None
        name, at, version = model.rpartition("@")
        if at:
            service = self._names.get(name)
            if service is None and version.isdecimal():
                service = self._only
            if service is not None:
                # 18 digits fit the database's integers
                if not (version.isdecimal() and len(version) < 19 and service.exists(int(version))):
                    raise NotFound(
                        f"the model {service.name!r} has no version {version[:40]!r}; see GET /v1/models",
                        parameter="model",
                        code="model_not_found",
                    )
                return service, int(version)
        if self._only is not None:
            return self._only, None
        raise NotFound(
            f"the model {model[:80]!r} does not exist; there are {self._known()}",
            parameter="model",
            code="model_not_found",
        )

    async def route(self, model: str | None) -> Route:
        """Choose policy and version for a new request; a pinned version is loaded when need be.

        Raises EngineUnavailable while no version can be served.
        """
        service, pinned = self.find(model)
        if pinned is not None:
            await service.ensure(pinned)  # also where it is loaded: a version in use is not unloaded
            return Route(service, pinned, PINNED)
        live = service.live()
        if live is None:
            raise EngineUnavailable(f"the policy {service.name!r} has no version loaded yet", retry_after=2.0)
        return Route(service, live, LIVE)

    def _known(self) -> str:
        return ", ".join(repr(name) for name in self._names)
