"""The decoding loop in this process, on tiny models of several architectures with random weights."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from onlinerl.errors import ModelError, WeightsError
from onlinerl.records import FinishReason, Generation
from onlinerl.replica.decoder import Decoder, End, Event, Group, Running
from onlinerl.replica.model import Skeleton, build, read_weights
from onlinerl.replica.sampling import Drawn
from tests.replicas import reference

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
}
LEARNED: dict[str, Any] = {"vocab_size": 97, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 96}
CONFIGS = {
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "llama": LlamaConfig(**GROUPED),
    "starcoder2": Starcoder2Config(**GROUPED, use_bias=True),
    "gpt2": GPT2Config(**LEARNED),
    "gpt_bigcode": GPTBigCodeConfig(**LEARNED, multi_query=True),
}
CPU = torch.device("cpu")


def make(folder: Path, config: Any, seed: int = 0, spread: float = 6.0) -> Any:
    """A model with random weights wide enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    model.eval().save_pretrained(folder)
    return model


def ask(prompt: Sequence[int], **fields: Any) -> Generation:
    return Generation(id="c", policy="p", version=0, prompt_ids=tuple(prompt), **{"max_tokens": 9, **fields})


@torch.inference_mode()
def start(group: Group, request: Generation) -> Running:
    sequence = Running(
        request=request,
        limit=request.max_tokens,
        ids=list(request.prompt_ids),
        uniform=random.Random(request.seed),
    )
    group.admit(sequence)
    return sequence


@torch.inference_mode()
def finish(group: Group, budget: int, events: list[Event] | None = None) -> list[Event]:
    events = [] if events is None else events
    while group.running:
        events += group.step(budget)[0]
    return events


def check(model: Any, sequence: Running, events: Sequence[Event]) -> None:
    mine = [item for owner, item in events if owner is sequence]
    drawn = [item for item in mine if isinstance(item, Drawn)]
    assert isinstance(mine[-1], End)
    assert sequence.ids[sequence.prompt :] == [item.token for item in drawn]
    expected = reference(model, sequence.request, [item.token for item in drawn])
    assert (torch.tensor([item.logprob for item in drawn]) - expected).abs().max().item() < 1e-4


def texts(count: int, seed: int = 3) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(97) for _ in range(chance.randrange(1, 50))] for _ in range(count)]


def skeleton_of(folder: Path) -> Skeleton:
    return build(folder, CPU, torch.float32, None)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture_gives_exact_logprobs_while_sequences_come_and_go(
    kind: str, tmp_path: Path
) -> None:
    model = make(tmp_path, CONFIGS[kind])
    skeleton = skeleton_of(tmp_path)
    group = Group(0, skeleton, skeleton.take_first(), 6)
    waiting = [
        ask(
            text,
            temperature=(0.3, 0.8, 1.0)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            max_tokens=1 + 3 * (i % 5),
        )
        for i, text in enumerate(texts(20))
    ]
    events: list[Event] = []
    begun = []
    with torch.inference_mode():
        while waiting or group.running:
            while waiting and group.running < 6:
                begun.append(start(group, waiting.pop()))
            events += group.step(16)[0]
    for sequence in begun:
        check(model, sequence, events)


def test_the_beginning_of_an_earlier_prompt_is_reused_and_exact(tmp_path: Path) -> None:
    model = make(tmp_path, CONFIGS["qwen2"])
    skeleton = skeleton_of(tmp_path)
    group = Group(0, skeleton, skeleton.take_first(), 3)
    base = [(7 * i) % 97 for i in range(40)]
    first = start(group, ask(base, seed=1))
    events = finish(group, 100)
    # The same row again, a row in use copied, and one that shares too little.
    again = start(group, ask([*base, 5, 6], seed=2))
    assert again.done >= 40
    with torch.inference_mode():
        events += group.step(100)[0]
    sibling = start(group, ask([*base[:30], 8, 8, 8], seed=3))
    assert sibling.done == 30
    stranger = start(group, ask([*base[:10], 1, 1, 1], seed=4))
    assert stranger.done == 0
    finish(group, 100, events)
    for sequence in (first, again, sibling, stranger):
        check(model, sequence, events)


def test_a_cache_that_must_grow_stays_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlinerl.replica.decoder.CACHE_BYTES", 1)
    config = Qwen2Config(**GROUPED | {"max_position_embeddings": 2048})
    model = make(tmp_path, config)
    skeleton = skeleton_of(tmp_path)
    group = Group(0, skeleton, skeleton.take_first(), 2)
    short = start(group, ask([3, 1, 4, 1, 5], seed=1, max_tokens=30))
    with torch.inference_mode():
        events = group.step(100)[0] + group.step(100)[0]
    long = start(group, ask([2, 7, 1] * 200, seed=2, max_tokens=20))
    finish(group, 100, events)
    check(model, short, events)
    check(model, long, events)


