"""What a wheel holds: everything that the package needs beside its modules."""

from __future__ import annotations

import tomllib
from pathlib import Path, PurePosixPath

import onlinerl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = Path(onlinerl.__file__).parent


def test_every_data_file_of_the_package_is_in_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["onlinerl"]
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in (".py", ".pyc")]
    lost = [str(path) for path in data if not any(PurePosixPath(path).match(p) for p in patterns)]
    assert lost == []
    assert {"MODEL_CARD.md", "model.safetensors", "tokenizer.json"} <= {path.name for path in data}


def test_the_version_is_said_once() -> None:
    assert PROJECT["project"]["version"] == onlinerl.__version__


def test_pins_lie_within_the_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(r.name): r for line in lines if line and line[0] != "#" for r in [Requirement(line)]
    }
    optional = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *optional["dev"]]:
        wanted = Requirement(text)
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None, f"{wanted.name} has no pin"
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert Version(specifier.version) in wanted.specifier, f"{pin} is not within {wanted}"
