"""The application: one on both ports, raw routes, checks of Host and Origin, errors in OpenAI's shape."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import onlinerl
from onlinerl import observe
from onlinerl.config import Settings
from onlinerl.errors import Forbidden, NotFound, OnlineRLError, RequestError
from onlinerl.gateway import experiments
from onlinerl.gateway.admin import Admin, Replicas
from onlinerl.gateway.bodies import JSONReply, error_reply
from onlinerl.gateway.completions import CompletionRequest, Completions
from onlinerl.gateway.feedback import ContinueEvent, FeedbackRoutes, NativeFeedback
from onlinerl.gateway.keys import Gate
from onlinerl.gateway.service import Service, Services
from onlinerl.store.database import Database, Writer

log = observe.logger(component="gateway")

_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def create_app(
    services: Mapping[str, Service],
    writer: Writer,
    database: Database,
    settings: Settings,
    *,
    admin_key: str | None = None,
    replicas: Replicas | None = None,
) -> FastAPI:
    """The gateway over running services.

    admin_key: opens /admin/v1; None closes it. replicas: what GET /admin/v1/replicas tells.
    """
    known = Services(services)
    limit = settings.server.body_limit
    completions = Completions(known, writer, body_limit=limit)
    feedback = FeedbackRoutes(known, writer, body_limit=limit)
    admin = Admin(known, writer, database, key=admin_key, replicas=replicas, body_limit=limit)
    trials = experiments.Experiments(Gate(admin_key, known), writer, database, settings, body_limit=limit)
    state = _State(known)
    app = FastAPI(title="onlinerl", version=onlinerl.__version__, docs_url=None, redoc_url=None)

    def route(
        method: str,
        path: str,
        endpoint: Any,
        summary: str,
        *,
        body: dict[str, Any] | None = None,
        optional: bool = False,
        shown: bool = True,
    ) -> None:
        extra: dict[str, Any] = {}
        if body is not None:
            content = {"application/json": {"schema": body}}
            extra["requestBody"] = {"required": not optional, "content": content}
        names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
        if names:
            extra["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        app.add_api_route(
            path, endpoint, methods=[method], summary=summary, openapi_extra=extra, include_in_schema=shown
        )

    route("POST", "/v1/completions", completions.create, "Complete text", body=_schema(CompletionRequest))
    route("GET", "/v1/models", state.models, "Policies and loaded versions")
    route("GET", "/v1/models/{model:path}", state.model, "One policy or version")
    route("POST", "/v1/feedback", feedback.native, "Report a verdict", body=_schema(NativeFeedback))
    route(
        "POST",
        "/api/training/submit",
        feedback.submit,
        "Continue's events, upstream's envelope or the flat form",
        body={
            "anyOf": [
                {
                    "type": "object",
                    "required": ["name", "data"],
                    "properties": {"name": {"type": "string"}, "data": _schema(ContinueEvent)},
                },
                {**_schema(ContinueEvent), "required": ["accepted"]},
            ]
        },
    )
    base = "/admin/v1/policies/{policy}"
    route("GET", f"{base}/versions", admin.versions, "All versions of a policy")
    route("POST", f"{base}/versions/{{version}}/promote", admin.promote, "Make a version live")
    route(
        "POST",
        f"{base}/rollback",
        admin.rollback,
        "Back to the version that was live before, or to a given one",
        body={"type": "object", "properties": {"to": {"type": "integer", "minimum": 0}}},
        optional=True,
    )
    route("GET", f"{base}/experiments", trials.list_, "All experiments of a policy")
    begin = _schema(experiments.Start)
    route("POST", f"{base}/experiments", trials.start, "Try a version on live users", body=begin)
    one = f"{base}/experiments/{{experiment}}"
    route("GET", one, trials.show, "One experiment: its decisions, and what its numbers say now")
    route(
        "POST",
        f"{one}/stop",
        trials.stop,
        "End an experiment; its canary is rejected",
        body=_schema(experiments.Stop),
        optional=True,
    )
    route(
        "POST",
        f"{one}/confirm",
        trials.confirm,
        "Do what a waiting experiment proposes",
        body=_schema(experiments.Confirm),
        optional=True,
    )
    route("GET", "/admin/v1/replicas", admin.replicas, "The engines")
    route("GET", "/health", state.health, "The process lives")
    route("GET", "/ready", state.ready, "Every policy's live version can be served")
    route("GET", "/metrics", state.metrics, "Prometheus", shown=False)

    app.add_exception_handler(OnlineRLError, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unknown_error)
    app.add_middleware(_Guard, host=settings.server.host)
    return app


class _State:
    """What can be asked without a key, and tells nothing of anybody's text."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._since = int(time.time())

    def _model(self, id: str) -> dict[str, Any]:
        return {"id": id, "object": "model", "created": self._since, "owned_by": "onlinerl"}

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = []
        for name, service in self._services.by_name.items():
            data.append(self._model(name))
            data += [self._model(f"{name}@{version}") for version in sorted(service.pool.servable())]
        return JSONReply({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}: names that GET /v1/models lists, aliases, and any existing version."""
        id: str = request.path_params["model"]
        service, version = self._services.find(id)
        if version is None and id != service.name and id not in service.settings.aliases:
            raise NotFound(f"the model {id[:80]!r} does not exist", parameter="model", code="model_not_found")
        return JSONReply(self._model(id))

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONReply({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: 503 with the reasons until all policies can be served."""
        reasons = {name: reason for name, one in self._services.by_name.items() if (reason := one.ready())}
        if reasons:
            return JSONReply({"status": "not ready", "reasons": reasons}, 503, {"retry-after": "1"})
        live = {name: one.live() for name, one in self._services.by_name.items()}
        return JSONReply({"status": "ready", "live": live})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST})


