"""Version folders: complete or not there, never changed, never outside their root."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import save_file

from onlinerl.errors import ModelError, OnlineRLError, WeightsError
from onlinerl.records import Version, VersionState
from onlinerl.weights import directory
from onlinerl.weights.directory import DataRange
from onlinerl.weights.header import read_header
from onlinerl.weights.models import resolve_model

INDEX = "model.safetensors.index.json"
SHAPES = {"model.a": (8, 4), "model.b": (4,), "scalar": ()}


def safetensors_bytes(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """The format, written by hand: any dtype."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def weights(seed: int) -> bytes:
    """A bfloat16 model."""
    source = random.Random(seed)
    return safetensors_bytes(
        {
            name: ("BF16", shape, source.randbytes(2 * int(np.prod(shape, dtype=int))))
            for name, shape in SHAPES.items()
        }
    )


def fill(seed: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(weights(seed))

    return write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "model.safetensors").write_bytes(weights(0))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "training_args.bin"):
        (place / name).write_text("{}")
    return place


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


@pytest.fixture
def base(root: str, model: Path) -> Version:
    return directory.import_base(root, "tab", model)


def write(root: str, id: int, put: Callable[[Path], None], parent: int = 0) -> Version:
    return directory.write_version(
        root,
        "tab",
        id,
        fill=put,
        parent=parent,
        run=5,
        data=DataRange(1.0, 2.0, samples=64, steps=2),
        settings={"lr": 1e-4},
        metrics={"reward": 0.5},
    )


def left(root: str) -> list[str]:
    return sorted(entry.name for entry in (Path(root) / "tab").iterdir())


# ------------------------------------------------------------------------------------- base model


def test_the_base_becomes_version_0_by_hard_links(root: str, model: Path, base: Version) -> None:
    place = Path(base.url)
    assert place == Path(root) / "tab" / "000000"
    assert (base.id, base.state, base.parent, base.run) == (0, VersionState.LIVE, None, None)
    files = {entry.name for entry in place.iterdir()}
    assert files == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "manifest.json",
    }
    assert os.path.samefile(place / "model.safetensors", model / "model.safetensors")
    assert base.digest == hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()
    directory.verify(base.url, base.digest)
    assert directory.import_base(root, "tab", model) == base


def test_the_manifest_digests_the_raw_bytes_of_each_tensor(base: Version) -> None:
    manifest = directory.read_manifest(base.url)
    assert set(manifest.tensors) == set(SHAPES)
    source = random.Random(0)
    for name, shape in SHAPES.items():
        entry = manifest.tensors[name]
        data = source.randbytes(2 * int(np.prod(shape, dtype=int)))
        assert entry.sha256 == hashlib.sha256(data).hexdigest()
        assert (entry.dtype, entry.shape, entry.file) == ("BF16", shape, "model.safetensors")
    assert json.loads(json.dumps(manifest.as_json())) == json.loads(
        Path(base.url, "manifest.json").read_bytes()
    )


def test_another_model_is_refused_where_version_0_exists(root: str, model: Path, base: Version) -> None:
    copy = model.parent / "copy"
    shutil.copytree(model, copy)
    assert directory.import_base(root, "tab", copy) == base  # the same model, from elsewhere
    (copy / "config.json").write_text('{"a":1}')
    with pytest.raises(ModelError, match="made from another model"):
        directory.import_base(root, "tab", copy)
    (copy / "config.json").write_text("{}")
    (copy / "model.safetensors").write_bytes(weights(1))
    with pytest.raises(ModelError, match="made from another model"):
        directory.import_base(root, "tab", copy)


def test_links_of_a_hub_cache_are_followed(root: str, model: Path) -> None:
    cache = model.parent / "snapshot"
    cache.mkdir()
    for entry in model.iterdir():
        (cache / entry.name).symlink_to(entry)
    version = directory.import_base(root, "tab", cache)
    assert not (Path(version.url) / "model.safetensors").is_symlink()
    directory.verify(version.url)


