"""The studies: what is asked, and the lists of runs that answer it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from onlinerl.config import Silence
from studies.plan import Column, Run, Study

RATES = ("1e-5", "3e-5")
"""Learning rates that every arm of the headline is shown at."""
_WORDS = {
    "judge/report": ("judge 0–10", ".2f"),
    "judge/train": ("training judge 0–10", ".2f"),
    "accept": ("accepted of all", ".1%"),
    "accept_shown": ("accepted of shown", ".1%"),
    "shown": ("shown", ".1%"),
    "reward": ("reward per opportunity", ".4f"),
    "reward@0": ("at τ = 0", ".4f"),
    "reward@0.1": ("at τ = 0.1", ".4f"),
    "reward@0.25": ("at τ = 0.25", ".4f"),
    "exact": ("exact match", ".1%"),
    "similarity": ("edit similarity", ".3f"),
    "characters": ("characters", ".1f"),
    "parses": ("parses", ".1%"),
}
WHOLE = (
    "reward",
    "judge/report",
    "accept",
    "accept_shown",
    "shown",
    "exact",
    "similarity",
    "characters",
    "parses",
)
SHORT = ("reward", "accept_shown", "shown", "judge/report")
TRAIN = "policies.tab.train."


def columns(how: str, *names: str) -> tuple[Column, ...]:
    """Columns of a table, `how` greedy or sampled."""
    return tuple(Column(f"{how}.{name}", *_WORDS[name]) for name in names)


def lr(value: str) -> str:
    """The override."""
    return f"{TRAIN}lr={value}"


def seeds(
    study: str,
    arms: Mapping[str, Iterable[str]],
    count: int = 3,
    *,
    rank: int = 0,
    first: int = 3,
    cost: float = 1.0,
    extras: tuple[str, ...] = (),
) -> tuple[Run, ...]:
    """`count` runs of each arm, by its overrides; those beyond the `first` come with a later rank."""
    return tuple(
        Run(study, arm, seed, tuple(overrides), cost, rank + (seed >= first), extras=extras)
        for arm, overrides in arms.items()
        for seed in range(count)
    )


def told_by_its_ends(study: Study) -> Study:
    """The same; where it plots no curve, its runs measure no points of one."""
    if study.curves:
        return study
    ends = ("validation.evaluate_every=0",)
    return replace(study, runs=tuple(replace(run, overrides=(*ends, *run.overrides)) for run in study.runs))


# ----------------------------------------------------------------------------------------- headline

WIDE = (
    f"{TRAIN}guards.kl=1e9",
    f"{TRAIN}guards.entropy=0",
    f"{TRAIN}guards.length_low=0",
    f"{TRAIN}guards.length_high=1e9",
    f"{TRAIN}guards.clip_fraction=1",
    f"{TRAIN}guards.gradient=1e9",
)
"""No guards: what the others' recipes do not have must not stop them."""
SEEDS = (f"{TRAIN}clip_high=0.2", f"{TRAIN}weight_decay=0.05", f"{TRAIN}gradient_clip=0.8", *WIDE)
"""What the seed's files set beside mode, temperature, group and learning rate (`examples/`)."""
RAW = (f"{TRAIN}mode=raw", *SEEDS)
JUDGED = ("validation.rater=judge", "validation.judge.kind=reference")
GROUP = (
    f"{TRAIN}mode=group",
    "validation.group=8",
    f"{TRAIN}minibatches=4",
    f"{TRAIN}dual_clip=null",
    f"{TRAIN}veto=0",
    f"{TRAIN}kl_coefficient=0",
    f"{TRAIN}silence.floor=0",
    *JUDGED,
    *SEEDS,
)
COLD = (
    "policies.tab.sampling.temperature=0.1",
    f"{TRAIN}temperature_floor=0.05",
    "validation.report_temperature=1",
)
RECIPES: Mapping[str, tuple[str, ...]] = {
    "(a) seed's PPO, 1/0, T=0.1": (*RAW, "policies.tab.rewards.tau=0", *COLD),
    "(a1) seed's PPO, 1/0, T=1": (*RAW, "policies.tab.rewards.tau=0"),
    "(b) fixed +0.75/−0.25/0": (*RAW, "policies.tab.rewards.tau=0.25"),
    "(c) onlinerl": (),
    "(d) GRPO, group 8, judge": GROUP,
    "(e) onlinerl, judge": JUDGED,
}


