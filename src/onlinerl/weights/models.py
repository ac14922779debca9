"""Model directories: what a name means, and which files of a directory make a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from onlinerl.config import BUILTIN_MODEL
from onlinerl.errors import ModelError, WeightsError
from onlinerl.weights.header import read_header

INDEX = "model.safetensors.index.json"
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What a model directory may hold beside its weights that serving or training reads."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def resolve_model(name: str) -> Path:
    """The directory of a model: the built-in one, a directory, or a Hugging Face id (fetched if need be).

    Raises ModelError saying what is missing.
    """
    if name == BUILTIN_MODEL:
        place = Path(__file__).parent.parent / "models" / BUILTIN_MODEL
        if not place.is_dir():
            raise ModelError(f"the built-in model is missing in this installation: {place} does not exist")
        model_files(place)
        return place
    place = Path(name).expanduser()
    if place.exists():
        model_files(place)
        return place.resolve()
    if not _HUB_ID.fullmatch(name) or name.count("/") != 1:
        raise ModelError(
            f"the model {name!r} is neither a directory here, nor {BUILTIN_MODEL}, nor a Hugging Face id "
            "(owner/name)"
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    # Takes half a second to import, and is needed for models by id alone.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", INDEX, *COMPANIONS]
    try:
        try:
            place = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
            model_files(place)
        except (LocalEntryNotFoundError, ModelError):  # not there, or only in part
            place = Path(snapshot_download(name, allow_patterns=patterns))
            model_files(place)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"the model {name} is no directory here and cannot be fetched: {reason}") from None
    return place


def model_files(model_dir: Path) -> list[str]:
    """Names of the files of a model directory that a version needs; every header is read."""
    if not model_dir.is_dir():
        raise ModelError(f"the model directory {model_dir} does not exist")
    for needed in ("config.json", "tokenizer.json"):
        if not (model_dir / needed).is_file():
            raise ModelError(f"the model directory {model_dir} has no {needed}")
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir / 'config.json'} cannot be read: {error}") from None
    weights = _weight_files(model_dir)
    for name in weights:
        try:
            read_header((model_dir / name).resolve())
        except WeightsError as error:
            raise ModelError(str(error)) from None
    index = [INDEX] if (model_dir / INDEX).is_file() else []
    return [name for name in COMPANIONS if (model_dir / name).is_file()] + index + weights


def _weight_files(model_dir: Path) -> list[str]:
    if (model_dir / INDEX).is_file():
        try:
            names = sorted(set(json.loads((model_dir / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{model_dir / INDEX} cannot be understood") from None
    elif (model_dir / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    for name in names:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or not name.endswith(".safetensors"):
            raise ModelError(
                f"{model_dir / INDEX} names {name!r}, which is no safetensors file of the directory"
            )
        if not (model_dir / name).is_file():
            raise ModelError(f"the model directory {model_dir} has no {name}, which its index names")
    if not names:
        pickles = sorted(path.name for path in model_dir.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise ModelError(
                f"{model_dir} has its weights as a pickle ({pickles[0]}), which can run code and is never "
                "loaded: save the model with save_pretrained(safe_serialization=True)"
            )
        raise ModelError(f"the model directory {model_dir} has no *.safetensors")
    return names
