"""Does the completed code work? Holes in the standard library, judged by the library's own unit tests.

pass@1 is the share of sites (`sites.py`) at which a model's text works, whether it is the author's or not.

    python -m onlinerl.validate.execution sites --out sites.json        find and verify sites
    python -m onlinerl.validate.execution prompts --out prompts.jsonl   what a model has to complete
    python -m onlinerl.validate.execution run --completions FILE --out result.json

`run` needs the very sources that the sites were found in; a site in a file that differs is skipped and
counted, and so is one whose tests do not pass here with the author's text. Completions may be made elsewhere
(FILE holds `{site id: [completion, …]}`). What a model wrote runs in a cell (`sandbox.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from typing import Any

from rich.console import Console
from rich.progress import Progress

from onlinerl.datasets.fim import FimPrompt, is_test, prompt_at
from onlinerl.errors import OnlineRLError, SettingsError
from onlinerl.validate.estimates import ratio, t_quantile
from onlinerl.validate.sandbox import Ending, Limits, fences, require_fences, run_tests
from onlinerl.validate.sites import (
    SITES,
    Site,
    SiteList,
    fill,
    find_sites,
    load,
    prompts,
    read_json,
    require_tests,
    save,
    usable,
    write_json,
)


@dataclass(frozen=True, slots=True)
class Rate:
    """A pass rate with its 95 % interval. Made by `rate`."""

    mean: float
    low: float
    high: float
    sites: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a model's completions were worth. Made by `evaluate`."""

    passed: Mapping[str, float]
    """Share of the completions that pass, by site."""
    pass_at_1: Rate
    unseen: Rate
    """Over the sites in files of the test split (`datasets.fim.is_test`), whose text no run trained on."""
    by_module: Mapping[str, Rate]
    endings: Mapping[str, int]
    """Completions by how their run ended."""
    empty: int
    """Completions without any text."""
    exact: int
    """Completions that are the author's text, trailing space aside."""
    skipped: Mapping[str, int]
    """Sites left out, by reason."""
    fences: tuple[str, ...]
    """What the runs were kept from (`sandbox.fences`)."""

    def report(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


# ------------------------------------------------------------------------------------------ evaluation


Complete = Callable[[Sequence[FimPrompt]], Sequence[Sequence[str]]]
"""Completions of each prompt, in the order of the prompts."""


def evaluate(
    found: SiteList,
    completions: Mapping[str, Sequence[str]] | Complete,
    *,
    jobs: int = 2,
    limits: Limits | None = None,
    fenced: bool = True,
    progress: bool = False,
) -> Result:
    """Run every completion against its site's tests. `completions` by site id, or who makes them.

    Raises SettingsError when this Python has no tests, the machine cannot fence the runs (and `fenced`
    asks for it), or nothing is left to run.
    """
    require_tests()
    held = tuple(sorted(require_fences() if fenced else fences()))
    limits = limits or Limits()
    texts, kept, skipped = usable(found)
    if not isinstance(completions, Mapping):
        asked = [prompt_at(s.path, texts[s.path], s.start, s.end) for s in kept]
        completions = {site.id: made for site, made in zip(kept, completions(asked), strict=True)}
    answered = [site for site in kept if completions.get(site.id)]
    skipped["no completion"] += len(kept) - len(answered)
    with (
        ThreadPoolExecutor(jobs) as pool,
        Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar,
    ):

        def author(group: list[Site]) -> list[Site]:
            """The sites whose tests pass here with the author's text."""
            path = group[0].path
            tests = sorted({test for site in group for test in site.tests})
            patient = Limits(limits.cpu * 10, limits.wall * 10, limits.memory)
            if run_tests({path: texts[path]}, tests, patient, fenced=fenced).ending is Ending.PASSED:
                return group
            return [
                site
                for site in group
                if run_tests({path: texts[path]}, site.tests, limits, fenced=fenced).ending is Ending.PASSED
            ]

        files = sorted({site.path for site in answered})
        groups = [[site for site in answered if site.path == path] for path in files]
        steady = [site for group in pool.map(author, groups) for site in group]
        skipped["its tests fail here"] += len(answered) - len(steady)
        if not steady:
            raise SettingsError(
                f"none of the {len(found.sites)} sites can be run here ({dict(+skipped)}); they were found "
                f"in Python {found.python} and this is {python_version()}: make a list with `sites --out`"
            )
        # A site's equal completions run once; the author's own are known to pass.
        work = [(site, text) for site in steady for text in dict.fromkeys(completions[site.id])]
        running = bar.add_task("running tests", total=len(work))

        def judge(one: tuple[Site, str]) -> Ending:
            site, text = one
            source = texts[site.path]
            ending = Ending.PASSED
            if text != source[site.start : site.end]:
                ending = run_tests(
                    {site.path: fill(source, site, text)}, site.tests, limits, fenced=fenced
                ).ending
            bar.advance(running)
            return ending

        endings = dict(zip([(site.id, text) for site, text in work], pool.map(judge, work), strict=True))
    return _result(steady, texts, completions, endings, skipped, held)


def _result(
    steady: Sequence[Site],
    texts: Mapping[str, str],
    completions: Mapping[str, Sequence[str]],
    endings: Mapping[tuple[str, str], Ending],
    skipped: Counter[str],
    held: tuple[str, ...],
) -> Result:
    passed: dict[str, float] = {}
    kinds: Counter[str] = Counter()
    empty = exact = 0
    for site in steady:
        made = completions[site.id]
        ended = [endings[site.id, text] for text in made]
        passed[site.id] = ended.count(Ending.PASSED) / len(made)
        kinds.update(ending.value for ending in ended)
        empty += sum(not text.strip() for text in made)
        author = texts[site.path][site.start : site.end].rstrip()
        exact += sum(text.rstrip() == author for text in made)
    unseen = [site for site in steady if is_test(site.path)]
    return Result(
        passed=passed,
        pass_at_1=_rate(steady, passed),
        unseen=_rate(unseen, passed),
        by_module={
            path: _rate([site for site in steady if site.path == path], passed)
            for path in sorted({site.path for site in steady})
        },
        endings={ending.value: kinds[ending.value] for ending in Ending},
        empty=empty,
        exact=exact,
        skipped=dict(+skipped),
        fences=held,
    )


def _rate(chosen: Sequence[Site], passed: Mapping[str, float]) -> Rate:
    return rate([passed[site.id] for site in chosen], [site.path for site in chosen])


def rate(values: Sequence[float], clusters: Sequence[str]) -> Rate:
    """Mean of `values` in [0, 1] with a 95 % interval that counts what comes from one cluster together.

    The variance of the mean is the linearised one of a ratio of cluster totals; the interval is Wilson's
    with the effective number of values n·(simple variance / cluster variance), shrunk for the few clusters
    by (z / t)² [Korn & Graubard 1998; Dean & Pagano 2015]. Within one cluster it is Wilson's plain one.
    Nothing gives a mean of 0 between 0 and 1.
    """
    n = len(values)
    if n == 0:
        return Rate(0.0, 0.0, 1.0, 0)
    mean = sum(values) / n
    names = sorted(set(clusters))
    effective = float(n)
    if len(names) > 1:
        simple = mean * (1 - mean) / n
        clustered = _error(values, clusters) ** 2
        if simple > 0:
            effective /= max(1.0, clustered / simple)
        effective *= (_Z / t_quantile(len(names) - 1)) ** 2
    spread = _Z**2 / effective
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(mean * (1 - mean) / effective + spread / (4 * effective))
    return Rate(mean, max(0.0, centre - half), min(1.0, centre + half), n)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float, float]:
    """Mean of after − before over the sites that both have, with its 95 % interval (Student's t over
    clusters, linearised); `before` and `after` are `Result.passed`. Raises ValueError without two modules."""
    shared = sorted(before.keys() & after.keys())
    clusters = [name.rpartition(":")[0] for name in shared]
    if len(set(clusters)) < 2:
        raise ValueError("sites of two modules at least are needed for an interval")
    values = [after[name] - before[name] for name in shared]
    mean = sum(values) / len(values)
    half = t_quantile(len(set(clusters)) - 1) * _error(values, clusters)
    return mean, mean - half, mean + half