def headline() -> Study:
    """Ours against the seed's and Cursor's recipe, and GRPO with a judge."""
    runs: list[Run] = []
    for rate in RATES:
        for arm, overrides in RECIPES.items():
            runs += seeds(
                "headline",
                {f"{arm} · lr {rate}": (*overrides, lr(rate))},
                3 if arm.startswith("(e)") else 5,
                extras=("execution",) if arm[1] in "acde" else (),
            )
    others = [arm for arm in RECIPES if arm[1] in "abd"]
    return Study(
        "headline",
        "onlinerl, the seed's recipe, a fixed threshold, and GRPO with a judge, at equal completions",
        tuple(runs),
        (
            *columns("sampled", *WHOLE, "reward@0", "reward@0.1", "reward@0.25"),
            *columns("greedy", *WHOLE),
            Column("loss.left_to_right", "left-to-right loss, nats", ".4f"),
            Column("loss.middle", "loss on the authors' middles", ".4f"),
        ),
        compare=tuple(
            (f"(c) onlinerl · lr {rate}", f"{arm} · lr {rate}") for rate in RATES for arm in others
        ),
        compared=("sampled.reward", "greedy.reward", "sampled.judge/report", "greedy.judge/report"),
        reach=("sampled.reward", "greedy.reward"),
        curves=("sampled.reward", "greedy.reward", "sampled.shown", "greedy.judge/report"),
    )


# ------------------------------------------------------------------------------------------ silence

TASTES = (("similar", "5 % accepted"), ("generous", "25 % accepted"))
"""Two base accept rates per shown answer at T=1."""


def silence() -> Study:
    """Thresholds and accept rates at which a policy would fall silent."""
    runs: list[Run] = []
    pairs: list[tuple[str, str]] = []
    for taste, words in TASTES:
        for tau in ("0.1", "0.25", "0.4"):
            common = (
                f"validation.tastes=[{taste}]",
                f"policies.tab.rewards.tau={tau}",
                f"validation.tau_report={tau}",
            )
            names = (f"floor · {words}, τ = {tau}", f"no floor · {words}, τ = {tau}")
            arms = dict(zip(names, (common, (*common, f"{TRAIN}silence.floor=0")), strict=True))
            runs += seeds("silence", arms, first=2)
            pairs.append(names)
    return Study(
        "silence",
        "Show rate with and without its floor, over three thresholds and two base accept rates",
        tuple(runs),
        (
            Column("sampled.shown", "shown at the start", ".1%", "start"),
            *columns("sampled", "shown"),
            Column("sampled.accept_shown", "accepted of shown at the start", ".1%", "start"),
            *columns("sampled", "accept_shown", "accept", "reward", "judge/report", "characters"),
            Column("largest.multiplier", "largest λ", ".2f", "extras"),
        ),
        compare=tuple(pairs),
        compared=("sampled.shown", "sampled.accept_shown", "sampled.reward"),
        curves=("sampled.shown", "sampled.accept_shown"),
        floor=("sampled.shown", Silence().floor),
        one_start=False,
    )


# -------------------------------------------------------------------------------------------- noise


