"""The OpenAPI document: complete, its examples true, and the server as it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonschema_rs
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from onlinerl import interface
from onlinerl.gateway.document import PAGES
from onlinerl.gateway.feedback import NativeFeedback
from onlinerl.gateway.intake import PushedInteraction
from onlinerl.records import (
    Decision,
    DecisionKind,
    ExperimentState,
    FeedbackStatus,
    RunState,
    VersionState,
)
from onlinerl.store import experiments, runs
from tests.controllers import KEY, controlled
from tests.gateways import Gateway

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
"""Not whether what a schema allows is taken: it cannot say which token ids a model has."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with controlled(tmp_path) as one:
        yield one


@pytest.fixture
async def document(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = (await gateway.client.get("/openapi.json")).json()
    return found


def each(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def valid(schema: dict[str, Any], value: Any) -> None:
    """Raise where the value is not what the schema says."""
    jsonschema_rs.validator_for(schema).validate(value)


def test_it_has_a_page_for_every_endpoint_and_for_no_other(
    document: dict[str, Any], gateway: Gateway
) -> None:
    documented = {(method, path) for method, path, _ in each(document)}
    assert documented == set(PAGES)
    routed = {
        (method, route.path_format)
        for route in gateway.app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }
    assert documented == routed
    assert document["openapi"].startswith("3.1")


def test_every_example_is_what_its_schema_says(document: dict[str, Any]) -> None:
    answers = bodies = 0
    for method, path, operation in each(document):
        page = PAGES[method, path]
        for parameter in operation.get("parameters", ()):
            valid(parameter["schema"], parameter["example"])
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]["application/json"]
            valid(content["schema"], content["example"])
            bodies += 1
        for status, answer in operation["responses"].items():
            if status in ("4XX", "5XX") or page.kind not in answer.get("content", {}):
                continue
            content = answer["content"][page.kind]
            if page.answer is not None:
                valid(content["schema"], content["example"])
                answers += 1
        failure = operation["responses"]["4XX"]["content"]["application/json"]
        assert failure["schema"] == {"$ref": "#/components/schemas/Failure"}
        valid(document["components"]["schemas"]["Failure"], failure["example"])
    assert answers > 18
    assert bodies > 5


async def test_every_example_is_taken_and_answered_as_the_document_says(
    document: dict[str, Any], gateway: Gateway
) -> None:
    """Sent in the order of the table, to a server that has a run and a candidate."""
    by_place = {(method, path): operation for method, path, operation in each(document)}
    for (method, path), page in PAGES.items():
        operation = by_place[method, path]
        place = path
        for name, value in page.path.items():
            place = place.replace(f"{{{name}}}", str(value))
        reply = await gateway.client.request(method, place, headers=KEY, json=page.body)
        assert reply.status_code == page.status, (method, place, reply.text)
        content = operation["responses"][str(page.status)]["content"][page.kind]
        assert reply.headers["content-type"].startswith(page.kind)
        if page.answer is not None:
            valid(content["schema"], reply.json())
            shape(page.example, reply.json(), f"{method} {path}")
        if path.endswith("/experiments/{experiment}/stop"):
            place = place.removesuffix("/1/stop")
            again = await gateway.client.post(place, headers=KEY, json={"treatment": 1})
            assert again.status_code == 201, again.text
            with gateway.database.write() as c:  # as its numbers would make it
                better = Decision(DecisionKind.PROMOTE, "better", at=time.time(), proposed=True)
                experiments.wait(c, experiments.get(c, "tab", 2), better)
        if (method, path) == ("POST", "/admin/v1/policies/{policy}/runs"):
            with gateway.database.write() as c:  # as its process would
                runs.start(
                    c,
                    policy="tab",
                    host="h",
                    pid=1,
                    settings="",
                    tau_of=lambda c: 0.1,
                    now=time.time(),
                    run=1,
                )


OPEN = {"metrics", "files", "tensors", "settings", "data", "plan", "numbers", "usage"}
"""Parts of answers whose names depend on what they tell of: an example shows some."""


def shape(example: Any, answer: Any, where: str) -> None:
    """Raise where an answer has fields that its example does not show."""
    if isinstance(example, dict) and isinstance(answer, dict):
        if where.rpartition(".")[2] not in OPEN:
            assert answer.keys() <= example.keys(), where
        for name in answer.keys() & example.keys():
            shape(example[name], answer[name], f"{where}.{name}")
    if isinstance(example, list) and isinstance(answer, list) and example and answer:
        shape(example[0], answer[0], where)


def test_words_that_the_document_lists_are_those_that_there_are() -> None:
    assert set(get_args(interface.VersionState)) == {state.value for state in VersionState}
    assert set(get_args(interface.RunState)) == {state.value for state in RunState}
    assert set(get_args(interface.ExperimentState)) == {state.value for state in ExperimentState}
    assert set(get_args(interface.DecisionKind)) == {kind.value for kind in DecisionKind}
    statuses = get_type_hints(interface.FeedbackStatus)["status"]
    assert set(get_args(statuses)) == {status.value for status in FeedbackStatus}
    assert set(interface.Pushed.__annotations__) == set(PushedInteraction.model_fields)
    assert set(interface.Feedback.__annotations__) == set(NativeFeedback.model_fields)


async def test_whatever_the_document_allows_is_answered_as_it_says(gateway: Gateway) -> None:
    """Schemathesis makes requests of the schemas, good and bad ones, and holds the answers against them."""

    def ask() -> int:
        schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
        asked = 0
        for found in schema.get_all_operations():
            operation: Any = found.ok()  # type: ignore[union-attr]  # an error has none, and so raises

            @settings(
                max_examples=6,
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def one(case: Any) -> None:
                nonlocal asked
                case.call_and_validate(headers=KEY, checks=CHECKS)
                asked += 1

            one()
        return asked

    assert await asyncio.to_thread(ask) > 100
