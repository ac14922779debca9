"""One run: settings from overrides, an `onlinerl.validate` course, and what of its report is kept.

Also lays out once what the runs share: held-out prompts of one half of the packages and of the other, and
the tiny model of a rehearsal. All other prompts are those of `onlinerl validate`: of the standard library's
packages that the built-in model never saw, held out by file, and the same for every seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onlinerl.config import Settings, load_settings
from onlinerl.datasets import fim
from onlinerl.datasets.splits import in_first_half, library
from onlinerl.errors import SettingsError
from studies import sabotage
from studies.plan import Outcome, Run
from studies.workers import Work

TRAIN, TEST = 3000, 1000
"""Prompts to learn from and held out, as many as the seed's."""
CHARACTERS = 1000
"""Around the cursor: about 200 tokens of the built-in model."""
TAU = 0.025
"""τ of all reported rewards per opportunity, frozen before the first run: half of the base model's accepts
per opportunity at T=1 (4.9 % of 240 held-out prompts, on two CPU cores)."""
OTHER_TAUS = (0.0, 0.1, 0.25)
"""τ of the further columns, since another τ is another question."""
COMMON = (
    "validation.data_seed=0",
    f"validation.train_prompts={TRAIN}",
    f"validation.test_prompts={TEST}",
    f"validation.characters={CHARACTERS}",
    "validation.completions=6144",
    "validation.evaluate_every=4",
    "validation.evaluate_prompts=256",
    "validation.forgetting_prompts=200",
    f"validation.tau_report={TAU}",
    "policies.tab.train.batch=256",
    "policies.tab.train.microbatch=8192",
    "policies.tab.train.recompute=false",
    "policies.tab.train.compile=false",
    "policies.tab.sampling.max_tokens=48",
)
"""Settings of every run, before its own."""
SMALL = (
    "policies.tab.model={out}/tiny",
    "policies.tab.train.batch=8",
    "policies.tab.sampling.max_tokens=6",
    "validation.train_prompts=40",
    "validation.test_prompts=6",
    "validation.evaluate_prompts=4",
    "validation.completions=48",
)
"""Settings of a rehearsal, after the run's own."""


SITES = "execution-prompts.jsonl"


def lay_out(out: Path, *, small: bool = False, every: Sequence[str] = (), sites: Path | None = None) -> None:
    """Write what the runs share into `out`; prompts and models that are there stay. `every`: settings of all
    runs, before their own. `sites`: prompts whose completions are run somewhere else."""
    out.mkdir(parents=True, exist_ok=True)
    if sites is not None:
        shutil.copyfile(sites, out / SITES)
    prompts = out / "prompts"
    prompts.mkdir(parents=True, exist_ok=True)
    if not (prompts / "other.jsonl").exists():
        # Twice as many, since half of the packages has half of them.
        held = fim.collect(split="test", limit=2 * TEST, characters=CHARACTERS).prompts
        for name, own in (("own", True), ("other", False)):
            fim.write(prompts / f"{name}.jsonl", [p for p in held if in_first_half(library(p)) is own][:TEST])
    text = json.dumps(shared(small=small, every=every), indent=1)
    (out / "settings.json").write_text(text + "\n", encoding="utf-8")


def shared(*, small: bool, every: Sequence[str]) -> dict[str, list[str]]:
    """Overrides before and after those of each run."""
    return {"before": [*COMMON, *every], "after": list(SMALL) if small else []}


def prepare(out: Path) -> Work:
    """In a worker: import what is heavy; see `workers.Prepare`."""
    import torch

    import onlinerl.validate.run  # noqa: F401 - seconds of imports, before the first run's clock starts
    from onlinerl.validate.report import hardware, libraries

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"each_worker": hardware(device), "libraries": libraries()}
    own = out / f"device.{os.getpid()}"
    own.write_text(json.dumps(facts), encoding="utf-8")
    own.replace(out / DEVICE)  # every worker says the same, the last one stays
    words: dict[str, list[str]] = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    if words["after"] and not (out / "tiny").exists():
        made = tiny_model(out / f"tiny.{os.getpid()}")
        with contextlib.suppress(OSError):  # another worker was faster: the same model
            made.rename(out / "tiny")
        shutil.rmtree(made, ignore_errors=True)
    return lambda run: perform(run, out, words)


