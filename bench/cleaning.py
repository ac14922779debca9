"""What cleaning costs, per request, against a look at everything that is remembered.

    python -m bench.cleaning [--requests 20000] [--near 0.95] [--out bench/results/cleaning.json]

The traffic is made up of random words: the share `--near` is at one of some places, where somebody has typed
a few words more. Both sides read the same requests with the default rules and must decide alike (`wrong` says
where not, and the exit code is 1 then): `index` is `learning/cleaning.py`, which looks at all places at once,
`plain` compares with each that the window holds of the user, as it was once. Seconds of the processor, one
thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onlinerl import config
from onlinerl.learning.cleaning import Recent, fault, place
from onlinerl.learning.rewards import examples
from onlinerl.records import Sample, text_hash
from onlinerl.text.templates import QWEN

RESULT = Path(__file__).parent / "results" / "cleaning.json"
WORDS = 400
"""Different words of all files together."""
SIZE = (20, 60)
"""Words before and after the cursor, least and most of each."""
CASES = {
    "one user, 5 places": (1, 5, 1),
    "one user, 20 places": (1, 20, 1),
    "one user, 20 places, 3 words typed": (1, 20, 3),
    "50 users, 200 places": (50, 200, 1),
}
"""(users, places, words typed) by name."""


def near(one: frozenset[int], other: frozenset[int], similarity: float) -> bool:
    """Whether the Jaccard similarity |A ∩ B| / |A ∪ B| is at least `similarity`.

    >>> near(frozenset({1, 2, 3}), frozenset({2, 3, 4}), 0.5)
    True
    """
    few, many = sorted((len(one), len(other)))
    if few < similarity * many:
        return False  # it is at most few / many
    both = len(one & other)
    return both >= similarity * (few + many - both)


class Plain:
    """What `Recent` decides, without an index."""

    def __init__(self, rules: config.Cleaning) -> None:
        self.rules = rules
        self._known: deque[tuple[Sample, str, frozenset[int]]] = deque(maxlen=rules.window)

    def fault(self, sample: Sample) -> str:
        """As `Recent.fault`."""
        rules = self.rules
        mine = [known for known in self._known if known[0].user == sample.user]
        prompt = text_hash(sample.prompt)
        same = [one for one, hashed, _ in mine if hashed == prompt]
        chance = math.exp(min(0.0, sum(sample.behavior_logprobs)))
        copy = rules.copies > 0 and any(one.completion_ids == sample.completion_ids for one in same)
        if copy and len(same) * chance <= rules.copies:
            return "duplicate"
        if rules.repeats is None:
            return ""
        requests = {one.id for one in same} - {sample.id}
        if len(requests) >= rules.repeats:
            return "repeated"
        if rules.similarity < 1.0 and len(mine) >= rules.repeats:
            here = place(sample.prompt)
            requests |= {one.id for one, _, there in mine if near(there, here, rules.similarity)}
            if len(requests - {sample.id}) >= rules.repeats:
                return "near_duplicate"
        return ""

    def add(self, sample: Sample) -> None:
        """As `Recent.add`."""
        self._known.append((sample, text_hash(sample.prompt), place(sample.prompt)))


def traffic(requests: int, share: float, users: int, places: int, typed: int, seed: int = 0) -> list[Sample]:
    """Requests of which `share` are at one of some places, `typed` words further on, the others anywhere."""
    rng = random.Random(seed)
    words = [f"name_{number}" for number in range(WORDS)]

    def anywhere() -> list[str]:
        return rng.choices(words, k=rng.randint(*SIZE))

    hot = [(f"u{place % users}", anywhere(), anywhere()) for place in range(places)]
    found = []
    for number in range(requests):
        if rng.random() < share:
            user, before, after = rng.choice(hot)
            before = [*before, *rng.choices(words, k=typed)]
        else:
            user, before, after = f"u{rng.randrange(users)}", anywhere(), anywhere()
        ids = tuple(rng.randrange(1000) for _ in range(4))
        prompt = QWEN.render(" ".join(before), " ".join(after))
        found.append(replace(examples()[0], id=f"i{number}", user=user, prompt=prompt, completion_ids=ids))
    return found


def decide(
    samples: Sequence[Sample], rules: config.Cleaning, make: Callable[[config.Cleaning], Recent | Plain]
) -> tuple[list[str], float]:
    """(reason of each, seconds)."""
    memory = make(rules)
    reasons = []
    began = time.process_time()
    for sample in samples:
        reason = fault(sample, rules) or memory.fault(sample)
        if not reason:
            memory.add(sample)
        reasons.append(reason)
    return reasons, time.process_time() - began


def measure(requests: int, share: float) -> dict[str, Any]:
    """All cases, by name."""
    rules = config.Cleaning()
    found = {}
    for name, (users, places, typed) in CASES.items():
        samples = traffic(requests, share, users, places, typed)
        reasons, index = decide(samples, rules, Recent)
        expected, plain = decide(samples, rules, Plain)
        found[name] = {
            "left_out": dict(Counter(filter(None, reasons))),
            "wrong": sum(one != other for one, other in zip(reasons, expected, strict=True)),
            "seconds": {"plain": round(plain, 2), "index": round(index, 2)},
            "ratio": round(plain / index, 1),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where the two decided otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--near", type=float, default=0.95)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    results = measure(given.requests, given.near)
    report = {
        "what": "seconds to clean; see bench/cleaning.py",
        "requests": given.requests,
        "near": given.near,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "results": results,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(case["wrong"] for case in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
