"""The client of the controller's interface, version 1: typed, sync and async, on httpx alone.

    with Client("http://127.0.0.1:8081", key) as controller:
        run = controller.start_run("tab", {"train.lr": 1e-5}, max_steps=50)
        controller.download("tab", 3, Path("weights/3"))

Each endpoint is written once, as a function that makes a `Call`; `Client` sends it and returns what it reads,
`AsyncClient` does so when awaited. docs/controller.md is the guide.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from urllib.parse import quote

import httpx

from onlinerl.interface import (
    Experiment,
    ExperimentProgress,
    Feedback,
    FileOfVersion,
    Manifest,
    Notice,
    Pushed,
    Run,
    RunProgress,
    Taken,
    Version,
    Webhook,
)

P = ParamSpec("P")
T = TypeVar("T")
PART = 16 << 20
"""Bytes asked for at once in a download: what is kept in memory, and what an interruption can cost."""


class ControllerError(Exception):
    """The server refused: `status` is HTTP's, `str(error)` the reason."""

    def __init__(self, response: httpx.Response) -> None:
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = response.text[:200] or response.reason_phrase
        super().__init__(f"{response.status_code}: {reason}")
        self.status = response.status_code


class Damaged(Exception):
    """What arrived is not what the manifest or the signature says."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[httpx.Response], T] = lambda response: response.json()

    def result(self, response: httpx.Response) -> T:
        """What the answer says. Raises ControllerError."""
        if not response.is_success:
            raise ControllerError(response)
        return self.read(response)


def _policy(name: str) -> str:
    return f"/admin/v1/policies/{quote(name, safe='')}"


# ------------------------------------------------------------------------------------- the endpoints


def _start_run(
    policy: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    max_steps: int | None = None,
    follow: bool = False,
) -> Call[Run]:
    """Start a training run; ControllerError with status 409 while there is one."""
    body = {"overrides": dict(overrides or {}), "max_steps": max_steps, "follow": follow}
    return Call("POST", f"{_policy(policy)}/runs", body)


def _runs(policy: str) -> Call[list[Run]]:
    """All runs, oldest first."""
    return Call("GET", f"{_policy(policy)}/runs")


def _run(policy: str, run: int) -> Call[RunProgress]:
    """One run: its state, its last numbers, the versions that it made."""
    return Call("GET", f"{_policy(policy)}/runs/{run}")


def _stop_run(policy: str, run: int) -> Call[Run]:
    """End it after the step that it is in."""
    return Call("DELETE", f"{_policy(policy)}/runs/{run}")


def _pause_run(policy: str, run: int) -> Call[Run]:
    """Let it wait after the step that it is in; it keeps its memory."""
    return Call("POST", f"{_policy(policy)}/runs/{run}/pause")


def _resume_run(policy: str, run: int) -> Call[Run]:
    """Let it go on."""
    return Call("POST", f"{_policy(policy)}/runs/{run}/resume")


def _push(policy: str, interactions: Sequence[Pushed]) -> Call[list[Taken]]:
    """Tell what was served, at most 256 at once; each gets its status. Again changes nothing."""
    body = {"interactions": list(interactions)}
    return Call("POST", f"{_policy(policy)}/interactions", body, read=lambda reply: reply.json()["results"])


def _feedback(items: Sequence[Feedback]) -> Call[list[Taken]]:
    """Tell what users made of answers, at most 256 at once; each gets its status."""
    return Call("POST", "/v1/feedback", list(items), read=lambda reply: reply.json()["results"])


def _versions(policy: str) -> Call[list[Version]]:
    """All versions, by id."""
    return Call("GET", f"{_policy(policy)}/versions")


def _promote(policy: str, version: int) -> Call[Version]:
    """Make a version live."""
    return Call("POST", f"{_policy(policy)}/versions/{version}/promote")


def _rollback(policy: str, to: int | None = None) -> Call[Version]:
    """Back to the version that was live before, or to a given one."""
    return Call("POST", f"{_policy(policy)}/rollback", {} if to is None else {"to": to})


def _start_experiment(
    policy: str,
    treatment: int | str,
    *,
    control: int | str | None = None,
    plan: Mapping[str, Any] | None = None,
) -> Call[Experiment]:
    """Try a version (its number, or `policy@version`) on live users, against the live one or `control`;
    `plan` are settings of `experiments` for this one alone."""
    body = {"treatment": treatment, "control": control, "plan": dict(plan or {})}
    return Call("POST", f"{_policy(policy)}/experiments", body)


def _experiments(policy: str) -> Call[list[Experiment]]:
    """All experiments, oldest first."""
    return Call("GET", f"{_policy(policy)}/experiments")


def _experiment(policy: str, experiment: int) -> Call[ExperimentProgress]:
    """One experiment: its decisions, and what its numbers say now."""
    return Call("GET", f"{_policy(policy)}/experiments/{experiment}")


def _stop_experiment(policy: str, experiment: int, reason: str = "stopped by a person") -> Call[Experiment]:
    """End it; its canary is rejected."""
    return Call("POST", f"{_policy(policy)}/experiments/{experiment}/stop", {"reason": reason})


def _confirm(policy: str, experiment: int, decision: str | None = None) -> Call[Experiment]:
    """Do what a waiting experiment proposes, if it is `decision`."""
    return Call("POST", f"{_policy(policy)}/experiments/{experiment}/confirm", {"decision": decision})


def _manifest(policy: str, version: int) -> Call[Manifest]:
    """What a version is made of."""
    return Call("GET", f"{_policy(policy)}/versions/{version}/manifest")


def _webhooks() -> Call[list[Webhook]]:
    """Whether the settings' webhooks have heard what happened."""
    return Call("GET", "/admin/v1/webhooks")


