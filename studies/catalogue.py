"""The studies: what is asked, and the lists of runs that answer it."""

from __future__ import annotations

from collections.abc import Iterable

from studies.plan import Column, Run, Study

RATES = (("3e-5", 3e-5), ("1e-4", 1e-4))
"""Learning rates that every arm of the headline is shown at."""


def columns(how: str, *names: str) -> tuple[Column, ...]:
    """Columns of a table, `how` greedy or sampled."""
    return tuple(Column(f"{how}.{name}", *_WORDS[name]) for name in names)


_WORDS = {
    "judge/report": ("judge 0–10", ".2f"),
    "judge/train": ("training judge 0–10", ".2f"),
    "accept": ("accepted of all", ".1%"),
    "accept_shown": ("accepted of shown", ".1%"),
    "shown": ("shown", ".1%"),
    "reward": ("reward per opportunity", ".4f"),
    "reward@0.1": ("the same at τ = 0.1", ".4f"),
    "reward@0.25": ("at τ = 0.25", ".4f"),
    "exact": ("exact match", ".1%"),
    "similarity": ("edit similarity", ".3f"),
    "characters": ("characters", ".1f"),
    "parses": ("parses", ".1%"),
}
TABLE = ("judge/report", "accept", "accept_shown", "shown", "reward", "exact", "similarity", "characters", "parses")
SHORT = ("reward", "accept_shown", "shown", "judge/report")


def lr(value: str) -> str:
    """The override."""
    return f"policies.tab.train.lr={value}"


def seeds(
    study: str, arm: str, overrides: Iterable[str], count: int = 3, *, first_rank: int = 0, cost: float = 1.0
) -> tuple[Run, ...]:
    """`count` runs of an arm; those beyond the third come with a later rank."""
    return tuple(
        Run(study, arm, seed, tuple(overrides), cost, first_rank + (seed >= 3)) for seed in range(count)
    )


# ----------------------------------------------------------------------------------------- headline

WIDE = (
    "policies.tab.train.guards.kl=1e9",
    "policies.tab.train.guards.entropy=0",
    "policies.tab.train.guards.length_low=0",
    "policies.tab.train.guards.length_high=1e9",
    "policies.tab.train.guards.clip_fraction=1",
    "policies.tab.train.guards.gradient=1e9",
)
"""No guards: what the others' recipes do not have must not stop them."""
RAW = ("policies.tab.train.mode=raw", "policies.tab.train.clip_high=0.2", *WIDE)
JUDGED = ("validation.rater=judge", "validation.judge.kind=reference")
GROUP = ("policies.tab.train.mode=group", "validation.group=8", *JUDGED, *WIDE)
COLD = (
    "policies.tab.sampling.temperature=0.1",
    "policies.tab.train.temperature_floor=0.05",
    "validation.report_temperature=1",
)


def headline() -> Study:
    """Ours against the seed's and Cursor's recipe, and GRPO with a judge."""
    arms = {
        "a  seed PPO, 1/0, T=0.1": (*RAW, "policies.tab.rewards.tau=0", *COLD),
        "a1 seed PPO, 1/0, T=1": (*RAW, "policies.tab.rewards.tau=0"),
        "b  fixed +0.75/−0.25/0, T=1": (*RAW, "policies.tab.rewards.tau=0.25"),
        "c  onlinerl's defaults": (),
        "d  GRPO, group 8, judge": GROUP,
        "e  onlinerl's defaults, judge": JUDGED,
    }
    runs: list[Run] = []
    for words, rate in RATES:
        for arm, overrides in arms.items():
            rank = 1 if arm.startswith("e") else 0
            count = 3 if arm.startswith("e") else 5
            runs += seeds("headline", f"{arm}, lr {words}", (*overrides, lr(str(rate))), count, first_rank=rank)
    ours, others = "c  onlinerl's defaults", [arm for arm in arms if arm[0] in "abd"]
    return Study(
        "headline",
        "Ours against the seed's recipe, a fixed threshold, and GRPO with a judge, at equal completions",
        tuple(runs),
        columns("sampled", *TABLE, "reward@0.1", "reward@0.25") + columns("greedy", *TABLE),
        tuple((f"{ours}, lr {words}", f"{arm}, lr {words}") for words, _ in RATES for arm in others),
        ("sampled.reward", "greedy.reward", "sampled.shown", "sampled.judge/report"),
    )


# ------------------------------------------------------------------------------------------ silence

TASTES = (("similar", "5 % accepted"), ("generous", "25 % accepted"))
"""Two base accept rates per shown answer at T=1."""


