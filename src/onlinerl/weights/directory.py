"""Immutable version folders: `{root}/{policy}/{id:06d}/`, with a manifest that digests every byte.

A version exists when its folder has a manifest. It is written into a hidden staging folder beside it: files
first, each on disk, the manifest last, and then the whole folder takes its name in one step. So a killed
writer leaves a staging folder, which `gc` removes, and never half a version. Nothing writes into a version
folder again. Weights are safetensors only; a pickle is neither written nor read.

A version that a LoRA run made holds the full weights, as any, and beside them in a folder of its own what of
them is not its base's: `adapter/`, in peft's format, under the same manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISDIR
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from safetensors import SafetensorError

from onlinerl.config import POLICY_NAME
from onlinerl.errors import ModelError, WeightsError
from onlinerl.records import Version, VersionState
from onlinerl.weights.header import Place, read_header
from onlinerl.weights.models import COMPANIONS, FILE_NAME, INDEX, PICKLES, model_files

MANIFEST = "manifest.json"
FORMAT = 2
"""Of the manifest; a reader refuses a newer one. Written as 1 where there is no adapter, which is all that 2
added."""
ADAPTER = "adapter"
"""The one sub-folder that a version may have."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What it holds: names that peft, and engines which load adapters, expect."""
ABANDONED = 3600.0
"""Seconds without a change after which gc takes a folder that no database names: nobody writes it."""

_BLOCK = 1 << 20


