"""Which versions are in memory: loading beside the decoding, checking what is loaded, forgetting."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor

from onlinerl.config import Engine
from onlinerl.errors import EngineError, OnlineRLError, WeightsError
from onlinerl.replica.decoder import Decoder, Group
from onlinerl.replica.graphs import Capture, capture_cuda
from onlinerl.replica.model import REST, Skeleton, Weights, build, place_weights, read_weights

SPARE = 2
"""Versions beyond `engine.resident` that may be in memory for a moment, while old ones finish."""


class Versions:
    """Loads and forgets versions of one policy. Its methods block: call them from worker threads."""

    def __init__(self, settings: Engine, decoder: Decoder, threads: int) -> None:
        self._settings = settings
        self._decoder = decoder
        self._threads = threads
        self._one = threading.Lock()
        self._skeleton: Skeleton | None = None
        self.device = _device(settings.device)
        self.dtype = _dtype(settings.dtype, self.device)
        self.capture: Capture | None = (
            capture_cuda if settings.graphs and self.device.type == "cuda" else None
        )
        """How decode steps are captured; None: they are not, and no group outlives its version."""

    @property
    def context(self) -> int:
        """Longest prompt plus answer; 0 before the first version."""
        return self._skeleton.context if self._skeleton is not None else 0

    def load(self, version: int, url: str, digest: str) -> None:
        """Make `version` servable; returns when it is. Idempotent, one at a time.

        Raises WeightsError (files), ModelError (architecture), EngineError (too many versions): then
        everything is as before.
        """
        with self._one:
            torch.set_num_threads(self._threads)
            if self._decoder.keep(version):
                return
            held = self._room()
            folder = local_folder(url)
            check_files(folder, digest)
            skeleton = self._skeleton
            if skeleton is None or held == 0:
                self._skeleton = built = build(folder, self.device, self.dtype, self._settings.context)
                self._add(version, built, lambda _: built.take_first())
            else:
                self._add(version, skeleton, partial(read_weights, folder, skeleton))

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make `version` servable from tensors in memory (copied), by their names in a model file. The
        architecture is that of the first version, which was loaded.

        Raises WeightsError (tensors), EngineError (too many versions, none loaded yet, version taken).
        """
        with self._one:
            if self._skeleton is None:
                raise EngineError("the first version must be loaded from a folder")
            if self._decoder.keep(version):
                raise EngineError(f"version {version} is there already, and a version never changes")
            self._room()
            self._add(version, self._skeleton, partial(place_weights, tensors, self._skeleton))

    def _add(self, version: int, skeleton: Skeleton, fill: Callable[[Weights | None], Weights]) -> None:
        """Give the decoder a group for `version`: that of a forgotten version where one is kept, whose
        tensors `fill` then overwrites in place, or a new one."""
        spare = self._decoder.take_spare(skeleton)
        if spare is None:
            group = Group(version, skeleton, fill(None), self._settings.concurrency, self.capture)
        else:
            try:
                spare.renew(version, fill(spare.weights))
            except OnlineRLError:
                self._decoder.give_spare(spare)
                raise
            group = spare
        self._decoder.add(group)

    def linear_weights(self) -> frozenset[str]:
        """Names of the matrices of the linear layers, the head left out: what a quantised engine rounds."""
        if self._skeleton is None:
            return frozenset()
        model = self._skeleton.model
        head = model.get_output_embeddings()
        return frozenset(
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        )

    def _room(self) -> int:
        """Versions in memory. Raises EngineError when there is no room for another one."""
        held = self._decoder.counts()[3]
        if held >= self._settings.resident + SPARE:
            raise EngineError(
                f"{held} versions are in memory already (engine.resident is {self._settings.resident}): "
                "unload one first"
            )
        return held

    def unload(self, version: int) -> None:
        """Forget `version`; returns when its last sequence has ended. Idempotent."""
        while not self._decoder.forget(version):
            time.sleep(0.005)


def local_folder(url: str) -> Path:
    """The folder that `url` (a path or file://) names. Raises WeightsError when there is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        raise WeightsError(f"the embedded engine loads from local folders, not from {parts.scheme}://")
    folder = Path(unquote(parts.path) if parts.scheme else url)
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder")
    return folder


def check_files(folder: Path, digest: str) -> None:
    """Compare the manifest with `digest` and the files with the manifest. Without a digest there is none.

    Raises WeightsError. Hashes in small pieces: it runs beside the decoding.
    """
    if not digest:
        return
    try:
        raw = (folder / "manifest.json").read_bytes()
        manifest: dict[str, Any] = json.loads(raw)
        files = dict(manifest["files"])
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no manifest: the version does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"the manifest of {folder} is broken: {error}") from error
    if hashlib.sha256(raw).hexdigest() != digest:
        raise WeightsError(f"the manifest of {folder} is not the one that was registered")
    for name, facts in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise WeightsError(f"the manifest of {folder} names the file {name!r}, which lies elsewhere")
        try:
            if path.stat().st_size != facts["size"]:
                raise WeightsError(f"{path} has {path.stat().st_size} bytes instead of {facts['size']}")
            if _sha256(path) != facts["sha256"]:
                raise WeightsError(f"{path} is not the file that its manifest names")
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            time.sleep(REST)
    return digest.hexdigest()


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise EngineError("engine.device is cuda, but torch sees no CUDA device")
    return torch.device(wanted)


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
