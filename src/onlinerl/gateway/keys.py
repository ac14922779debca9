"""The admin key: who may use /admin/v1."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from starlette.requests import Request

from onlinerl.errors import Forbidden, NotFound, RequestError
from onlinerl.gateway.bodies import bearer
from onlinerl.gateway.service import Service, Services


@dataclass(frozen=True, slots=True)
class Gate:
    """Checks the key, then finds what a path names. Every endpoint of /admin/v1 begins with one of these."""

    key: str | None
    """None: closed to everybody."""
    services: Services

    def allow(self, request: Request) -> None:
        """Raise Forbidden without the admin key."""
        given = bearer(request.headers) or request.headers.get("x-admin-key", "").strip()
        if not given:
            raise Forbidden("the admin key is needed: send it as Authorization: Bearer", status=401)
        if self.key is None or not hmac.compare_digest(given.encode(), self.key.encode()):
            raise Forbidden("that is not the admin key", code="invalid_api_key")

    def policy(self, request: Request) -> Service:
        """The policy of the path. Raises Forbidden without the key, NotFound for another name."""
        self.allow(request)
        name: str = request.path_params["policy"]
        service = self.services.by_name.get(name)
        if service is None:
            raise NotFound(f"there is no policy {name[:80]!r}")
        return service

    @staticmethod
    def number(request: Request, name: str) -> int:
        """A part of the path that numbers a version, a run or an experiment. Raises RequestError."""
        text: str = request.path_params[name]
        # 18 digits fit the database's integers
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise RequestError(f"{name} must be a number", parameter=name)
        return int(text)
