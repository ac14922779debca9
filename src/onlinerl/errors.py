"""Every error that onlinerl raises on purpose.

OnlineRLError
├── SettingsError            a setting, a file or a path the person gave is wrong      exit 2
│   ├── PortTaken            something else listens there
│   └── ModelError           the model directory is missing, broken or not usable
├── RequestError             the client asked for what cannot be (HTTP 4xx)
│   ├── NotFound             404: no such model, version, run or interaction
│   ├── Forbidden            401 / 403: no key, wrong key, wrong Host or Origin
│   ├── Conflict             409: the state does not allow it
│   ├── Gone                 410: a version whose files were collected
│   └── TooLarge             413: body, prompt list or header beyond its limit
├── EngineError              an engine failed
│   ├── EngineUnavailable    no replica can take the request now (HTTP 503)
│   │   └── EngineFull       every replica's queue is full (HTTP 429)
│   ├── VersionNotLoaded     the replica does not hold the version
│   └── Unfit                the version is of no use to this engine, now or later
├── StoreError               the database refused: full disk, locked, newer schema
├── WeightsError             a version's files are missing, broken or changed
├── RunError                 a training run cannot start or go on                      exit 1
│   ├── RunBusy              the policy already has a running run
│   ├── JudgeError           the judge's endpoint will refuse every call
│   └── GuardTripped         a step left its band; the last good version stands
└── ChannelClosed            a channel was closed while someone still wrote to it
"""

from __future__ import annotations

from onlinerl.redaction import redacted


class OnlineRLError(Exception):
    """Base of all. `str(error)` is one sentence that says what happened and what to do; secrets in the URLs
    that it quotes are hidden, since messages end up in logs and reports."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class SettingsError(OnlineRLError):
    """A setting, file or path given by a person is wrong; the command exits with 2."""


class PortTaken(SettingsError):
    """The port is in use; the message names the port and the setting that moves it."""


class ModelError(SettingsError):
    """The model directory is missing, broken or of a kind that cannot be served."""


class RequestError(OnlineRLError):
    """A client's mistake. `status` is the HTTP status, `code` OpenAI's machine-readable code."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class NotFound(RequestError):
    """No such model, version, run or interaction."""

    status = 404


class Forbidden(RequestError):
    """The key, Host or Origin does not allow it."""

    status = 403

    def __init__(self, message: str, *, status: int = 403, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class Conflict(RequestError):
    """The object's state does not allow the transition asked for."""

    status = 409


class Gone(RequestError):
    """It was there, and is not any more: a version whose files gc took."""

    status = 410


class TooLarge(RequestError):
    """A body or list is beyond its limit."""

    status = 413


class EngineError(OnlineRLError):
    """An engine failed while it worked on a request or a load."""


class EngineUnavailable(EngineError):
    """No replica can take the request now; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineFull(EngineUnavailable):
    """The queue is full; `retry_after` is an estimate of when it has room again."""


class VersionNotLoaded(EngineError):
    """The replica does not hold the version that was asked for."""


class Unfit(EngineError):
    """The engine can never hold the version: a kind of model that it does not serve, tensors that miss."""


class StoreError(OnlineRLError):
    """The database refused: disk full, locked for too long, or made by a newer onlinerl."""


class WeightsError(OnlineRLError):
    """A version's files are missing, broken, or not those that its manifest names."""


class RunError(OnlineRLError):
    """A training run cannot start or cannot go on; the command exits with 1."""


class RunBusy(RunError):
    """The policy already has a running run; the message names it."""


class JudgeError(RunError):
    """The judge's endpoint refuses every call: wrong key, address or model; the message names the setting."""


class GuardTripped(RunError):
    """A training step left its band; nothing of it was published."""


class ChannelClosed(OnlineRLError):
    """The channel is closed: no more items go in."""