def settings_of(run: Run, out: Path, common: Mapping[str, Sequence[str]]) -> Settings:
    """The whole tree; `common` is what `shared` gave. Raises SettingsError for an override that is wrong."""
    own = (
        f"validation.name={_slug(run.key)}",
        f"validation.seed={run.seed}",
        f"policies.tab.train.seed={run.seed}",
        "policies.tab.train.threads=1",
    )
    saved = (f"validation.save={saved_at(out, run.key)}",) if run.save or run.extras else ()
    start = (f"policies.tab.model={saved_at(out, run.start)}",) if run.start is not None else ()
    words = [*common["before"], *own, *run.overrides, *common["after"], *start, *saved]
    return load_settings(None, [word.replace("{out}", str(out)) for word in words], home=out / "home")


def saved_at(out: Path, key: str) -> Path:
    """Where a run's final weights are kept."""
    return out / "models" / _slug(key)


def _slug(key: str) -> str:
    """A name that a file and a report may have, unique."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", key)[:48].strip("-")
    return f"{plain}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def perform(run: Run, out: Path, common: Mapping[str, Sequence[str]]) -> Outcome:
    """Make the run; errors are raised."""
    from onlinerl.validate import run as validation

    began = time.perf_counter()
    settings = settings_of(run, out, common)
    saved = settings.validation.save
    if saved is not None:
        shutil.rmtree(saved, ignore_errors=True)  # of a command that was killed
    with sabotage.KINDS[run.sabotage]():
        tree = validation.run(settings, quiet=True, starts=out / "starts")
    found = {name: EXTRAS[name](saved, settings, run, out) for name in run.extras if saved is not None}
    if saved is not None and not run.save:
        shutil.rmtree(saved)
    folder = settings.home / "validation" / settings.validation.name
    log = steps(folder / "log.jsonl")
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    last = tree["stages"][-1]
    return Outcome(
        study=run.study,
        arm=run.arm,
        seed=run.seed,
        state="guard" if tree["stopped_by"] else "finished",
        message=tree["stopped_by"] or "",
        seconds=round(time.perf_counter() - began, 2),
        overrides=run.overrides,
        start=means(tree["stages"][0]),
        final=means(last),
        errors=errors(last),
        curve=tuple(
            {"completions": point["completions"], **_only(means(point), CURVED)} for point in tree["curve"]
        ),
        extras={
            "tau": tree["tau"],
            "steps": tree["steps"],
            "completions": tree["completions"],
            "last_good_step": last["step"],
            "left_out": tree["left_out"],
            "spent": tree["seconds"],
            **log,
            **{f"{name}.{key}": value for name, more in found.items() for key, value in more.items()},
        },
    )


CURVED = frozenset(("reward", "accept", "accept_shown", "shown", "judge/report", "characters", "similarity"))
"""Metrics that a curve keeps."""


def means(place: Mapping[str, Any]) -> dict[str, float]:
    """`greedy.NAME`, `sampled.NAME` and `loss.NAME` of a report's stage or point; with the reward under
    OTHER_TAUS, which is accepts − τ · shown, both per opportunity."""
    found = _each(place, "mean")
    for how in place["metrics"]:
        for tau in OTHER_TAUS:
            found[f"{how}.reward@{tau:g}"] = _short(found[f"{how}.accept"] - tau * found[f"{how}.shown"])
    return found


def errors(place: Mapping[str, Any]) -> dict[str, float]:
    """Standard errors over prompts, clustered by file, by the same names."""
    return _each(place, "error")


def _each(place: Mapping[str, Any], what: str) -> dict[str, float]:
    groups = {**place["metrics"], "loss": place.get("losses", {})}
    return {
        f"{how}.{name}": _short(value)
        for how, numbers in groups.items()
        for name, one in numbers.items()
        if (value := one.get(what, one.get(f"standard_{what}"))) is not None
    }


LOGGED = (
    "gradient_norm",
    "kl",
    "kl_behaviour",
    "entropy",
    "clip_fraction",
    "ess",
    "staleness",
    "vetoed",
    "multiplier",
)
"""Numbers of the steps that are kept, as means and at their worst."""


def steps(path: Path) -> dict[str, float]:
    """`mean.NAME` and `largest.NAME` (`smallest.ess`) over the steps of a run's log."""
    with path.open(encoding="utf-8") as file:
        rows = [row for line in file if (row := json.loads(line))["event"] == "step"]
    found: dict[str, float] = {}
    for name in LOGGED:
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        if values:
            found[f"mean.{name}"] = _short(sum(values) / len(values))
            worst = ("smallest", min(values)) if name in ("ess", "entropy") else ("largest", max(values))
            found[f"{worst[0]}.{name}"] = _short(worst[1])
    return found