def test_where_links_are_impossible_files_are_copied(
    root: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    version = directory.import_base(root, "tab", model)
    assert not os.path.samefile(Path(version.url) / "model.safetensors", model / "model.safetensors")
    directory.verify(version.url)


IMPORTING = """
import sys
from pathlib import Path
from onlinerl.weights import directory
print("ready", flush=True)
sys.stdin.readline()
print(directory.import_base(sys.argv[1], "tab", Path(sys.argv[2])).digest)
"""


def environment() -> dict[str, str]:
    source = Path(__file__).parent.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(source / "src"), str(source)))}


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def test_three_processes_import_at_once(root: str, model: Path) -> None:
    children = [child(IMPORTING, root, str(model)) for _ in range(3)]
    for one in children:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    digests = {one.communicate("\n", timeout=60)[0] for one in children}
    assert len(digests) == 1
    assert left(root) == ["000000"]
    directory.verify(str(Path(root) / "tab" / "000000"), digests.pop().strip())


def test_half_a_version_of_a_foreign_writer_is_not_in_the_way(root: str, model: Path) -> None:
    half = Path(root) / "tab" / "000000"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    with pytest.raises(WeightsError, match=r"no manifest\.json"):
        directory.verify(str(half))
    directory.verify(directory.import_base(root, "tab", model).url)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda m: shutil.rmtree(m), "does not exist"),
        (lambda m: (m / "config.json").unlink(), "has no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda m: (m / "model.safetensors").rename(m / "model.bin"), "as a pickle .model.bin"),
        (lambda m: (m / "model.safetensors").write_bytes(weights(0)[:-1]), "was cut short"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\x80\x04pickle...." * 9), "no safetensors file"),
        (lambda m: (m / INDEX).write_text('{"weight_map": {"a": "../x"}}'), "names '../x'"),
        (lambda m: (m / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'), "has no b.safetensors"),
        (lambda m: (m / INDEX).write_text("[]"), "cannot be understood"),
    ],
)  # fmt: skip
def test_an_unusable_model_is_refused(
    root: str, model: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    if "pickle" in sentence:
        (model / "training_args.bin").unlink()
    spoil(model)
    with pytest.raises(ModelError, match=sentence):
        directory.import_base(root, "tab", model)
    assert not Path(root, "tab", "000000").exists()


def test_resolve_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = resolve_model("fim-27m")
    assert (packaged / "model.safetensors").is_file()
    assert resolve_model(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert resolve_model("model") == model
    with pytest.raises(ModelError, match="neither a directory"):
        resolve_model("/nowhere/at/all")
    with pytest.raises(ModelError, match="neither a directory"):
        resolve_model("nothing-here")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="owner/name is no directory here and cannot be fetched"):
        resolve_model("owner/name")


def test_the_packaged_model_verifies(root: str) -> None:
    version = directory.import_base(root, "tab", resolve_model("fim-27m"))
    directory.verify(version.url, version.digest)
    manifest = directory.read_manifest(version.url)
    assert manifest.tensors["model.embed_tokens.weight"].shape == (8192, 512)


# ---------------------------------------------------------------------------------------- writing


def test_a_version_has_its_parents_tokenizer_and_its_own_weights(root: str, base: Version) -> None:
    version = write(root, 1, fill(1))
    assert (version.id, version.state, version.parent, version.run, version.step) == (
        1,
        VersionState.CANDIDATE,
        0,
        5,
        2,
    )
    place = Path(version.url)
    assert os.path.samefile(place / "tokenizer.json", Path(base.url) / "tokenizer.json")
    assert (place / "model.safetensors").read_bytes() == weights(1)
    manifest = directory.read_manifest(version.url)
    assert manifest.data == DataRange(1.0, 2.0, 64, 2)
    assert (manifest.settings, manifest.metrics) == ({"lr": 1e-4}, {"reward": 0.5})
    directory.verify(version.url, version.digest)
    directory.verify(write(root, 2, fill(2), parent=1).url)
    assert left(root) == ["000000", "000001", "000002"]


def test_weights_may_come_in_shards_and_in_another_format(root: str, base: Version) -> None:
    def shards(folder: Path) -> None:
        first = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items() if name == "model.a"}
        rest = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items() if name != "model.a"}
        save_file(first, folder / "model-1.safetensors")
        save_file(rest, folder / "model-2.safetensors")
        (folder / INDEX).write_text("{}")

    version = write(root, 1, shards)
    manifest = directory.read_manifest(version.url)
    assert manifest.tensors["model.a"].file == "model-1.safetensors"
    assert manifest.tensors["scalar"].dtype == "F32"
    directory.verify(version.url)


def double(folder: Path) -> None:
    fill(1)(folder)
    save_file({"model.b": np.zeros(4, np.float32)}, folder / "more.safetensors")


def missing(folder: Path) -> None:
    save_file({"model.a": np.zeros((8, 4), np.float32)}, folder / "model.safetensors")


def extra(folder: Path) -> None:
    fill(1)(folder)
    save_file({"new": np.zeros(4, np.float32)}, folder / "more.safetensors")


def misshapen(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(
        safetensors_bytes(
            {name: ("U8", (*shape, 2), b"\0" * int(np.prod((*shape, 2)))) for name, shape in SHAPES.items()}
        )
    )


def pickled(folder: Path) -> None:
    fill(1)(folder)
    (folder / "optimizer.pt").write_bytes(b"")


def nested(folder: Path) -> None:
    fill(1)(folder)
    (folder / "x.safetensors").mkdir()


def linked(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("/etc/passwd")


def full(folder: Path) -> None:
    fill(1)(folder)
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("put", "sentence"),
    [
        (lambda folder: None, "no weights were written"),
        (missing, "tensor model.b of the parent is missing"),
        (extra, "tensor new is in the new weights and not"),
        (double, "tensor model.b is in model.safetensors and in more.safetensors"),
        (misshapen, "has shape"),
        (pickled, "safetensors files only, not optimizer.pt"),
        (nested, "'x.safetensors' cannot be a file"),
        (linked, "'model.safetensors' cannot be a file"),
        (full, "No space left"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"xx"), "no safetensors file"),
    ],
)
def test_weights_that_do_not_fit_leave_nothing(
    root: str, base: Version, put: Callable[[Path], None], sentence: str
) -> None:
    with pytest.raises(WeightsError, match=sentence):
        write(root, 1, put)
    assert left(root) == ["000000"]


def test_a_writers_own_exception_goes_through_and_leaves_nothing(root: str, base: Version) -> None:
    def interrupted(folder: Path) -> None:
        fill(1)(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(root, 1, interrupted)
    assert left(root) == ["000000"]


def test_a_version_never_changes(root: str, base: Version) -> None:
    first = write(root, 1, fill(1))
    with pytest.raises(WeightsError, match="never changes"):
        write(root, 1, fill(2))
    directory.verify(first.url, first.digest)

    def race(folder: Path) -> None:
        fill(3)(folder)
        write(root, 2, fill(2))

    with pytest.raises(WeightsError, match="never changes"):
        write(root, 2, race)
    assert Path(root, "tab", "000002", "model.safetensors").read_bytes() == weights(2)
    assert left(root) == ["000000", "000001", "000002"]


def test_numbers_that_are_none_do_not_reach_a_manifest(root: str, base: Version) -> None:
    with pytest.raises(WeightsError, match=r"manifest .* cannot be written"):
        directory.write_version(
            root, "tab", 1, fill=fill(1), parent=0, run=None, data=DataRange(), settings={},
            metrics={"reward": float("nan")},
        )  # fmt: skip
    assert left(root) == ["000000"]


@pytest.mark.parametrize("policy", ["..", "../x", "a/b", "", ".hidden", "/etc", "a\0b"])
def test_names_never_leave_the_root(root: str, model: Path, policy: str) -> None:
    with pytest.raises(WeightsError, match="not a policy's name"):
        directory.folder(root, policy, 0)
    with pytest.raises(WeightsError):
        directory.import_base(root, policy, model)
    with pytest.raises(WeightsError):
        directory.gc(root, policy, set())


@pytest.mark.parametrize("id", [-1, "../1", 1.5, True, None])
def test_ids_are_whole_numbers(root: str, id: object) -> None:
    with pytest.raises(WeightsError, match="not a version's id"):
        directory.folder(root, "tab", id)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- verifying


def change_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # the file may be linked from elsewhere
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda p: change_byte(p / "model.safetensors", -1), "tensor scalar in"),
        (lambda p: change_byte(p / "model.safetensors", -11), "tensor model.a in"),
        (lambda p: change_byte(p / "model.safetensors", 40), r"is broken|cannot be understood|not the one"),
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda p: change_byte(p / "tokenizer.json", 0), "tokenizer.json was changed"),
        (lambda p: (p / "config.json").write_text("{"), "1 bytes where"),
        (lambda p: (p / "evil.pkl").write_bytes(b""), "evil.pkl does not belong"),
        (lambda p: change_byte(p / "manifest.json", 3), "cannot be understood|not the one"),
        (lambda p: (p / "manifest.json").write_text("[]"), "cannot be understood"),
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
    ],
)
def test_verify_names_the_fault(
    root: str, base: Version, spoil: Callable[[Path], object], sentence: str
) -> None:
    version = write(root, 1, fill(1))
    for name in ("config.json", "tokenizer.json"):  # break the links: version 0 must not be spoilt too
        path = Path(version.url) / name
        text = path.read_bytes()
        path.unlink()
        path.write_bytes(text)
    directory.verify(version.url, version.digest)
    spoil(Path(version.url))
    with pytest.raises(WeightsError, match=sentence):
        directory.verify(version.url, version.digest)
    directory.verify(base.url, base.digest)