def noise() -> Study:
    """What wrong, missing and late verdicts cost, with and without the corrections."""
    missing = ("validation.noise_missing=0.5",)
    late = ("validation.noise_timeout=0.3",)
    flipped = ("validation.noise_flip=0.2",)
    arms: dict[str, tuple[str, ...]] = {
        "clean": (),
        "20 % flipped": flipped,
        "20 % flipped, advantages to ±1": (*flipped, f"{TRAIN}advantage_limit=1"),
        "20 % flipped, raw rewards": (*flipped, f"{TRAIN}mode=raw", "policies.tab.rewards.tau=0.025"),
        "50 % missing, silence at the label rate": missing,
        "50 % missing, all silence": (*missing, "validation.silent=all"),
        "30 % time out, weight 0.5": (*late, "policies.tab.rewards.timeout_weight=0.5"),
        "30 % time out, weight 1": (*late, "policies.tab.rewards.timeout_weight=1"),
        "30 % time out, weight 0": (*late, "policies.tab.rewards.timeout_weight=0"),
    }
    return Study(
        "noise",
        "What noise in the verdicts costs, and what its corrections give back",
        seeds("noise", arms),
        columns("sampled", *SHORT) + columns("greedy", "reward", "judge/report"),
        compare=tuple((arm, "clean") for arm in arms if arm != "clean"),
        compared=("sampled.reward", "greedy.reward", "sampled.shown"),
        curves=("sampled.reward", "greedy.reward"),
    )


# --------------------------------------------------------------------------------------- generalise

HALF = (
    "validation.half=true",
    "validation.test={out}/prompts/other.jsonl",
    "validation.tastes=[similar, short]",
    "validation.report_tastes=[lenient, long]",
)
"""Learns from one half of the packages with users of two tastes; the report is of the other packages and of
users of two other tastes."""
SAME = (
    "validation.half=true",
    "validation.test={out}/prompts/own.jsonl",
    "validation.tastes=[similar, short]",
    "validation.completions=1",
)
"""Measures a model on held-out files of the packages that it learned from, and its own users."""


def generalise() -> Study:
    """Other packages and other users, and what was forgotten, over learning rate and KL."""
    runs: list[Run] = []
    for rate in RATES:
        for coefficient in ("0", "0.02", "0.1"):
            arm = f"KL {coefficient} · lr {rate}"
            overrides = (*HALF, lr(rate), f"{TRAIN}kl_coefficient={coefficient}")
            found = seeds("generalise", {arm: overrides}, cost=0.8, first=2)
            runs += [replace(run, save=coefficient == "0.02") for run in found]
            if coefficient == "0.02":
                runs += [
                    Run(
                        "generalise",
                        f"KL {coefficient}, on its own half · lr {rate}",
                        seed,
                        SAME,
                        0.15,
                        rank=int(seed >= 2),
                        start=f"generalise/{arm}/{seed}",
                    )
                    for seed in range(3)
                ]
    base = "before learning"
    runs += [
        Run("generalise", f"{base} · other half", 0, (*HALF, "validation.completions=1"), 0.2),
        Run("generalise", f"{base} · own half", 0, SAME, 0.15),
    ]
    return Study(
        "generalise",
        "Learned from half of the packages and users, measured on the other half, and what was forgotten",
        tuple(runs),
        (
            *columns("sampled", *SHORT),
            Column("sampled.reward", "gain in reward", "+.4f", "gain"),
            *columns("greedy", "reward", "judge/report", "exact", "similarity"),
            Column("greedy.reward", "gain in reward", "+.4f", "gain"),
            Column("loss.left_to_right", "left-to-right loss, nats", ".4f"),
            Column("loss.middle", "loss on the authors' middles", ".4f"),
        ),
        one_start=False,
    )


def supervised() -> Study:
    """Three ways to learn from the same number of completions."""
    tuned = (
        "validation.completions=1",
        "validation.warmstart.source=accepted",
        "validation.warmstart.completions=6144",
    )
    offline = ("validation.publish_every=0", f"{TRAIN}version_every=2", f"{TRAIN}staleness=100")
    runs: list[Run] = []
    for rate in RATES:
        for epochs in (1, 4):
            words = (*tuned, f"validation.warmstart.lr={rate}", f"validation.warmstart.epochs={epochs}")
            arm = f"supervised on the accepted, {epochs} epoch{'s' * (epochs > 1)} · lr {rate}"
            runs += seeds("supervised", {arm: words}, cost=0.5, first=2)
        arms = {
            f"offline RL, all of the base's · lr {rate}": (*offline, lr(rate)),
            f"online RL · lr {rate}": (lr(rate),),
        }
        runs += seeds("supervised", arms, cost=0.8, first=2)
    rl = "online RL"
    others = list(dict.fromkeys(run.arm.partition(" · ")[0] for run in runs if not run.arm.startswith(rl)))
    return Study(
        "supervised",
        "Supervised, offline and online learning from 6,144 completions and their verdicts",
        tuple(runs),
        (
            *columns("sampled", *SHORT),
            *columns("greedy", "reward", "judge/report", "exact"),
            Column("loss.left_to_right", "left-to-right loss, nats", ".4f"),
        ),
        compare=tuple((f"{rl} · lr {rate}", f"{other} · lr {rate}") for rate in RATES for other in others),
        compared=("sampled.reward", "greedy.reward"),
    )


