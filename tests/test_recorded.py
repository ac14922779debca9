"""A client of version 1 of the interface, as it was recorded, against this server: it must never notice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.controllers import controlled
from tests.gateways import ADMIN_KEY

RECORDED = json.loads((Path(__file__).parent / "recorded/interface-v1.json").read_text())
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


def check(shape: Any, value: Any, where: str = "") -> None:
    """Raise where something is missing or of another kind; what is new is not an old client's business."""
    if isinstance(shape, str):
        kind = shape.removesuffix("?")
        assert value is not None or kind != shape, f"{where} is null"
        boolean = isinstance(value, bool) and kind != "boolean"
        assert value is None or (isinstance(value, KINDS[kind]) and not boolean), f"{where} is {value!r}"
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for number, one in enumerate(value):
            check(shape[0], one, f"{where}/{number}")
    else:
        assert isinstance(value, dict), where
        for name, below in shape.items():
            assert name in value, f"{where}/{name} is gone"
            check(below, value[name], f"{where}/{name}")


def at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def filled(value: Any, kept: dict[str, Any]) -> Any:
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda match: str(kept[match[1]]), value)
    if isinstance(value, dict):
        return {name: filled(below, kept) for name, below in value.items()}
    return [filled(one, kept) for one in value] if isinstance(value, list) else value


async def test_the_recorded_controller_finds_all_as_it_was(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    async with controlled(tmp_path, 'webhooks=[{url: "http://127.0.0.1:9/", secret: HOOK_KEY}]') as gateway:
        for number, step in enumerate(RECORDED["steps"]):
            method, path = step["send"]
            key = step.get("key", ADMIN_KEY)
            headers = {**filled(step.get("headers", {}), kept)}
            if key:
                headers["authorization"] = f"Bearer {key}"
            body = {"json": filled(step["body"], kept)} if "body" in step else {}
            reply = await gateway.client.request(method, filled(path, kept), headers=headers, **body)
            where = f"step {number}, {method} {path}: {reply.text[:300]}"
            assert reply.status_code == step["status"], where
            if "etag" in step:
                assert reply.headers["etag"] == f'"{filled(step["etag"], kept)}"', where
            if "bytes" in step:
                assert len(reply.content) == int(filled(step["bytes"], kept)), where
            if "shape" in step:
                check(step["shape"], reply.json(), where)
            for pointer, value in step.get("values", {}).items():
                assert at(reply.json(), pointer) == value, where
            for name, pointer in step.get("keep", {}).items():
                kept[name] = at(reply.json(), pointer)


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        ("integer", "1"),
        ("integer", True),
        ("integer", None),
        ("integer?", 1.5),
        ({"a": "string"}, {"b": "x"}),
        ([{"a": "string"}], [{"a": "x"}, {"a": 1}]),
        ({"a": {}}, {"a": []}),
    ],
)
def test_what_changed_is_noticed(shape: Any, value: Any) -> None:
    with pytest.raises(AssertionError):
        check(shape, value)


def test_what_is_new_is_not() -> None:
    check({"a": "integer?", "b": ["object"]}, {"a": None, "b": [{}], "c": 1})