def test_a_second_version_takes_the_skeleton_and_not_the_weights(tmp_path: Path) -> None:
    models = [make(tmp_path / str(seed), CONFIGS["qwen2"], seed) for seed in (0, 1)]
    skeleton = skeleton_of(tmp_path / "0")
    groups = [
        Group(0, skeleton, skeleton.take_first(), 2),
        Group(1, skeleton, read_weights(tmp_path / "1", skeleton), 2),
    ]
    running = [start(group, ask(texts(1)[0], seed=5, max_tokens=20)) for group in groups]
    events: list[Event] = []
    with torch.inference_mode():
        for _ in range(20):
            for group in groups:
                events += group.step(8)[0] if group.running else []
    finish(groups[0], 8, events)
    finish(groups[1], 8, events)
    for model, sequence in zip(models, running, strict=True):
        check(model, sequence, events)
    assert running[0].ids != running[1].ids


def test_an_untied_version_of_a_tied_model_is_another_architecture(tmp_path: Path) -> None:
    make(tmp_path / "tied", CONFIGS["qwen2"])
    make(tmp_path / "untied", Qwen2Config(**GROUPED, tie_word_embeddings=False))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        read_weights(tmp_path / "untied", skeleton_of(tmp_path / "tied"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**GROUPED, sliding_window=32), "last 32 tokens only"),
        (MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2), "."),
    ],
)
def test_models_without_full_attention_are_refused(config: Any, reason: str, tmp_path: Path) -> None:
    make(tmp_path, config, spread=1.0)
    with pytest.raises(ModelError, match=reason):
        build(tmp_path, CPU, torch.float32, None if isinstance(config, MistralConfig) else 64)


def test_a_window_that_the_context_fits_in_is_served(tmp_path: Path) -> None:
    model = make(tmp_path, MistralConfig(**GROUPED, sliding_window=32))
    skeleton = build(tmp_path, CPU, torch.float32, 32)
    group = Group(0, skeleton, skeleton.take_first(), 1)
    sequence = start(group, ask(range(20), seed=1))
    check(model, sequence, finish(group, 64))


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    make(tmp_path, CONFIGS["llama"])
    LlamaConfig(**GROUPED | {"num_hidden_layers": 3}).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="missing_keys"):
        skeleton_of(tmp_path)


def test_bfloat16_serves_and_reports_what_it_sampled_from(tmp_path: Path) -> None:
    make(tmp_path, CONFIGS["qwen2"], spread=3.0)
    skeleton = build(tmp_path, CPU, torch.bfloat16, None)
    group = Group(0, skeleton, skeleton.take_first(), 2)
    sequences = [start(group, ask(text, seed=1)) for text in texts(2)]
    events = finish(group, 8)
    assert {sequence.prompt + 9 for sequence in sequences} <= {len(s.ids) for s in sequences}
    assert all(item.logprob <= 0 for _, item in events if isinstance(item, Drawn))


class Collector:
    """Receives a decoder's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.crash: BaseException | None = None
        self.changed = threading.Condition()

    def deliver(self, events: list[Event]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def crashed(self, error: BaseException) -> None:
        with self.changed:
            self.crash = error
            self.changed.notify_all()

    def ended(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(
                lambda: self.crash is not None or sum(isinstance(e, End) for _, e in self.events) >= count, 20
            )


def decoder_on(folder: Path, collector: Collector) -> tuple[Decoder, Group]:
    make(folder, CONFIGS["qwen2"])
    skeleton = skeleton_of(folder)
    group = Group(0, skeleton, skeleton.take_first(), 2)
    decoder = Decoder(
        concurrency=2, queue=8, prefill=16, threads=1, deliver=collector.deliver, crashed=collector.crashed
    )
    decoder.add(group)
    decoder.start()
    return decoder, group


def test_an_aborted_sequence_gets_no_further_token(tmp_path: Path) -> None:
    collector = Collector()
    decoder, group = decoder_on(tmp_path, collector)
    running = decoder.submit(ask(range(10), max_tokens=80), None)
    also = decoder.submit(ask(range(5), max_tokens=5), None)
    third = decoder.submit(ask(range(7), max_tokens=5), None)
    decoder.abort(third)
    decoder.abort(running)
    assert collector.ended(3)
    decoder.close()
    decoder.join(10)
    reasons = {owner: item.reason for owner, item in collector.events if isinstance(item, End)}
    assert reasons == {
        running: FinishReason.ABORT,
        third: FinishReason.ABORT,
        also: FinishReason.LENGTH,
    }
    mine = [item for owner, item in collector.events if owner is running]
    assert isinstance(mine[-1], End)
    assert len(mine) < 80
    assert group.running == 0


def test_a_broken_loop_says_so_instead_of_living_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    decoder, group = decoder_on(tmp_path, collector)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(group.skeleton, "forward", broken)
    decoder.submit(ask(range(10)), None)
    assert collector.ended(1)
    decoder.join(10)
    assert str(collector.crash) == "out of memory"
    assert not decoder.is_alive()