# ----------------------------------------------------------------------------------------- personal

COHORTS = ("short", "long", "commented", "bare")
"""Tastes that oppose each other by pairs."""
CROWD = (f"validation.tastes=[{', '.join(COHORTS)}]", "validation.users=20", "validation.spread=0.15")
LORA = (f"{TRAIN}lora.rank=16", f"{TRAIN}lora.alpha=32")
ONE_USER = (
    *CROWD,
    *LORA,
    "policies.tab.rewards.tau=0.1",
    f"{TRAIN}batch=16",
    "validation.completions=208",
    "validation.test_prompts=400",
)
"""200 verdicts of one user, a few answers being silent."""
ADAPTER_RATES = ("3e-4", "1e-3")


def personal() -> Study:
    """One adapter a user on the shared policy."""
    shared = Run(
        "personal", "shared policy", 0, (*CROWD, lr("3e-5"), "validation.test_prompts=400"), 1.0, save=True
    )
    runs = [shared]
    names = [f"{cohort}-{number}" for number in range(1, 6) for cohort in COHORTS]
    for rate in ADAPTER_RATES:
        for place, name in enumerate(names):
            words = (*ONE_USER, f"validation.user={name}", f"{TRAIN}lora.lr={rate}")
            runs.append(
                Run("personal", f"an adapter a user, lr {rate}", place, words, 0.12, start=shared.key)
            )
            if rate == ADAPTER_RATES[-1]:
                runs.append(
                    Run("personal", f"an adapter a user on the base model, lr {rate}", place, words, 0.12, 2)
                )
    return Study(
        "personal",
        "200 verdicts of one user: their adapter against the shared policy, over 20 users",
        tuple(runs),
        (
            *columns("sampled", "accept_shown", "accept", "shown"),
            Column("sampled.accept_shown", "gain in accepted of shown", "+.1%", "gain"),
            Column("sampled.accept", "gain in accepted of all", "+.1%", "gain"),
            *columns("greedy", "accept_shown", "accept"),
            Column("greedy.accept_shown", "gain in accepted of shown", "+.1%", "gain"),
            Column("greedy.accept", "gain in accepted of all", "+.1%", "gain"),
        ),
        one_start=False,
        units="users",
    )


def cohorts() -> Study:
    """One adapter a cohort on the shared policy."""
    runs: list[Run] = []
    for seed in range(3):
        shared = Run("cohorts", "shared policy", seed, (*CROWD, lr("3e-5")), save=True)
        runs.append(shared)
        for cohort in COHORTS:
            own = (f"validation.tastes=[{cohort}]", "validation.users=5", "validation.spread=0.15")
            words = (*own, *LORA, f"{TRAIN}lora.lr=1e-3", "policies.tab.rewards.tau=0.1")
            runs.append(
                Run(
                    "cohorts",
                    f"adapter of cohort {cohort}",
                    seed,
                    (*words, "validation.completions=2048"),
                    0.4,
                    start=shared.key,
                )
            )
    return Study(
        "cohorts",
        "An adapter for each cohort against the shared policy, for the cohort's own users",
        tuple(runs),
        (
            *columns("sampled", "accept_shown", "accept", "shown", "characters"),
            Column("sampled.accept_shown", "gain in accepted of shown", "+.1%", "gain"),
            Column("sampled.accept", "gain in accepted of all", "+.1%", "gain"),
            *columns("greedy", "accept"),
            Column("greedy.accept", "gain in accepted of all", "+.1%", "gain"),
        ),
        one_start=False,
    )