def test_any_flipped_bit_is_found(root: str, base: Version) -> None:
    version = write(root, 1, fill(1))
    source = random.Random(7)
    files = sorted(entry.name for entry in Path(version.url).iterdir())
    for _ in range(60):
        path = Path(version.url) / source.choice(files)
        before = path.read_bytes()
        change_byte(path, source.randrange(len(before)))
        with pytest.raises(WeightsError):
            directory.verify(version.url, version.digest)
        path.write_bytes(before)
        directory.verify(version.url, version.digest)


@given(data=st.binary(max_size=200))
def test_no_bytes_confuse_the_header_reader(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        try:
            read_header(path)
        except WeightsError:
            pass
        else:
            raise AssertionError("random bytes are no model")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("a", "b")},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1000]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}},
        {"a": 3},
        [],
    ],
)  # fmt: skip
def test_lying_headers_are_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    with pytest.raises(WeightsError):
        read_header(path)


def test_a_manifest_cannot_name_files_elsewhere(root: str, base: Version) -> None:
    path = Path(base.url) / "manifest.json"
    tree = json.loads(path.read_bytes())
    tree["files"]["../../../etc/passwd"] = {"size": 1, "sha256": ""}
    path.write_text(json.dumps(tree))
    with pytest.raises(WeightsError, match="cannot be one of a version"):
        directory.read_manifest(base.url)


