"""From prompts to answers, as the gateway would have recorded them, and from answers to samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onlinerl.datasets.fim import FimPrompt
from onlinerl.errors import ModelError
from onlinerl.records import FinishReason, Generation, Sample, Verdict
from onlinerl.text import templates
from onlinerl.text.codec import Codec
from onlinerl.validate.engine import LocalEngine, Rollout


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of one prompt. Made by `Rollouts`, eaten by raters and the evaluation."""

    id: str
    """That of the request; the completions of one prompt in a group share it."""
    index: int
    prompt: FimPrompt
    asked: str
    """The prompt as a client would have sent it."""
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: str
    """As a client would get it."""
    reason: FinishReason
    version: int
    temperature: float
    top_p: float

    @property
    def silent(self) -> bool:
        """The policy chose to end before any text."""
        return self.completion == "" and self.reason is FinishReason.STOP

    def sample(
        self, policy: str, *, user: str, verdict: Verdict, source: str, score: float | None = None
    ) -> Sample:
        """As the store's `claim` gives it: the whole answer was displayed."""
        return Sample(
            id=self.id,
            index=self.index,
            policy=policy,
            version=self.version,
            project="validation",
            user=user,
            at=0.0,
            prompt_ids=self.prompt_ids,
            completion_ids=self.ids,
            behavior_logprobs=self.logprobs,
            loss_mask=(True,) * len(self.ids),
            temperature=self.temperature,
            top_p=self.top_p,
            language=self.prompt.language,
            multiline=True,  # nobody asked for a single line
            verdict=verdict,
            verdict_source=source,
            completion=self.completion,
            score=score,
            prompt=self.asked,
        )


class Rollouts:
    """Asks an engine as the gateway does: the model's own template, stops at its special tokens."""

    def __init__(self, engine: LocalEngine, model: Path, policy: str, *, seed: int) -> None:
        self.engine = engine
        self.policy = policy
        self.codec = Codec.open(model)
        template = templates.find(self.codec.added.get)
        if template is None:
            raise ModelError(f"the model in {model} has no fill-in-the-middle markers that are known here")
        if not self.codec.eos_ids:
            raise ModelError(f"the model in {model} names no end-of-text token")
        self.template = template
        markers = (self.codec.added[marker] for marker in template.markers if marker in self.codec.added)
        self.stop_ids = tuple(dict.fromkeys((*self.codec.eos_ids, *markers)))
        self.drawn = 0
        """Requests so far: what their ids and seeds are made of."""
        self._seed = seed
        self._ids: dict[FimPrompt, tuple[int, ...]] = {}

    def prompt_ids(self, prompt: FimPrompt) -> tuple[int, ...]:
        """The prompt's tokens."""
        found = self._ids.get(prompt)
        if found is None:
            found = tuple(self.codec.encode(self.template.render(prompt.prefix, prompt.suffix)))
            self._ids[prompt] = found
        return found

    def fitting(self, prompts: Sequence[FimPrompt], answer: int) -> list[FimPrompt]:
        """Those that leave room for `answer` tokens in the engine's context."""
        return [one for one in prompts if len(self.prompt_ids(one)) + answer <= self.engine.context]

    def answers(
        self,
        prompts: Sequence[FimPrompt],
        version: int,
        *,
        temperature: float,
        top_p: float,
        max_tokens: int,
        group: int = 1,
        seed: str = "",
    ) -> list[Answer]:
        """`group` answers to each prompt, one prompt after the other.

        Without `seed` every call draws anew; the same seed and prompts give the same draws.
        """
        requests: list[Generation] = []
        for number, prompt in enumerate(prompts):
            name = f"{seed}-{number}" if seed else f"r{self.drawn + number}"
            ids = self.prompt_ids(prompt)
            requests += [
                Generation(
                    id=name,
                    policy=self.policy,
                    version=version,
                    prompt_ids=ids,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    seed=random.Random(f"{self._seed}/{name}/{index}").getrandbits(63),
                    stop_ids=self.stop_ids,
                )
                for index in range(group)
            ]
        if not seed:
            self.drawn += len(prompts)
        rollouts = self.engine.sample(requests)
        return [
            self._answer(request, rollout, prompts[place // group], place % group)
            for place, (request, rollout) in enumerate(zip(requests, rollouts, strict=True))
        ]

    def _answer(self, request: Generation, rollout: Rollout, prompt: FimPrompt, index: int) -> Answer:
        decoder = self.codec.decoder(request.prompt_ids)
        text = "".join(decoder.push(id) for id in rollout.ids if id not in self.stop_ids) + decoder.end()
        return Answer(
            id=request.id,
            index=index,
            prompt=prompt,
            asked=self.template.render(prompt.prefix, prompt.suffix),
            prompt_ids=request.prompt_ids,
            ids=rollout.ids,
            logprobs=rollout.logprobs,
            completion=text,
            reason=rollout.reason,
            version=request.version,
            temperature=request.temperature,
            top_p=request.top_p,
        )