# ---------------------------------------------------------------------------------------- ablations

STALE = (f"{TRAIN}version_every=1", f"{TRAIN}staleness=4", "validation.publish_every=5")
"""The engine gets every 5th batch's weights: samples up to 4 steps, each of them a version, old."""
INT8 = ("validation.quantise=int8",)
UNWEIGHTED = f"{TRAIN}importance_cap=null"
UNBOUND = f"{TRAIN}dual_clip=null"


def ablations() -> Study:
    """Each part of the default off, where it can matter."""
    cool = ("policies.tab.sampling.temperature=0.3", "validation.report_temperature=1")
    arms: dict[str, tuple[str, ...]] = {
        "default": (),
        "no baseline, same τ": (f"{TRAIN}mode=raw", "policies.tab.rewards.tau=0.025"),
        "no normalisation": (f"{TRAIN}normalise=false",),
        "advantages to ±10, not ±3": (f"{TRAIN}advantage_limit=10",),
        "warm-up over 20 steps": (f"{TRAIN}warmup=20",),
        "no KL term": (f"{TRAIN}kl_coefficient=0",),
        "τ = 0": ("policies.tab.rewards.tau=0",),
        "τ = 0.25": ("policies.tab.rewards.tau=0.25",),
        "all at T=0.3": cool,
        "all at T=0.3, 10 % at T=1": (
            *cool,
            "policies.tab.exploration.users=all",
            "policies.tab.exploration.share=0.1",
        ),
        "advantages to ±3": (f"{TRAIN}advantage_limit=3",),
        "no warm-up": (f"{TRAIN}warmup=0",),
        "batches of 64": (f"{TRAIN}batch=64",),
        "a version every step": (f"{TRAIN}version_every=1",),
        "stale": STALE,
        "stale, no importance weights": (*STALE, UNWEIGHTED),
        "stale, no dual clip": (*STALE, UNBOUND),
        "stale, neither": (*STALE, UNWEIGHTED, UNBOUND),
        "staler": (f"{TRAIN}version_every=1", f"{TRAIN}staleness=11", "validation.publish_every=12"),
        "int8 engine": INT8,
        "int8 engine, no importance weights": (*INT8, UNWEIGHTED),
    }
    against = {
        "all at T=0.3, 10 % at T=1": "all at T=0.3",
        "stale": "a version every step",
        **{arm: "stale" for arm in arms if arm.startswith("stale,")},
        "int8 engine, no importance weights": "int8 engine",
    }
    return Study(
        "ablations",
        "Each part of the default off, where it can matter",
        seeds("ablations", arms, cost=0.8),
        (
            *columns("sampled", *SHORT),
            *columns("greedy", "reward", "judge/report"),
            Column("smallest.ess", "smallest ESS", ".2f", "extras"),
            Column("largest.kl", "largest KL", ".2f", "extras"),
            Column("mean.clip_fraction", "clipped", ".2%", "extras"),
        ),
        compare=tuple((arm, against.get(arm, "default")) for arm in arms if arm != "default"),
        compared=("sampled.reward", "greedy.reward", "sampled.judge/report"),
    )


def precision() -> Study:
    """Number formats of the trainer's matrix products."""
    arms = {name: (f"{TRAIN}dtype={name}",) for name in ("float32", "bfloat16", "float16")}
    return Study(
        "precision",
        "Number formats of the trainer: gradient norms and what is learned",
        seeds("precision", arms, rank=1),
        (
            Column("mean.gradient_norm", "mean gradient norm", ".3f", "extras"),
            Column("largest.gradient_norm", "largest", ".3f", "extras"),
            Column("mean.kl_behaviour", "KL to the engine", ".5f", "extras"),
            *columns("sampled", *SHORT),
        ),
        compare=(("bfloat16", "float32"), ("float16", "float32")),
        compared=("sampled.reward",),
    )


