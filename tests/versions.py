"""Small models and versions of them, for tests about versions rather than about what they say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from onlinerl.config import Settings, load_settings
from onlinerl.records import Version
from onlinerl.store import versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from onlinerl.weights.directory import DataRange


def tiny_model(folder: Path) -> Path:
    """A directory that looks like a model to everybody but torch."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "none"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, folder / "model.safetensors")
    return folder


def settings_of(home: Path, *overrides: str) -> Settings:
    """Settings of a policy `tab` on a tiny model."""
    return load_settings(
        overrides=[f"policies.tab.model={tiny_model(home / 'model')}", *overrides], home=home
    )


def scaled(source: Path, target: Path, scale: float) -> None:
    """Write the weights of `source` times `scale` (float32 or bfloat16), without torch."""
    raw = source.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    formats = {entry["dtype"] for name, entry in json.loads(raw[8:start]).items() if name != "__metadata__"}
    if formats == {"F32"}:
        data = (np.frombuffer(raw, "<f4", offset=start) * np.float32(scale)).tobytes()
    else:
        assert formats == {"BF16"}
        wide = (np.frombuffer(raw, "<u2", offset=start).astype("<u4") << 16).view("<f4")
        data = ((wide * np.float32(scale)).view("<u4") >> 16).astype("<u2").tobytes()
    target.write_bytes(raw[:start] + data)


def make_version(
    settings: Settings,
    database: Database,
    *,
    parent: int = 0,
    run: int | None = None,
    scale: float = 1.01,
    policy: str = "tab",
    data: DataRange | None = None,
) -> Version:
    """A candidate whose weights are its parent's times `scale`, on disk and registered."""

    def fill(folder: Path) -> None:
        source = directory.folder(settings.weights_url, policy, parent)
        scaled(source / "model.safetensors", folder / "model.safetensors", scale)

    with database.write() as c:
        id = versions.next_id(c, policy)
    version = directory.write_version(
        settings.weights_url,
        policy,
        id,
        fill=fill,
        parent=parent,
        run=run,
        data=data or DataRange(),
        settings={},
        metrics={},
    )
    with database.write() as c:
        versions.register(c, version)
    return version