def test_newer_manifests_and_other_places_are_refused(root: str, base: Version) -> None:
    assert directory.read_manifest(f"file://{base.url}").id == 0
    with pytest.raises(WeightsError, match="not supported"):
        directory.read_manifest("s3://bucket/tab/000000")
    path = Path(base.url) / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(WeightsError, match="newer onlinerl"):
        directory.read_manifest(base.url)


# --------------------------------------------------------------------------------------------- gc


def aged(place: Path) -> None:
    """As if nothing had changed there for two hours. (A file's ctime cannot be set back: remove it.)"""
    for entry in place.iterdir():
        entry.unlink()
    os.utime(place, (time.time() - 7200,) * 2)


def test_gc_takes_what_nobody_needs(root: str, base: Version) -> None:
    for id in (1, 2, 3):
        write(root, id, fill(id))
    home = Path(root) / "tab"
    (home / "notes").mkdir()
    plan = directory.gc(root, "tab", {0, 3}, registered={1}, dry_run=True)
    assert [Path(one.folder).name for one in plan] == ["000001"]
    assert plan[0].bytes > 100
    assert left(root) == ["000000", "000001", "000002", "000003", "notes"]
    # 2 is complete but not registered: its trainer may be about to
    assert directory.gc(root, "tab", {0, 3}, registered={1}) == plan
    assert left(root) == ["000000", "000002", "000003", "notes"]
    assert directory.gc(root, "tab", {0, 3}, registered={0, 3}) == []
    directory.verify(base.url)
    assert directory.gc(root, "nobody", set()) == []