def tune() -> Study:
    """The same grid for every recipe, before the headline, on other prompts of the same files."""
    recipes = {
        **{arm: words for arm, words in RECIPES.items() if arm[1] in "acd"},
        "(c) with advantages to ±10": (f"{TRAIN}advantage_limit=10",),
        "(c) with warm-up over 20 steps": (f"{TRAIN}warmup=20",),
        "(c) with both": (f"{TRAIN}advantage_limit=10", f"{TRAIN}warmup=20"),
    }
    runs = [
        Run(
            "tune",
            f"{arm} · lr {rate}, batch {batch}",
            0,
            (*words, lr(rate), *size(batch), *OTHERS),
        )
        for rate in RATES
        for batch in (64, 192)
        for arm, words in recipes.items()
    ]
    return Study(
        "tune",
        "One grid of learning rate and batch for every recipe, one run each, before the headline",
        tuple(runs),
        (
            *columns("sampled", *SHORT),
            *columns("greedy", "reward", "judge/report"),
            Column("largest.kl", "largest KL", ".2f", "extras"),
            Column("mean.clip_fraction", "clipped", ".2%", "extras"),
        ),
        curves=("sampled.reward", "greedy.reward", "sampled.shown"),
    )


def size(batch: int) -> tuple[str, ...]:
    """A batch, with a point of the curve after as many completions as with any other."""
    return (f"{TRAIN}batch={batch}", f"validation.evaluate_every={1536 // batch}")


OTHERS = ("validation.data_seed=1", "validation.forgetting_prompts=0", "validation.test_prompts=600")
"""Prompts at other places of the files, so that nothing is chosen by what is reported later."""


# ------------------------------------------------------------------------------------------- guards


def guards() -> Study:
    """Five sabotages: what stops each, and that the weights are the last good ones."""
    arms: dict[str, tuple[tuple[str, ...], str]] = {
        "lr × 100": ((f"{TRAIN}lr=3e-3",), ""),
        "the reward's sign turned round": (
            (
                "policies.tab.rewards.function=studies.sabotage:flipped",
                "policies.tab.rewards.weights={verdict: 0}",
            ),
            "",
        ),
        "NaN in a gradient": ((), "nan"),
        "all feedback from one user": (("policies.tab.trust.owner=false", "validation.users=1"), ""),
        "a judge that always fails": (
            (
                "validation.rater=judge",
                "validation.judge.kind=llm",
                "validation.judge.url=http://127.0.0.1:9/v1",
                "validation.judge.model=nobody",
                "validation.judge.attempts=1",
            ),
            "",
        ),
    }
    common = ("validation.completions=2048", "validation.test_prompts=400")
    return Study(
        "guards",
        "Five sabotages: what stopped each, and what was kept",
        tuple(
            Run("guards", arm, 0, (*common, *overrides), 0.25, extras=("weights",), sabotage=sabotage)
            for arm, (overrides, sabotage) in arms.items()
        ),
        (
            Column("steps", "steps until it was stopped", ".0f", "extras"),
            Column("last_good_step", "step of the kept weights", ".0f", "extras"),
            Column("weights.finite", "kept weights are numbers", ".0f", "extras"),
            *columns("sampled", "reward", "judge/report", "shown"),
        ),
    )


def models() -> Study:
    """What the base model completes at the execution sites, to be run where tests can be."""
    run = Run("models", "base", 0, ("validation.completions=1",), 0.2, extras=("execution",))
    return Study("models", "The base model's completions for execution", (run,), columns("greedy", *WHOLE))


def studies() -> tuple[Study, ...]:
    """All of them, the most important first."""
    asked = (
        headline(),
        models(),
        guards(),
        silence(),
        noise(),
        personal(),
        cohorts(),
        ablations(),
        generalise(),
        supervised(),
        precision(),
        tune(),
    )
    return tuple(told_by_its_ends(study) for study in asked)


NAMES = tuple(study.name for study in studies())