# --------------------------------------------------------------------------------------- the clients


def _now(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(make(*args, **kwargs))

    return method


def _later(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @wraps(make)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(make(*args, **kwargs))

    return method


def _options(url: str, key: str, timeout: float) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return {"base_url": url, "headers": headers, "timeout": timeout}


class Client:
    """For scripts and threads. Close it, or use it in a `with`."""

    def __init__(self, url: str, key: str = "", *, timeout: float = 30.0) -> None:
        """key: the admin key; without it feedback is all that can be sent."""
        self._http = httpx.Client(**_options(url, key, timeout))

    def send(self, call: Call[T]) -> T:
        """Any call. Raises ControllerError, and httpx's errors where nothing answers."""
        return call.result(self._http.request(call.method, call.path, json=call.json, headers=call.headers))

    def download(self, policy: str, version: int, folder: Path, *, digest: str | None = None) -> Path:
        """A version's files into `folder`, checked; again goes on where it ended. See `_download`."""
        steps = _download(policy, version, folder, digest)
        try:
            call = next(steps)
            while True:
                call = steps.send(self.send(call))
        except StopIteration as end:
            return Path(end.value)

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    start_run, runs, run = _now(_start_run), _now(_runs), _now(_run)
    stop_run, pause_run, resume_run = _now(_stop_run), _now(_pause_run), _now(_resume_run)
    push, feedback, webhooks = _now(_push), _now(_feedback), _now(_webhooks)
    versions, manifest, promote, rollback = _now(_versions), _now(_manifest), _now(_promote), _now(_rollback)
    start_experiment, experiments = _now(_start_experiment), _now(_experiments)
    experiment, stop_experiment, confirm = _now(_experiment), _now(_stop_experiment), _now(_confirm)


class AsyncClient:
    """The same for asyncio: every method is awaited. Close it, or use it in an `async with`."""

    def __init__(self, url: str, key: str = "", *, timeout: float = 30.0) -> None:
        """key: the admin key; without it feedback is all that can be sent."""
        self._http = httpx.AsyncClient(**_options(url, key, timeout))

    async def send(self, call: Call[T]) -> T:
        """Any call. Raises ControllerError, and httpx's errors where nothing answers."""
        reply = await self._http.request(call.method, call.path, json=call.json, headers=call.headers)
        return call.result(reply)

    async def download(self, policy: str, version: int, folder: Path, *, digest: str | None = None) -> Path:
        """A version's files into `folder`, checked; again goes on where it ended. See `_download`."""
        steps = _download(policy, version, folder, digest)
        try:
            call = next(steps)
            while True:
                call = steps.send(await self.send(call))
        except StopIteration as end:
            return Path(end.value)

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    start_run, runs, run = _later(_start_run), _later(_runs), _later(_run)
    stop_run, pause_run, resume_run = _later(_stop_run), _later(_pause_run), _later(_resume_run)
    push, feedback, webhooks = _later(_push), _later(_feedback), _later(_webhooks)
    versions, manifest = _later(_versions), _later(_manifest)
    promote, rollback = _later(_promote), _later(_rollback)
    start_experiment, experiments = _later(_start_experiment), _later(_experiments)
    experiment, stop_experiment, confirm = _later(_experiment), _later(_stop_experiment), _later(_confirm)


# ------------------------------------------------------------------------------ downloads, signatures

Steps = Generator[Call[httpx.Response], httpx.Response, T]


def _download(policy: str, version: int, folder: Path, digest: str | None) -> Steps[Path]:
    """Ask for the manifest and for each file in parts, check all by SHA-256, write the manifest last.

    `digest`: what the manifest must be, as `versions` says it. A file that is there already, or begun, is not
    asked for again. Raises Damaged when something is not what it should be; then no manifest is written.
    """
    where = f"{_policy(policy)}/versions/{version}"
    reply = yield Call("GET", f"{where}/manifest", read=lambda reply: reply)
    found = hashlib.sha256(reply.content).hexdigest()
    if found != (digest or reply.headers["etag"].strip('"')):
        raise Damaged(f"the manifest of {policy}@{version} has the SHA-256 {found}")
    manifest: Manifest = json.loads(reply.content)
    for name, entry in manifest["files"].items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damaged(f"the manifest of {policy}@{version} names {name!r}")
        yield from _fetch(f"{where}/files/{quote(name)}", folder / name, entry)
    partial = folder / ".manifest.json.partial"
    partial.write_bytes(reply.content)
    return partial.replace(folder / "manifest.json").parent


def _fetch(url: str, path: Path, entry: FileOfVersion) -> Steps[None]:
    size, sha256 = entry["size"], entry["sha256"]
    if path.is_file() and _sha256(path) == sha256:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    for _ in range(2):
        with partial.open("ab") as file:
            while (have := file.tell()) < size:
                wanted = {"range": f"bytes={have}-{min(have + PART, size) - 1}", "if-range": f'"{sha256}"'}
                reply = yield Call("GET", url, headers=wanted, read=lambda reply: reply)
                if reply.status_code != 206:
                    raise Damaged(f"{path.name} is not the file that the manifest names")
                file.write(reply.content)
        if _sha256(partial) == sha256:
            partial.replace(path)
            return
        partial.unlink()  # what an earlier attempt left was of another file: once more, from the beginning
    raise Damaged(f"{path.name} has another SHA-256 than the manifest says")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(secret: str, signature: str, body: bytes, *, tolerance: float = 300.0) -> Notice:
    """What a webhook was told. `signature` is the header x-onlinerl-signature, `body` the bytes as they came.

    Raises Damaged for a signature that is not by `secret`, or older than `tolerance` seconds: a replay.
    """
    at, _, given = signature.removeprefix("t=").partition(",v1=")
    made = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(made.encode(), given.encode()) or abs(time.time() - float(at)) > tolerance:
        raise Damaged("the signature is not by this secret, or too old")
    notice: Notice = json.loads(body)
    return notice