def test_gc_leaves_what_is_being_written_and_takes_what_was_abandoned(root: str, base: Version) -> None:
    def collecting(folder: Path) -> None:
        fill(1)(folder)
        assert directory.gc(root, "tab", {0}) == []
        assert (folder / "model.safetensors").exists()

    directory.verify(write(root, 1, collecting).url)
    home = Path(root) / "tab"
    for name in (".000004.abc", "000005"):
        (home / name).mkdir()
        (home / name / "model.safetensors").write_bytes(b"half")
    assert directory.gc(root, "tab", {0, 1}) == []
    for name in (".000004.abc", "000005"):
        aged(home / name)
    assert len(directory.gc(root, "tab", {0, 1})) == 2
    assert left(root) == ["000000", "000001"]


# ------------------------------------------------------------------------- killed, and without room

WRITING = """
import sys
from pathlib import Path
from tests.test_directory import fill, write
for id in range(1, 10_000):
    write(sys.argv[1], id, fill(id), parent=0)
    print(id, flush=True)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_writer_leaves_whole_versions_only(root: str, base: Version, seed: int) -> None:
    one = child(WRITING, root)
    assert one.stdout is not None
    done = [one.stdout.readline()]
    time.sleep(random.Random(seed).uniform(0.02, 0.4))
    one.send_signal(signal.SIGKILL)
    done += one.communicate(timeout=10)[0].split("\n")[:-1]
    names = left(root)
    whole = [name for name in names if not name.startswith(".")]
    assert {f"{int(id):06d}" for id in done} <= set(whole)
    for name in whole:
        directory.verify(str(Path(root) / "tab" / name))
    assert len(names) - len(whole) <= 1
    # the next one goes on, with an id of its own
    directory.verify(write(root, len(whole) + 1, fill(0)).url)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_leaves_nothing_and_says_so(tiny: Path, model: Path) -> None:
    root = str(tiny / "weights")
    base = directory.import_base(root, "tab", model)  # copied: another file system

    def big(folder: Path) -> None:
        fill(1)(folder)
        with (folder / "more.safetensors").open("wb") as file:
            for _ in range(32):
                file.write(b"\0" * 65_536)
                file.flush()

    with pytest.raises(WeightsError, match="No space left on device"):
        write(root, 1, big)
    assert left(root) == ["000000"]
    directory.verify(base.url)
    directory.verify(write(root, 1, fill(1)).url)

    for entry in model.iterdir():
        if entry.name == "tokenizer.json":
            entry.write_bytes(b" " * 2_000_000)
    with pytest.raises(OnlineRLError, match="No space left on device"):
        directory.import_base(root, "other", model)
    assert list((tiny / "weights" / "other").iterdir()) == []