def silence() -> Study:
    """Thresholds and accept rates at which a policy would fall silent."""
    runs: list[Run] = []
    pairs: list[tuple[str, str]] = []
    for taste, words in TASTES:
        for tau in (0.1, 0.25, 0.4):
            common = (f'validation.tastes=["{taste}"]', f"policies.tab.rewards.tau={tau}", "validation.tau_report=" + str(tau))
            names = [f"{words}, τ = {tau:g}, {floor}" for floor in ("floor", "no floor")]
            runs += seeds("silence", names[0], common)
            runs += seeds("silence", names[1], (*common, "policies.tab.train.silence.floor=0"))
            pairs.append((names[0], names[1]))
    return Study(
        "silence",
        "Show rate with and without its floor, over three thresholds and two accept rates",
        tuple(runs),
        columns("sampled", "shown", "accept_shown", "accept", "reward", "judge/report", "characters"),
        tuple(pairs),
        ("sampled.shown", "sampled.accept_shown"),
    )


# -------------------------------------------------------------------------------------------- noise


def noise() -> Study:
    """What wrong, missing and late verdicts cost, with and without the corrections."""
    missing = ("validation.noise_missing=0.5",)
    late = ("validation.noise_timeout=0.3",)
    flipped = ("validation.noise_flip=0.2",)
    arms = {
        "clean": (),
        "20 % flipped": flipped,
        "20 % flipped, advantages to ±1": (*flipped, "policies.tab.train.advantage_limit=1"),
        "20 % flipped, raw rewards": (*flipped, "policies.tab.train.mode=raw"),
        "50 % missing, silence at the label rate": missing,
        "50 % missing, all silence": (*missing, "validation.silent=all"),
        "30 % time out, weight 0.5": (*late, "policies.tab.rewards.timeout_weight=0.5"),
        "30 % time out, weight 1": (*late, "policies.tab.rewards.timeout_weight=1"),
        "30 % time out, weight 0": (*late, "policies.tab.rewards.timeout_weight=0"),
    }
    return Study(
        "noise",
        "What noise in the verdicts costs, and what its corrections give back",
        tuple(run for arm, overrides in arms.items() for run in seeds("noise", arm, overrides)),
        columns("sampled", *SHORT) + columns("greedy", "reward"),
        tuple((arm, "clean") for arm in arms if arm != "clean"),
        ("sampled.reward",),
    )


# ---------------------------------------------------------------------------------------- ablations

STALE = (
    "policies.tab.train.version_every=4",
    "policies.tab.train.staleness=4",
    "validation.publish_every=20",
)
"""The engine gets every 20th batch's weights: samples up to 19 steps and 4 versions old."""
INT8 = ("validation.quantise=int8",)


def ablations() -> Study:
    """Each part of the default off, where it can matter."""
    cool = ("policies.tab.sampling.temperature=0.3", "validation.report_temperature=1")
    arms: dict[str, tuple[str, ...]] = {
        "default": (),
        "no baseline (raw advantage, same τ)": ("policies.tab.train.mode=raw", "policies.tab.rewards.tau=0.025"),
        "no normalisation": ("policies.tab.train.normalise=false",),
        "no KL term": ("policies.tab.train.kl_coefficient=0",),
        "τ = 0": ("policies.tab.rewards.tau=0",),
        "τ = 0.25": ("policies.tab.rewards.tau=0.25",),
        "all at T=0.3": cool,
        "10 % at T=1, others at T=0.3": (*cool, "validation.explore=0.1"),
        "stale": STALE,
        "stale, no importance weights": (*STALE, "policies.tab.train.importance_cap=null"),
        "stale, no dual clip": (*STALE, "policies.tab.train.dual_clip=null"),
        "stale, neither": (
            *STALE, "policies.tab.train.importance_cap=null", "policies.tab.train.dual_clip=null",
        ),
        "never published (offline)": (
            "validation.publish_every=0", "policies.tab.train.version_every=4", "policies.tab.train.staleness=100",
        ),
        "int8 engine": INT8,
        "int8 engine, no importance weights": (*INT8, "policies.tab.train.importance_cap=null"),
    }  # fmt: skip
    against = {
        arm: "stale" if arm.startswith("stale,") else "int8 engine" if arm.startswith("int8 engine,")
        else "all at T=0.3" if arm.startswith("10 %") else "default"
        for arm in arms
    }  # fmt: skip
    return Study(
        "ablations",
        "Each part of the default off, where it can matter",
        tuple(run for arm, overrides in arms.items() for run in seeds("ablations", arm, overrides)),
        columns("sampled", *SHORT) + columns("greedy", "reward"),
        tuple((arm, other) for arm, other in against.items() if arm != other),
        ("sampled.reward",),
    )


def studies() -> tuple[Study, ...]:
    """All of them, the most important first."""
    return (headline(), silence(), noise(), ablations())


NAMES = tuple(study.name for study in studies())
