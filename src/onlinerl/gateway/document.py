"""The OpenAPI document: what each endpoint answers, and an example of every request and answer.

`PAGES` is the table; tests send each example to a server, in this order, and hold the answers against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from onlinerl import interface
from onlinerl.errors import RequestError
from onlinerl.gateway.bodies import error_body

ABOUT = (
    "One application answers on both ports. Paths under /admin/v1 are the controller's interface, version 1: "
    "start runs, push interactions, fetch versions; they need the admin key (`Authorization: Bearer`, made "
    "at the first start, in HOME/admin.key). Within version 1 fields may be added, none goes and none "
    "changes its kind: ignore those you do not know. Errors have OpenAI's shape. docs/controller.md is the "
    "guide, `onlinerl.client` the client in Python."
)


@dataclass(frozen=True)
class Page:
    """What the document says of one endpoint beside its request's schema."""

    answer: Any
    """The answer's type, or None where it is no JSON."""
    example: Any = None
    status: int = 200
    body: Any = None
    """An example of the request's body; None: it has none."""
    path: Mapping[str, str | int] = field(default_factory=dict)
    """Examples of the path's parts."""
    kind: str = "application/json"
    """Media type of the answer."""
    more: tuple[int, ...] = ()
    """Other statuses that are no errors."""


_VERSION = {
    "policy": "tab",
    "id": 1,
    "state": "candidate",
    "parent": 0,
    "run": 1,
    "created_at": "2025-01-01T12:00:00.000Z",
    "live_at": None,
    "collected_at": None,
    "url": "/data/weights/tab/000001",
    "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "metrics": {"reward": 0.21},
}
_LIVE = {**_VERSION, "state": "live", "live_at": "2025-01-01T12:30:00.000Z"}
_BASE = {**_LIVE, "id": 0, "parent": None, "run": None, "url": "/data/weights/tab/000000", "metrics": {}}
_RUN = {
    "policy": "tab",
    "id": 1,
    "state": "pending",
    "parent": 0,
    "created_at": "2025-01-01T12:00:00.000Z",
    "heartbeat_at": "2025-01-01T12:00:00.000Z",
    "heartbeat_age": 0.012,
    "alive": False,
    "step": 0,
    "last_batch": 50,
    "follow": False,
    "tau": 0.0,
    "wish": "",
    "message": "",
}
_RUNNING = {**_RUN, "state": "running", "alive": True, "heartbeat_age": 0.4, "step": 12, "tau": 0.14}
_MODEL = {"id": "tab", "object": "model", "created": 1735732800, "owned_by": "onlinerl"}
_PUSHED = {
    "id": "chatcmpl-7d1",
    "version": 0,
    "prompt_ids": [40, 41, 42],
    "completion_ids": [400, 88, 8183],
    "behavior_logprobs": [-0.71, -1.13, -0.2],
    "user": "u1",
    "age": 4.2,
    "duration": 0.31,
}
_TAKEN = {"id": "chatcmpl-7d1", "index": 0, "status": "recorded", "reason": ""}
_EXPERIMENT = {
    "policy": "tab",
    "id": 1,
    "state": "running",
    "control": "tab@0",
    "treatment": "tab@1",
    "stage": 0,
    "share": 0.05,
    "stage_at": "2025-01-01T12:40:00.000Z",
    "created_at": "2025-01-01T12:40:00.000Z",
    "ended_at": None,
    "tau": 0.1,
    "alpha": 0.03,
    "actor": "admin",
    "message": "",
    "plan": {"stages": [0.05, 0.5], "unit": "user", "alpha": 0.05},
}
_DECISION = {
    "at": "2025-01-01T12:40:00.000Z",
    "stage": 0,
    "kind": "start",
    "actor": "admin",
    "proposed": False,
    "reason": "tab@1 against tab@0",
    "numbers": {"tau": 0.1, "alpha": 0.03},
}
_STOPPED = {
    **_EXPERIMENT,
    "state": "stopped",
    "ended_at": "2025-01-01T13:00:00.000Z",
    "message": "the release was called off",
}
_PROMOTED = {**_EXPERIMENT, "id": 2, "state": "promoted", "ended_at": "2025-01-03T13:00:00.000Z"}
_POLICY: dict[str, str | int] = {"policy": "tab"}
_OF_VERSION: dict[str, str | int] = {"policy": "tab", "version": 1}
_OF_RUN: dict[str, str | int] = {"policy": "tab", "run": 1}
_OF_EXPERIMENT: dict[str, str | int] = {"policy": "tab", "experiment": 1}
_BASE_PATH = "/admin/v1/policies/{policy}"