# ----------------------------------------------------------------------------------------- manifest


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a version."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a version: the digest of its raw bytes, its format, its shape, its file."""

    sha256: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class DataRange:
    """The feedback that a version learned from, all steps of its run together."""

    first_at: float | None = None
    """Request time of the oldest sample."""
    last_at: float | None = None
    """Request time of the newest sample."""
    samples: int = 0
    steps: int = 0
    """Batches; the version's `step`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version is. Made by `write_version` and `import_base`, eaten by whoever loads or checks it."""

    policy: str
    id: int
    parent: int | None
    run: int | None
    created_at: float
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    data: DataRange = DataRange()
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    adapter_base: int | None = None
    """The version that the adapter in `adapter/` is to be put on; None: there is no adapter."""

    def as_json(self) -> dict[str, Any]:
        """Plain containers, ready for a JSON writer."""
        tree = {
            "format": 1,
            "policy": self.policy,
            "id": self.id,
            "parent": self.parent,
            "run": self.run,
            "created_at": self.created_at,
            "files": {name: asdict(entry) for name, entry in self.files.items()},
            "tensors": {name: asdict(entry) for name, entry in self.tensors.items()},
            "data": asdict(self.data),
            "settings": dict(self.settings),
            "metrics": dict(self.metrics),
        }
        if self.adapter_base is not None:
            tree |= {"format": FORMAT, "adapter_base": self.adapter_base}
        return tree

    def as_bytes(self) -> bytes:
        """The manifest's file, the same for the same content; a version's `digest` is its SHA-256."""
        return json.dumps(self.as_json(), indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def folder(root: str, policy: str, id: int) -> Path:
    """The folder of a version. Raises WeightsError for a name or id that is none."""
    if not POLICY_NAME.fullmatch(policy):
        raise WeightsError(f"{policy!r} is not a policy's name")
    if isinstance(id, bool) or not isinstance(id, int) or id < 0:
        raise WeightsError(f"{id!r} is not a version's id")
    return Path(_local(root)) / policy / f"{id:06d}"


def read_manifest(url: str) -> Manifest:
    """The manifest of a version's folder. Raises WeightsError when it is missing, broken or too new."""
    return _manifest(Path(_local(url)))[0]


def file_path(url: str, name: str) -> str:
    """Where a file of a version lies; `name` as its manifest has it, or the manifest's own."""
    return str(Path(_local(url)) / name)


def file_size(path: str) -> int:
    """In bytes. Raises WeightsError when the file is not there."""
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None


def open_file(path: str) -> BinaryIO:
    """A file of a version to read; a link is none. Raises WeightsError when it is not there."""
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None


def verify(url: str, digest: str | None = None) -> None:
    """Recompute every SHA-256; raises WeightsError naming the first fault.

    `digest`: what the database says the manifest's SHA-256 is. Without it a manifest that was changed
    together with its files is not noticed.
    """
    place = Path(_local(url))
    manifest, found = _manifest(place)
    if digest is not None and found != digest:
        raise WeightsError(f"{place / MANIFEST} is not the one that was registered: its SHA-256 is {found}")
    for extra in sorted({*_names(place)} - {MANIFEST, *manifest.files}):
        raise WeightsError(f"{place / extra} does not belong to the version: its manifest does not name it")
    seen: dict[str, TensorEntry] = {}
    for name, entry in sorted(manifest.files.items()):
        path = place / name
        if path.is_symlink() or not path.is_file():
            raise WeightsError(f"{path} is missing")
        if path.stat().st_size != entry.size:
            raise WeightsError(f"{path} has {path.stat().st_size} bytes where the manifest says {entry.size}")
        sha256, tensors = _digest(path, weights=_of_model(name))
        for tensor, is_now in tensors.items():
            if manifest.tensors.get(tensor) != is_now:
                raise WeightsError(f"tensor {tensor} in {path} is not the one that the manifest names")
        if sha256 != entry.sha256:
            raise WeightsError(
                f"{path} was changed: its SHA-256 is {sha256}, the manifest says {entry.sha256}"
            )
        seen |= tensors
    for tensor in manifest.tensors.keys() - seen.keys():
        raise WeightsError(f"tensor {tensor} is missing in {place}")


# ------------------------------------------------------------------------------------------ writing


def write_version(
    root: str,
    policy: str,
    id: int,
    *,
    fill: Callable[[Path], None],
    parent: int,
    run: int | None,
    data: DataRange,
    settings: Mapping[str, Any],
    metrics: Mapping[str, float],
    adapter_base: int | None = None,
) -> Version:
    """Make a version: `fill(folder)` writes its weights there, everything else comes from the parent.

    `fill` gets an empty staging folder and writes `model.safetensors` (or shards and their index) and
    nothing else; the parent's configuration and tokenizer are linked beside it. The weights must have the
    parent's tensors: same names, same shapes, any number format. Returns the version as a candidate, to be
    registered; it is on disk by then. Take `id` from `store.versions.next_id`.

    With `adapter_base`, the version that an adapter is relative to, `fill` also makes the folder ADAPTER with
    ADAPTER_FILES in it.

    Raises WeightsError when the version exists, when what `fill` wrote does not fit, and when the disk
    refuses; then nothing of it is left. Other exceptions of `fill` go through, after the same cleaning.
    """
    target = folder(root, policy, id)
    source = folder(root, policy, parent)
    inherited, _ = _manifest(source)
    with _staging(target) as staging:
        try:
            fill(staging)
        except SafetensorError as error:  # its writer reports a full disk so
            raise WeightsError(f"the weights of {target} cannot be written: {error}") from error
        written = set(_names(staging))
        strange = sorted(
            name
            for name in written
            if _of_model(name) and not name.endswith(".safetensors") and name != INDEX
        )
        if strange:
            raise WeightsError(f"a version's weights are safetensors files only, not {strange[0]}")
        adapter = {name for name in written if not _of_model(name)}
        wanted = set() if adapter_base is None else {f"{ADAPTER}/{name}" for name in ADAPTER_FILES}
        if adapter != wanted:
            raise WeightsError(
                f"the adapter of {target} should have the files {sorted(wanted)} and has {sorted(adapter)}"
            )
        for name in inherited.files:
            if name in COMPANIONS:
                _link(source / name, staging / name)
        return _publish(
            staging,
            target,
            Manifest(
                policy=policy,
                id=id,
                parent=parent,
                run=run,
                created_at=time.time(),
                files={},
                tensors=inherited.tensors,
                data=data,
                settings=dict(settings),
                metrics=dict(metrics),
                adapter_base=adapter_base,
            ),
            VersionState.CANDIDATE,
        )


def import_base(root: str, policy: str, model_dir: Path) -> Version:
    """Make version 0 from a model directory, by hard links where the file system allows them.

    When it exists already it is returned, provided that it is the same model. Safe when two processes do
    it at once, or one was killed doing it. Returns a live version, to be registered. Raises ModelError for
    a directory that is no usable model, and for another model than the one that version 0 came from.
    """
    target = folder(root, policy, 0)
    names = model_files(model_dir)
    if not (target / MANIFEST).exists():
        try:
            with _staging(target) as staging:
                for name in names:
                    _link((model_dir / name).resolve(), staging / name)
                manifest = Manifest(policy, 0, None, None, time.time(), files={}, tensors={})
                return _publish(staging, target, manifest, VersionState.LIVE)
        except WeightsError as error:
            if not (target / MANIFEST).exists():
                raise ModelError(str(error)) from None
            # Another process was faster: its version 0 is as good, if it is of the same model.
    manifest, digest = _manifest(target)
    if not _same(manifest, target, model_dir, names):
        raise ModelError(
            f"version 0 of policy {policy} in {root} was made from another model than {model_dir}: "
            "give the policy another name, or choose another --home"
        )
    return _version(manifest, target, digest, VersionState.LIVE)


@dataclass(frozen=True, slots=True)
class Removed:
    """A folder that gc removed."""

    folder: str
    bytes: int
    """What its files held; hard-linked ones free less."""


def gc(
    root: str,
    policy: str,
    keep: Collection[int],
    *,
    registered: Collection[int] = (),
    dry_run: bool = False,
) -> list[Removed]:
    """Remove the policy's folders that nobody needs; returns them (with `dry_run`: only says which).

    `keep` and `registered` come from `store.versions.collect`: registered versions that are not kept go at
    once, but for those that the adapter of a kept one is relative to. Whatever else lies there (staging
    folders, folders without a manifest, versions that were never registered) may be at work this moment, and
    goes only when nothing in it has changed for ABANDONED.
    """
    home = folder(root, policy, 0).parent
    removed: list[Removed] = []
    if not home.is_dir():
        return removed
    keep = {*keep, *_bases(root, policy, keep)}
    names = {f"{id:06d}" for id in registered} - {f"{id:06d}" for id in keep}
    kept = {f"{id:06d}" for id in keep}
    for place in sorted(home.iterdir()):
        if place.name in kept or place.is_symlink() or not place.is_dir():
            continue
        if not re.fullmatch(r"\d{6,}|\.\d{6,}\.\w+", place.name):
            continue  # not ours
        try:
            entries = {entry: entry.stat() for entry in place.rglob("*")}
            changed = max(place.stat().st_mtime, *(0.0, *(one.st_ctime for one in entries.values())))
        except FileNotFoundError:
            continue  # it is being renamed or removed by somebody else: not ours to take
        if place.name not in names and time.time() - changed < ABANDONED:
            continue
        if not dry_run:
            # Without its manifest it is no version, whatever else is still there if we are killed here.
            (place / MANIFEST).unlink(missing_ok=True)
            _sync(place)
            shutil.rmtree(place, ignore_errors=True)
        size = sum(one.st_size for one in entries.values() if not S_ISDIR(one.st_mode))
        removed.append(Removed(str(place), size))
    return removed


# ------------------------------------------------------------------------------------------ helpers


def _local(url: str) -> str:
    """The path behind a URL or a path."""
    if url.startswith("file://"):
        return unquote(urlsplit(url).path)
    if "://" in url:
        raise WeightsError(f"weights at {url} are not supported: use a local folder")
    return url


def _bases(root: str, policy: str, ids: Collection[int]) -> set[int]:
    """The versions that the adapters of some versions are relative to."""
    found = set()
    for id in ids:
        place = folder(root, policy, id)
        if (place / MANIFEST).exists():
            found.add(_manifest(place)[0].adapter_base)
    return {base for base in found if base is not None}


def _of_model(name: str) -> bool:
    """Whether a file, by its name in the manifest, is one of the model itself."""
    return not name.startswith(f"{ADAPTER}/")


def _names(place: Path) -> list[str]:
    """Names of a version's files as its manifest has them; whatever else lies there appears too."""
    found = []
    for entry in place.iterdir():
        if entry.name == ADAPTER and entry.is_dir() and not entry.is_symlink():
            found += [f"{ADAPTER}/{below.name}" for below in entry.iterdir()]
        else:
            found.append(entry.name)
    return sorted(found)


def _manifest(place: Path) -> tuple[Manifest, str]:
    """The manifest in a folder and its SHA-256."""
    path = place / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise WeightsError(f"there is no version in {place}: it has no {MANIFEST}") from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    try:
        tree = json.loads(text)
        if tree["format"] > FORMAT:
            raise WeightsError(f"{path} was written by a newer onlinerl (format {tree['format']})")
        manifest = Manifest(
            policy=str(tree["policy"]),
            id=int(tree["id"]),
            parent=None if tree["parent"] is None else int(tree["parent"]),
            run=None if tree["run"] is None else int(tree["run"]),
            created_at=float(tree["created_at"]),
            files={
                name: FileEntry(int(entry["size"]), str(entry["sha256"]))
                for name, entry in tree["files"].items()
            },
            tensors={
                name: TensorEntry(
                    str(entry["sha256"]),
                    str(entry["dtype"]),
                    tuple(map(int, entry["shape"])),
                    str(entry["file"]),
                )
                for name, entry in tree["tensors"].items()
            },
            data=DataRange(**tree["data"]),
            settings=dict(tree["settings"]),
            metrics=dict(tree["metrics"]),
            adapter_base=None if tree.get("adapter_base") is None else int(tree["adapter_base"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{path} is broken: it cannot be understood") from None
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name.removeprefix(f"{ADAPTER}/")) or name == MANIFEST:
            raise WeightsError(f"{path} names the file {name!r}, which cannot be one of a version")
    return manifest, hashlib.sha256(text).hexdigest()


def _digest(path: Path, *, weights: bool) -> tuple[str, dict[str, TensorEntry]]:
    """SHA-256 of a file, and of each tensor where it is one of the model's `weights`, in one pass over its
    bytes. An adapter's tensors are not the model's; its file is only checked to be whole."""
    places = read_header(path) if path.suffix == ".safetensors" else []
    if not weights:
        places = []
    whole = hashlib.sha256()
    tensors: dict[str, TensorEntry] = {}
    with path.open("rb") as file:
        _feed(file, places[0].begin if places else path.stat().st_size, whole)
        for place in places:
            own = hashlib.sha256()
            _feed(file, place.end - place.begin, whole, own)
            tensors[place.name] = _entry(place, own.hexdigest(), path.name)
        while block := file.read(_BLOCK):
            whole.update(block)
    return whole.hexdigest(), tensors


def _feed(file: BinaryIO, length: int, *digests: Any) -> None:
    while length > 0:
        block = file.read(min(_BLOCK, length))
        if not block:
            raise WeightsError(f"{file.name} became shorter while it was read")
        for digest in digests:
            digest.update(block)
        length -= len(block)


def _entry(place: Place, sha256: str, file: str) -> TensorEntry:
    return TensorEntry(sha256=sha256, dtype=place.dtype, shape=place.shape, file=file)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, gone afterwards unless it became the target.

    Turns the disk's refusals into WeightsError.
    """
    if (target / MANIFEST).exists():
        raise WeightsError(f"{target} exists already; a version never changes")
    staging = target.parent / f".{target.name}.{secrets.token_hex(6)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
    except OSError as error:
        raise WeightsError(
            f"{target} cannot be written: {error.strerror or error}; nothing was kept of it"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, target: Path, draft: Manifest, state: VersionState) -> Version:
    """Digest what lies in staging, write the manifest last, give the folder its name.

    `draft.tensors` is what the tensors must look like (names and shapes), where it is not empty.
    """
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for name in _names(staging):
        path = staging / name
        if not FILE_NAME.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            raise WeightsError(f"{path.name!r} cannot be a file of a version")
        if path.suffix in PICKLES:
            raise WeightsError(f"{path.name} is a pickle, which can run code: weights are safetensors only")
        _sync(path)
        sha256, found = _digest(path, weights=_of_model(name))
        double = sorted(found.keys() & tensors.keys())
        if double:
            raise WeightsError(f"tensor {double[0]} is in {tensors[double[0]].file} and in {path.name}")
        files[name] = FileEntry(path.stat().st_size, sha256)
        tensors |= found
    if not tensors:
        raise WeightsError(f"no weights were written for {target}")
    if draft.tensors:
        _fits(tensors, draft.tensors)
    manifest = Manifest(
        policy=draft.policy,
        id=draft.id,
        parent=draft.parent,
        run=draft.run,
        created_at=draft.created_at,
        files=files,
        tensors=tensors,
        data=draft.data,
        settings=draft.settings,
        metrics=draft.metrics,
        adapter_base=draft.adapter_base,
    )
    try:
        text = manifest.as_bytes()
    except (TypeError, ValueError) as error:
        raise WeightsError(f"the manifest of {target} cannot be written: {error}") from None
    temporary = staging / f".{MANIFEST}"
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(staging / MANIFEST)
    if draft.adapter_base is not None:
        _sync(staging / ADAPTER)
    _sync(staging)
    if target.is_dir() and not (target / MANIFEST).exists():
        # Half a version, of a writer that does not stage: it does not exist, and must not be in the way.
        target.rename(target.parent / f".{target.name}.{secrets.token_hex(6)}")
    try:
        staging.rename(target)
    except OSError:
        if (target / MANIFEST).exists():
            raise WeightsError(f"{target} exists already; a version never changes") from None
        raise
    _sync(target.parent)
    return _version(manifest, target, hashlib.sha256(text).hexdigest(), state)


def _fits(tensors: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry]) -> None:
    for name in sorted(wanted.keys() - tensors.keys()):
        raise WeightsError(f"tensor {name} of the parent is missing in the new weights")
    for name in sorted(tensors.keys() - wanted.keys()):
        raise WeightsError(f"tensor {name} is in the new weights and not in the parent's")
    for name, entry in tensors.items():
        if entry.shape != wanted[name].shape:
            raise WeightsError(
                f"tensor {name} has shape {list(entry.shape)}, in the parent {list(wanted[name].shape)}"
            )


def _same(manifest: Manifest, target: Path, model_dir: Path, names: Collection[str]) -> bool:
    """Whether version 0 came from this model, without reading all of its weights.

    Linked files are the same by name; of copies the sizes, the small files' digests, and of weights the
    first and last block are compared.
    """
    if set(names) != set(manifest.files):
        return False
    for name in names:
        source = (model_dir / name).resolve()
        if source.stat().st_size != manifest.files[name].size:
            return False
        if (target / name).exists() and os.path.samefile(source, target / name):
            continue
        if name.endswith(".safetensors"):
            if _ends(source) != _ends(target / name):
                return False
        elif hashlib.sha256(source.read_bytes()).hexdigest() != manifest.files[name].sha256:
            return False
    return True


def _ends(path: Path) -> tuple[bytes, bytes]:
    try:
        with path.open("rb") as file:
            first = file.read(_BLOCK)
            file.seek(max(0, path.stat().st_size - _BLOCK))
            return first, file.read(_BLOCK)
    except FileNotFoundError:
        return b"", b""


def _version(manifest: Manifest, target: Path, digest: str, state: VersionState) -> Version:
    return Version(
        policy=manifest.policy,
        id=manifest.id,
        state=state,
        parent=manifest.parent,
        run=manifest.run,
        created_at=manifest.created_at,
        url=str(target),
        digest=digest,
        metrics=manifest.metrics,
        step=manifest.data.steps,
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise WeightsError(
            f"{target.name} comes from the parent; the weights' writer must not write it"
        ) from None
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _sync(path: Path) -> None:
    """Bring a file's bytes or a folder's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