_Z = t_quantile(math.inf)


def _error(values: Sequence[float], clusters: Sequence[str]) -> float:
    """Standard error of the mean when values of one cluster go together."""
    return ratio(values, [1.0] * len(values), clusters).error


def read_completions(path: Path) -> dict[str, list[str]]:
    """`{site id: [completion, …]}` from a JSON file. Raises SettingsError."""
    rows = read_json(path)
    if not isinstance(rows, dict) or not all(
        isinstance(made, list) and all(isinstance(text, str) for text in made) for made in rows.values()
    ):
        raise SettingsError(f"{path} must hold an object of lists of strings, by site id")
    return rows


# ---------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m onlinerl.validate.execution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    finding = verbs.add_parser("sites", help="find and verify sites of this Python")
    finding.add_argument("--out", type=Path, required=True)
    finding.add_argument("--count", type=int, default=200)
    finding.add_argument("--seed", type=int, default=0)
    asking = verbs.add_parser("prompts", help="write the sites' prompts as JSON lines with their ids")
    asking.add_argument("--out", type=Path, required=True)
    asking.add_argument("--characters", type=int, default=2048)
    running = verbs.add_parser("run", help="run completions against the sites' tests")
    running.add_argument("--completions", type=Path, required=True, help="JSON: {site id: [completion, …]}")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--unfenced", action="store_true", help="run even where files are not protected")
    for verb in (asking, running):
        verb.add_argument("--sites", type=Path, default=SITES, help="default: the list that comes along")
    for verb in (finding, running):
        verb.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    try:
        _do(given)
    except SettingsError as error:
        print(f"onlinerl: {error}", file=sys.stderr)
        return 2
    except OnlineRLError as error:
        print(f"onlinerl: {error}", file=sys.stderr)
        return 1
    return 0


def _do(given: argparse.Namespace) -> None:
    if given.verb == "sites":
        found = find_sites(given.count, seed=given.seed, jobs=given.jobs, progress=True)
        save(given.out, found)
        print(f"{len(found.sites)} sites in {len(found.sources)} files of Python {found.python}: {given.out}")
    elif given.verb == "prompts":
        made = prompts(load(given.sites), characters=given.characters)
        with given.out.open("w", encoding="utf-8") as file:
            for name, prompt in made.items():
                file.write(json.dumps({"id": name, **asdict(prompt)}, ensure_ascii=False) + "\n")
        print(f"{len(made)} prompts: {given.out}")
    else:
        result = evaluate(
            load(given.sites),
            read_completions(given.completions),
            jobs=given.jobs,
            fenced=not given.unfenced,
            progress=True,
        )
        write_json(given.out, result.report())
        one = result.pass_at_1
        print(
            f"pass@1 {one.mean:.3f} (95 % {one.low:.3f}–{one.high:.3f}, {one.sites} sites); "
            f"{dict(result.endings)}; skipped {dict(result.skipped) or 'none'}; {given.out}"
        )


if __name__ == "__main__":
    sys.exit(main())
