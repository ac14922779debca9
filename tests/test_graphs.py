"""Decode steps of fixed shapes, with a capture that repeats them eagerly and looks at the addresses a real
graph would use: on CPU everything but CUDA itself. `python -m bench.decode` checks that on a GPU."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from onlinerl.config import Engine
from onlinerl.errors import VersionNotLoaded, WeightsError
from onlinerl.records import FinishReason, Generation
from onlinerl.replica.decoder import Decoder, End, Event, Group, Running
from onlinerl.replica.graphs import Capture, Replay, Shape, Steps, shape_of
from onlinerl.replica.model import Skeleton, Weights, build, read_weights
from onlinerl.replica.rows import Chunk, Prompts, Rows, batched
from onlinerl.replica.sampling import Drawn, draw, draw_whole
from onlinerl.replica.versions import Versions
from tests.test_decoder import (
    CONFIGS,
    GROUPED,
    Collector,
    ask,
    check,
    finish,
    make,
    skeleton_of,
    start,
    texts,
)


class Fake:
    """A capture that repeats a pass as a graph does: fails where the memory it was captured on is not what
    the pass is about any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = 0
        self.replays = 0
        self.places: set[tuple[int, ...]] = set()
        """Where weights and caches were that something was captured on."""
        self._last: tuple[int, ...] = ()
        compute = Skeleton.compute

        def noting(skeleton: Skeleton, weights: Weights, *inputs: Any, **keep: Any) -> Any:
            result = compute(skeleton, weights, *inputs, **keep)
            rows: Rows = inputs[2]
            caches = [tensor for layer in rows.store for tensor in (layer.keys, layer.values)]
            # oneDNN's have no address; `test_new_weights_…` does without them
            plain = [tensor for tensor in weights.tensors if not tensor.is_mkldnn]
            self._last = tuple(tensor.data_ptr() for tensor in plain + caches)
            return result

        monkeypatch.setattr(Skeleton, "compute", noting)

    def __call__(self, compute: Callable[[], None], pool: object) -> tuple[Replay, object]:
        compute()
        then = self._last
        self.captures += 1
        self.places.add(then)

        def repeat() -> None:
            compute()
            assert self._last == then, "a graph reads and writes where nothing is any more"
            self.replays += 1

        return repeat, "pool"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that tiny models go through several of."""
    for name, value in {"FEWEST_ROWS": 2, "MORE_ROWS": 2, "SHORTEST": 16, "AFTER": 3}.items():
        monkeypatch.setattr(f"onlinerl.replica.graphs.{name}", value)


def group_on(folder: Path, rows: int, capture: Capture) -> Group:
    skeleton = skeleton_of(folder)
    return Group(0, skeleton, skeleton.take_first(), rows, capture)


def answers(events: Sequence[Event], begun: Sequence[Running]) -> list[list[Drawn | End]]:
    return [[item for owner, item in events if owner is sequence] for sequence in begun]


def test_shapes_cover_what_is_asked_and_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert shape_of(1, 1, 256, 2048) == Shape(16, 256)
    assert shape_of(16, 256, 256, 2048) == Shape(16, 256)
    assert shape_of(17, 257, 256, 2048) == Shape(64, 512)
    assert shape_of(65, 1025, 256, 2048) == Shape(256, 2048)
    assert shape_of(65, 1025, 100, 1200) == Shape(100, 1200)
    assert shape_of(3, 5, 8, 96) == Shape(8, 96)


@pytest.mark.parametrize("kind", CONFIGS)
def test_fixed_shapes_give_what_passes_of_any_shape_give(kind: str, tmp_path: Path, fake: Fake) -> None:
    make(tmp_path, CONFIGS[kind])
    skeleton = skeleton_of(tmp_path)
    requests = [
        ask(
            text,
            temperature=(0.0, 0.3, 0.8, 1.0)[i % 4],
            top_p=(1.0, 0.9)[i // 12],  # the first dozen only
            top_logprobs=(0, 2)[i > 20],
            seed=i,
            max_tokens=1 + 5 * (i % 6),
        )
        for i, text in enumerate(texts(24))
    ]
    weights = skeleton.take_first()
    plain, fixed = Group(0, skeleton, weights, 9), Group(0, skeleton, weights, 9, fake)
    given = []
    for group in (plain, fixed):
        waiting, begun, events = requests[::-1], [], list[Event]()
        with torch.inference_mode():
            while waiting or group.running:
                while waiting and group.running < 7:
                    begun.append(start(group, waiting.pop()))
                events += group.step(64)[0]
        given.append(answers(events, begun))
    assert fake.captures >= 3
    assert fake.replays > 20
    for one, other in zip(*given, strict=True):
        assert one[-1] == other[-1]
        for a, b in zip(one[:-1], other[:-1], strict=True):
            assert isinstance(a, Drawn)
            assert isinstance(b, Drawn)
            assert a.token == b.token
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


class HostTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that are given tensors of the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_pass_neither_reads_results_nor_brings_tensors_from_the_host(kind: str, tmp_path: Path) -> None:
    # A capture forbids both. On the device without data the first raises, and the second is noted.
    make(tmp_path, CONFIGS[kind])
    skeleton = build(tmp_path, torch.device("cpu"), torch.bfloat16, None)
    weights = skeleton.take_first()
    nowhere = torch.device("meta")
    for module in skeleton.model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = tensor.detach().to(nowhere)
    skeleton.device = nowhere
    skeleton._no_mask = skeleton._no_mask.to(nowhere)
    placed = Weights(tuple(tensor.to(nowhere) for tensor in weights.tensors))
    steps = Steps(skeleton, placed, Rows(4, 96), None)
    with torch.inference_mode(), HostTensors() as noted:
        steps.compute(Shape(4, 64))
    assert noted.seen == []


def test_rows_that_are_taken_along_keep_what_they_hold(tmp_path: Path, fake: Fake) -> None:
    model = make(tmp_path, CONFIGS["qwen2"])
    group = group_on(tmp_path, 4, fake)
    base = [(7 * i) % 97 for i in range(40)]
    first = start(group, ask(base, seed=1, max_tokens=4))
    events = finish(group, 100)
    assert first.row is not None
    row = first.row.index
    held = [
        tensor[row, : first.done].clone()
        for layer in group._cache.store
        for tensor in (layer.key_rows, layer.value_rows)
    ]
    # `first`'s row lies idle below the others'.
    others = [start(group, ask(text, seed=9, max_tokens=20)) for text in texts(3, seed=8)]
    finish(group, 100, events)
    assert fake.replays > 0
    now = [
        tensor[row, : first.done]
        for layer in group._cache.store
        for tensor in (layer.key_rows, layer.value_rows)
    ]
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))
    again = start(group, ask([*base, 5, 6], seed=2))
    assert again.done >= 40
    finish(group, 100, events)
    for sequence in (first, *others, again):
        check(model, sequence, events)


def test_a_cache_that_grows_is_captured_anew(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinerl.replica.decoder.CACHE_BYTES", 1)
    model = make(tmp_path, Qwen2Config(**GROUPED | {"max_position_embeddings": 2048}))
    group = group_on(tmp_path, 2, fake)
    assert group.steps is not None
    short = start(group, ask([3, 1, 4, 1, 5], seed=1, max_tokens=30))
    events: list[Event] = []
    with torch.inference_mode():
        for _ in range(6):
            events += group.step(100)[0]
    assert group.steps.captured == {Shape(2, 16)}
    long = start(group, ask([2, 7, 1] * 200, seed=2, max_tokens=20))
    assert not group.steps.captured
    finish(group, 1000, events)
    assert Shape(2, 1024) in group.steps.captured
    check(model, short, events)
    check(model, long, events)


def test_versions_that_take_turns_have_graphs_of_their_own(tmp_path: Path, fake: Fake) -> None:
    models = [make(tmp_path / str(seed), CONFIGS["qwen2"], seed) for seed in (0, 1)]
    skeleton = skeleton_of(tmp_path / "0")
    weights = [skeleton.take_first(), read_weights(tmp_path / "1", skeleton)]
    groups = [Group(n, skeleton, weights[n], 2, fake) for n in (0, 1)]
    running = [start(group, ask(texts(1)[0], seed=5, max_tokens=20)) for group in groups]
    events: list[Event] = []
    with torch.inference_mode():
        while any(group.running for group in groups):
            for group in groups:
                events += group.step(64)[0] if group.running else []
    assert len(fake.places) == 2
    assert fake.replays > 10
    for model, sequence in zip(models, running, strict=True):
        check(model, sequence, events)
    assert running[0].ids != running[1].ids


def test_a_capture_that_fails_is_told_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(compute: Callable[[], None], pool: object) -> tuple[Replay, object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = make(tmp_path, CONFIGS["qwen2"])
    skeleton = skeleton_of(tmp_path)
    group = Group(0, skeleton, skeleton.take_first(), 4, refuse)
    sequences = [start(group, ask(text, seed=1, max_tokens=30)) for text in texts(4)]
    with caplog.at_level(logging.WARNING):
        events = finish(group, 64)
    assert [record.message for record in caplog.records] == [
        "CUDA graphs are off, decoding is slower: a capture failed: "
        "operation not permitted when stream is capturing"
    ]
    for sequence in sequences:
        check(model, sequence, events)


def test_prompts_of_another_version_do_not_hold_up_steps_of_fixed_shape(tmp_path: Path, fake: Fake) -> None:
    model = make(tmp_path, CONFIGS["qwen2"])
    group = group_on(tmp_path, 4, fake)
    decoding = start(group, ask(texts(1)[0], seed=1, max_tokens=12))
    with torch.inference_mode():
        events = group.step(64)[0]
        late = start(group, ask(texts(1, seed=4)[0], seed=2))
        for _ in range(8):
            made, read = group.step(0)
            assert (len(made), read) == (1, 0)
            events += made
    assert late.done == 0
    assert fake.replays > 0
    finish(group, 64, events)
    check(model, decoding, events)
    check(model, late, events)


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_as_one_padded_batch_give_what_single_ones_give(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinerl.replica.rows.PADDED", 200)  # several batches
    model = make(tmp_path, CONFIGS[kind])
    skeleton = skeleton_of(tmp_path)
    group = Group(0, skeleton, skeleton.take_first(), 12)
    group.batched = True
    # Rows with something in them, a prompt that shares a beginning, pieces of prompts, decoding rows beside.
    events = list[Event]()
    begun = [start(group, ask(text, seed=1, max_tokens=3)) for text in texts(6)]
    finish(group, 1000, events)
    long = next(text for text in texts(6) if len(text) > 30)
    for seed, prompts in enumerate((texts(4, seed=8), [[*long[:28], 5, 6, 7], *texts(6, seed=9)])):
        begun += [start(group, ask(text, seed=seed, max_tokens=9)) for text in prompts]
        with torch.inference_mode():
            events += group.step(70)[0]
            events += group.step(70)[0]
    finish(group, 40, events)
    for sequence in begun:
        check(model, sequence, events)


def test_beginnings_that_follow_one_another_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlinerl.replica.rows.PADDED", 12)
    sizes = [(3, 0, 1), (0, 0, 4), (1, 0, 2), (5, 7, 3), (2, 0, 5), (6, 0, 3), (7, 0, 1), (4, 2, 2)]
    chunks, offset = [], 0
    for row, begin, size in sizes:
        chunks.append(Chunk(row, begin, size, offset))
        offset += size
    made = batched(chunks, torch.device("cpu"))
    told = [
        (one.offset, one.rows.tolist(), one.longest, one.places.tolist()) if isinstance(one, Prompts) else one
        for one in made
    ]
    assert told == [
        (0, [3, 0, 1], 4, [0, 4, 5, 6, 7, 8, 9]),
        chunks[3],
        (10, [2, 6], 5, [0, 1, 2, 3, 4, 5, 6, 7]),
        chunks[6],
        chunks[7],
    ]


# ---------------------------------------------------------------------------------- weights in place


class Place:
    """A decoder and its versions, with a capture for all groups."""

    def __init__(self, folder: Path, capture: Capture | None) -> None:
        settings = Engine(device="cpu", dtype="float32", concurrency=4)
        self.collector = Collector()
        self.ends = 0
        self.decoder = Decoder(
            concurrency=4, queue=64, prefill=64, threads=1,
            deliver=self.collector.deliver, crashed=self.collector.crashed,
        )  # fmt: skip
        self.versions = Versions(settings, self.decoder, 1)
        self.versions.capture = capture
        self.versions.load(0, str(folder), "")
        self.decoder.start()

    def sample(self, version: int, **changes: Any) -> tuple[list[Running], list[Event]]:
        before = len(self.collector.events)
        asked = [
            replace(ask(text, seed=n, max_tokens=25, **changes), version=version)
            for n, text in enumerate(texts(4, seed=6))
        ]
        requests: list[tuple[Generation, object]] = [(one, None) for one in asked]
        begun = self.decoder.submit_all(requests)
        self.ends += len(begun)
        assert self.collector.ended(self.ends)
        assert self.collector.crash is None, self.collector.crash
        return begun, self.collector.events[before:]

    def close(self) -> None:
        self.decoder.close()
        self.decoder.join(10)


def test_new_weights_take_the_place_of_a_forgotten_versions(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinerl.replica.model._can_pack", lambda: False)  # as on a GPU
    monkeypatch.setattr("onlinerl.replica.graphs.FEWEST_ROWS", 4)  # one shape for all steps
    monkeypatch.setattr("onlinerl.replica.graphs.SHORTEST", 96)
    models = [make(tmp_path / str(seed), CONFIGS["qwen2"], seed) for seed in range(4)]
    place = Place(tmp_path / "0", fake)
    try:
        for version in range(3):
            if version:
                place.versions.put(version, models[version].state_dict())
            for sequence in (sampled := place.sample(version))[0]:
                check(models[version], sequence, sampled[1])
            if version:
                place.versions.unload(version - 1)
        # 0 and 2 share a group, 1 had another one; what was captured is still good.
        assert (fake.captures, len(fake.places)) == (2, 2)
        with pytest.raises(VersionNotLoaded):
            place.sample(1)
        # What cannot be a version leaves the spare group where it is, and the others as they are.
        with pytest.raises(WeightsError, match="lack"):
            place.versions.put(3, {})
        (tmp_path / "broken").mkdir()
        with pytest.raises(Exception, match="config"):
            place.versions.load(3, str(tmp_path / "broken"), "")
        place.versions.load(3, str(tmp_path / "3"), "")
        for version in (3, 2):
            for sequence in (sampled := place.sample(version))[0]:
                check(models[version], sequence, sampled[1])
        assert (fake.captures, len(fake.places)) == (2, 2)
    finally:
        place.close()


def test_what_a_broken_version_left_in_the_cache_does_not_reach_the_next_one(
    tmp_path: Path, fake: Fake
) -> None:
    model = make(tmp_path, CONFIGS["qwen2"])
    place = Place(tmp_path, fake)
    try:
        broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in model.state_dict().items()}
        place.versions.put(1, broken)
        _, events = place.sample(1)
        assert {item.reason for _, item in events if isinstance(item, End)} == {FinishReason.ERROR}
        place.versions.unload(1)
        place.versions.put(2, model.state_dict())
        for sequence in (sampled := place.sample(2))[0]:
            check(model, sequence, sampled[1])
    finally:
        place.close()


def test_without_capture_no_group_outlives_its_version(tmp_path: Path) -> None:
    model = make(tmp_path, CONFIGS["qwen2"])
    place = Place(tmp_path, None)
    try:
        place.versions.put(1, model.state_dict())
        group = place.decoder._groups[1]
        place.versions.unload(1)
        place.versions.put(2, model.state_dict())
        assert place.decoder._groups[2] is not group
        assert place.decoder._groups[2].steps is None
    finally:
        place.close()


# -------------------------------------------------------------------------------------------- sampling


def test_drawing_on_the_device_is_drawing() -> None:
    torch.manual_seed(5)
    chance = random.Random(5)
    logits = torch.randn(64, 500) * 4
    temperatures = [(0.0, 1e-300, 0.3, 1.0, 1.7)[n % 5] for n in range(64)]
    uniforms = [chance.random() for _ in range(62)] + [0.0, 1 - 2**-53]
    pairs = draw_whole(
        logits,
        torch.tensor(temperatures, dtype=torch.double),
        torch.tensor(uniforms, dtype=torch.double),
    ).tolist()
    expected = draw(logits, temperatures, [1.0] * 64, uniforms, [0] * 64)
    assert [(int(token), logprob) for token, logprob in pairs] == [(x.token, x.logprob) for x in expected]
