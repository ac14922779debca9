"""Reading requests and writing errors: the JSON body with its limits, OpenAI's error shape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from onlinerl.errors import (
    EngineFull,
    EngineUnavailable,
    Forbidden,
    OnlineRLError,
    RequestError,
    RunError,
    SettingsError,
    TooLarge,
)

Model = TypeVar("Model", bound=BaseModel)


class JSONReply(Response):
    """A JSON answer by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes of `content`; NaN and infinities become null."""
        return orjson.dumps(content)


class WrongMediaType(RequestError):
    """The body is not declared as JSON: a web page can send that without asking."""

    status = 415


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object of at most `limit` bytes.

    Raises WrongMediaType, TooLarge, or RequestError with a sentence.
    """
    body = await read_value(request, limit)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


async def read_value(request: Request, limit: int) -> Any:
    """The body as whatever JSON it is; raises as `read_json` does."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise WrongMediaType("the body must be JSON: send content-type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongMediaType("compressed bodies are not read; send it plain")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise TooLarge(f"the body has {length[:20]} bytes, the limit is {limit} (setting server.body_limit)")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise TooLarge(f"the body is beyond the limit of {limit} bytes (setting server.body_limit)")
            parts.append(part)
    except ClientDisconnect:
        raise RequestError("the client left while it sent the body") from None
    try:
        return orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def checked(model: type[Model], body: Mapping[str, Any]) -> Model:
    """`body` as a model; null means absent. Raises RequestError that names the first wrong field."""
    try:
        return model.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        message = f"{where}: {fault['msg']}" if where else str(fault["msg"])
        raise RequestError(message, parameter=str(fault["loc"][0]) if fault["loc"] else None) from None


def status_of(error: OnlineRLError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, RunError):
        return 409
    if isinstance(error, EngineFull):
        return 429
    if isinstance(error, SettingsError):
        return 400
    return 503


def error_body(error: OnlineRLError) -> dict[str, Any]:
    """OpenAI's error object."""
    status = status_of(error)
    if isinstance(error, Forbidden):
        kind = "authentication_error" if status == 401 else "permission_error"
    else:
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": getattr(error, "parameter", None),
            "code": getattr(error, "code", None) or ("service_unavailable" if status == 503 else None),
        }
    }


def error_reply(error: OnlineRLError) -> JSONReply:
    """The error as an HTTP answer; 503 says when to try again."""
    status = status_of(error)
    headers = {}
    if status in (429, 503):
        wait = error.retry_after if isinstance(error, EngineUnavailable) else 1.0
        headers["retry-after"] = str(max(1, round(wait)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONReply(error_body(error), status, headers)


def bearer(headers: Mapping[str, str]) -> str:
    """The API key that the client sent: `Authorization: Bearer`, else `api-key` (Continue, Azure)."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key", "").strip()


def sticky(headers: Mapping[str, str], user: str | None) -> str:
    """Who is asking: `user` of the body, else `x-user-id`, else a name made from the API key, else "".

    The key itself is never kept.
    """
    name = user or headers.get("x-user-id", "").strip()[:256]
    if name:
        return name
    key = bearer(headers)
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}" if key else ""