def _only(found: Mapping[str, float], names: frozenset[str]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name.partition(".")[2] in names}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# ------------------------------------------------------------------------------------------- extras


def weights(saved: Path, settings: Settings, run: Run, out: Path) -> dict[str, float]:
    """Whether the saved weights are numbers, and how many of their tensors are not the start's."""
    from safetensors.torch import load_file

    from onlinerl.weights.models import resolve_model

    start = resolve_model(settings.policies["tab"].model)
    after, before = (load_file(folder / "model.safetensors") for folder in (saved, start))
    return {
        "finite": float(all(bool(tensor.isfinite().all()) for tensor in after.values())),
        "changed": float(sum(not after[name].equal(before[name]) for name in after)),
    }


SITE_TEMPERATURES = (0.0, 0.2)
SITE_TOKENS = 96
"""Longest completion of a site: four lines."""


def execution(saved: Path, settings: Settings, run: Run, out: Path) -> dict[str, Any]:
    """Complete the prompts of `--sites` and write `out/execution/RUN.T.json`, for
    `python -m studies execute` on a machine that has their tests. Without that file none."""
    from onlinerl.validate.engine import LocalEngine
    from onlinerl.validate.rollouts import Rollouts

    file = out / SITES
    if not file.exists():
        return {"sites": 0, "files": []}
    sites = sites_of(file)
    engine = LocalEngine(settings.policies["tab"].engine, batch=64, threads=1)
    try:
        engine.read(0, saved)
        rollouts = Rollouts(engine, saved, "tab", seed=run.seed)
        files = []
        for temperature in SITE_TEMPERATURES:
            answers = rollouts.answers(
                list(sites.values()),
                0,
                temperature=temperature,
                top_p=1.0,
                max_tokens=SITE_TOKENS,
                seed="site",
            )
            made = {name: [one.completion] for name, one in zip(sites, answers, strict=True)}
            path = out / "execution" / f"{_slug(run.key)}.T{temperature:g}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
            files.append(path.name)
    finally:
        engine.stop()
    return {"sites": len(sites), "files": files}


def sites_of(file: Path) -> dict[str, fim.FimPrompt]:
    """Prompts by the id of their site. Raises SettingsError for a file that is none of sites."""
    prompts = fim.read(file)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not all(isinstance(row.get("id"), str) for row in rows):
        raise SettingsError(
            f"{file} does not name its sites: make it with `python -m onlinerl.validate.execution prompts`"
        )
    return {row["id"]: prompt for row, prompt in zip(rows, prompts, strict=True)}


EXTRAS: Mapping[str, Callable[[Path, Settings, Run, Path], Mapping[str, Any]]] = {
    "weights": weights,
    "execution": execution,
}
"""What may be measured on the saved weights of a run."""


# ------------------------------------------------------------------------------------- machine, tiny


CALLS, DEVICE = "calls.json", "device.json"


def note(out: Path, studies: Iterable[str], command: str, facts: Mapping[str, Any]) -> None:
    """Write down the command that makes runs of `studies`, after those that made some before."""
    calls = _json(out / CALLS)
    for study in studies:
        before = calls.get(study, {}).get("command")
        calls[study] = {"command": command if before is None else f"{before}; {command}", **facts}
    (out / CALLS).write_text(json.dumps(calls, indent=1) + "\n", encoding="utf-8")


def machine(out: Path, study: str) -> dict[str, Any]:
    """By what command and on what the runs of a study were made, as `note` and the workers wrote it down."""
    return {**_json(out / CALLS).get(study, {}), **_json(out / DEVICE)}


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def tiny_model(folder: Path) -> Path:
    """A random two-layer model with the built-in model's tokenizer, for rehearsals."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from onlinerl.weights.models import resolve_model

    source = resolve_model("fim-27m")
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    settings.pop("layer_types")
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**settings))
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in source.iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copyfile(file, folder / file.name)
    return folder