PAGES: Mapping[tuple[str, str], Page] = {
    ("GET", "/health"): Page(interface.Health, {"status": "ok"}),
    ("GET", "/ready"): Page(interface.Ready, {"status": "ready", "live": {"tab": 0}}),
    ("GET", "/v1/models"): Page(interface.Models, {"object": "list", "data": [_MODEL]}),
    ("GET", "/v1/models/{model}"): Page(interface.Model, _MODEL, path={"model": "tab"}),
    ("POST", "/v1/completions"): Page(
        interface.Completion,
        {
            "id": "cmpl-5f1d6a3c9f0e4f7e8a3b5d2c1e0f9a8b",
            "object": "text_completion",
            "created": 1735732800,
            "model": "tab",
            "system_fingerprint": "tab@0",
            "choices": [{"index": 0, "text": "sum(values)", "finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
        },
        body={"model": "tab", "prompt": "def mean(values):\n    return ", "max_tokens": 24, "user": "u1"},
    ),
    ("POST", "/v1/feedback"): Page(
        interface.FeedbackStatus | interface.Batch,
        {"results": [{"id": "cmpl-5f1d", "index": 0, "status": "matched", "reason": ""}]},
        body=[{"id": "cmpl-5f1d", "event": "accepted"}],
    ),
    ("POST", "/api/training/submit"): Page(
        interface.Submitted,
        {
            "status": "submitted",
            "message": "recorded, and joined to the completion that was served",
            "queue_position": 12,
            "feedback": "matched",
        },
        body={"name": "autocomplete", "data": {"accepted": True, "completion": "sum(values)"}},
    ),
    ("POST", f"{_BASE_PATH}/interactions"): Page(
        interface.Batch, {"results": [_TAKEN]}, body={"interactions": [_PUSHED]}, path=_POLICY
    ),
    ("POST", f"{_BASE_PATH}/runs"): Page(
        interface.Run,
        _RUN,
        201,
        body={"overrides": {"train.lr": 1e-5}, "max_steps": 50},
        path=_POLICY,
    ),
    ("GET", f"{_BASE_PATH}/runs"): Page(list[interface.Run], [_RUNNING], path=_POLICY),
    ("GET", f"{_BASE_PATH}/runs/{{run}}"): Page(
        interface.RunProgress,
        {**_RUNNING, "metrics": {"reward": 0.18, "kl": 0.011}, "versions": [1]},
        path=_OF_RUN,
    ),
    ("POST", f"{_BASE_PATH}/runs/{{run}}/pause"): Page(
        interface.Run, {**_RUNNING, "wish": "pause"}, 202, path=_OF_RUN
    ),
    ("POST", f"{_BASE_PATH}/runs/{{run}}/resume"): Page(interface.Run, _RUNNING, 202, path=_OF_RUN),
    ("DELETE", f"{_BASE_PATH}/runs/{{run}}"): Page(
        interface.Run, {**_RUNNING, "wish": "stop"}, 202, path=_OF_RUN
    ),
    ("GET", f"{_BASE_PATH}/versions"): Page(list[interface.Version], [_BASE, _VERSION], path=_POLICY),
    ("GET", f"{_BASE_PATH}/versions/{{version}}/manifest"): Page(
        interface.Manifest,
        {
            "format": 1,
            "policy": "tab",
            "id": 1,
            "parent": 0,
            "run": 1,
            "created_at": 1735732800.0,
            "files": {"model.safetensors": {"size": 104857600, "sha256": _VERSION["digest"]}},
            "tensors": {},
            "data": {"first_at": 1735729200.0, "last_at": 1735732700.0, "samples": 1600, "steps": 50},
            "settings": {"tau": 0.14},
            "metrics": {"reward": 0.21},
        },
        path=_OF_VERSION,
        more=(304,),
    ),
    ("GET", f"{_BASE_PATH}/versions/{{version}}/files/{{name}}"): Page(
        None,
        path={**_OF_VERSION, "name": "model.safetensors"},
        kind="application/octet-stream",
        more=(206, 304),
    ),
    ("POST", f"{_BASE_PATH}/versions/{{version}}/promote"): Page(interface.Version, _LIVE, path=_OF_VERSION),
    ("POST", f"{_BASE_PATH}/rollback"): Page(interface.Version, _BASE, body={"to": 0}, path=_POLICY),
    ("POST", f"{_BASE_PATH}/experiments"): Page(
        interface.Experiment,
        _EXPERIMENT,
        201,
        body={"treatment": 1, "plan": {"stages": [0.05, 0.5]}},
        path=_POLICY,
    ),
    ("GET", f"{_BASE_PATH}/experiments"): Page(list[interface.Experiment], [_EXPERIMENT], path=_POLICY),
    ("GET", f"{_BASE_PATH}/experiments/{{experiment}}"): Page(
        interface.ExperimentProgress,
        {**_EXPERIMENT, "now": None, "decisions": [_DECISION]},
        path=_OF_EXPERIMENT,
    ),
    ("POST", f"{_BASE_PATH}/experiments/{{experiment}}/stop"): Page(
        interface.Experiment, _STOPPED, body={"reason": "the release was called off"}, path=_OF_EXPERIMENT
    ),
    ("POST", f"{_BASE_PATH}/experiments/{{experiment}}/confirm"): Page(
        interface.Experiment,
        _PROMOTED,
        body={"decision": "promote"},
        path={**_OF_EXPERIMENT, "experiment": 2},
    ),
    ("GET", "/admin/v1/replicas"): Page(
        list[interface.Replica],
        [{"name": "tab-0", "policy": "tab", "state": "up", "versions": [0, 1], "running": 2, "waiting": 0}],
    ),
    ("GET", "/admin/v1/webhooks"): Page(
        list[interface.Webhook],
        [
            {
                "host": "controller.internal",
                "events": ["version", "run"],
                "policies": [
                    {
                        "policy": "tab",
                        "waiting": 0,
                        "delivered": 41,
                        "dropped": 0,
                        "failing_since": None,
                        "error": "",
                    }
                ],
            }
        ],
    ),
}
"""By method and path, in an order in which each example makes sense."""

_MEANINGS = {
    200: "Done",
    201: "Made",
    202: "Asked for; it happens after the step under way",
    206: "The part that `Range` names",
    304: "Unchanged",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document."""
    document = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
    components = document.setdefault("components", {})
    components["schemas"] = {"Failure": schema(interface.Failure)}
    components["securitySchemes"] = {"admin": {"type": "http", "scheme": "bearer"}}
    failure = {
        "description": "Refused, with the reason",
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/Failure"},
                "example": error_body(RequestError("max_steps: Input should be greater than or equal to 1")),
            }
        },
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            page = PAGES[method.upper(), path]
            operation["responses"] = {**_answers(page), "4XX": failure, "5XX": failure}
            if path.startswith("/admin/"):
                operation["security"] = [{"admin": []}]
            if page.body is not None:
                operation["requestBody"]["content"]["application/json"]["example"] = page.body
            for parameter in operation.get("parameters", ()):
                value = page.path[parameter["name"]]
                integer = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
                parameter["schema"] = integer if isinstance(value, int) else {"type": "string"}
                parameter["example"] = value
    return document


def _answers(page: Page) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status in (page.status, *page.more):
        content: dict[str, Any] = {}
        if status != 304:
            content[page.kind] = {"schema": {} if page.answer is None else schema(page.answer)}
            if page.example is not None:
                content[page.kind]["example"] = page.example
        answers[str(status)] = {
            "description": _MEANINGS[status],
            **({"content": content} if content else {}),
        }
    return answers


def schema(kind: Any) -> dict[str, Any]:
    """A type's JSON schema without references, as OpenAPI wants it in place."""
    found = TypeAdapter(kind).json_schema()
    definitions = found.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            reference = node.get("$ref", "")
            if reference:
                return inline(definitions[reference.rpartition("/")[2]])
            return {name: inline(value) for name, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    result: dict[str, Any] = inline(found)
    return result