class _Guard:
    """Refuses foreign Hosts and Origins, so that no web page can post verdicts or read code; counts."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._hosts = {"localhost", host.lower()} - _WILDCARDS
        self._open = host in _WILDCARDS
        if self._open:
            self._hosts.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refused = self._refused(scope)
            if refused is not None:
                await error_reply(refused)(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        finally:
            # the template, never the path itself: its values come from clients
            path = getattr(scope.get("route"), "path", "other")
            observe.REQUESTS.labels(path, str(status or "none")).inc()
            observe.DURATION.labels(path).observe(time.perf_counter() - started)

    def _refused(self, scope: Scope) -> Forbidden | None:
        host = origin = ""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").strip().lower()
            elif name == b"origin":
                origin = value.decode("latin-1").strip().lower()
        if not self._ours(host):
            return Forbidden(
                "the Host header names another machine; use the address that the server listens on"
            )
        # compared as text: what is no address at all cannot be parsed
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            return Forbidden("requests from web pages of another origin are refused")
        return None

    def _ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A page that rebinds a name of its own to our address still sends that name; an address is no name.
        return self._open or address.is_loopback


async def _known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnlineRLError)
    reply = error_reply(error)
    if reply.status_code >= 500:
        log.error("request failed", path=request.url.path[:80], error=str(error))
    return reply


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    sentences = {404: f"there is nothing at {path}", 405: f"{request.method} is not allowed at {path}"}
    refusal = RequestError(sentences.get(error.status_code, str(error.detail)))
    refusal.status = error.status_code
    reply = error_reply(refusal)
    for name, value in (error.headers or {}).items():
        reply.headers[name] = value
    return reply


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(RequestError("; ".join(str(fault["msg"]) for fault in error.errors())))


async def _unknown_error(request: Request, error: Exception) -> Response:
    log.error("fault in the gateway", path=request.url.path[:80], kind=type(error).__name__)
    body = {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}}
    return JSONReply(body, 500)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema without references, as OpenAPI wants it in place."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            reference = node.get("$ref", "")
            if reference:
                return inline(definitions[reference.rpartition("/")[2]])
            return {name: inline(value) for name, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    result: dict[str, Any] = inline(schema)
    return result
