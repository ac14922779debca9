"""The command line: thin verbs. Each loads what it needs when it runs, so that `--help` is quick.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings (also: no room or no permission to keep data).
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onlinerl import __version__
from onlinerl.config import Experiments as Plan
from onlinerl.config import Settings, load_settings
from onlinerl.errors import EngineError, NotFound, OnlineRLError, SettingsError, StoreError

if TYPE_CHECKING:
    from onlinerl.experiments.guardrails import Guard
    from onlinerl.records import Decision, Experiment, Version
    from onlinerl.store.database import Database

ACTOR = "cli"
"""Who the audit says it was."""
SAME = "onlinerl.same"
"""Key of click's context under which lies what a next command needs to mean the same settings."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_NO_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP)


def main() -> None:
    """Entry point: every error made on purpose is one sentence on standard error and an exit code."""
    try:
        code = cli.main(prog_name="onlinerl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OnlineRLError as error:
        click.echo(
            f"onlinerl: {' '.join(str(error).split())}", err=True
        )  # libraries' reasons have many lines
        sys.exit(2 if isinstance(error, SettingsError | StoreError) else 1)
    except BrokenPipeError:  # `onlinerl versions list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        advice = {**dict.fromkeys(_NO_ROOM, "make room, or choose another --home")}
        advice |= dict.fromkeys(_NO_PATH, "that path cannot be used; choose another")
        if error.errno not in advice:
            raise
        where = f" at {str(error.filename)[:200]}" if error.filename else ""
        click.echo(f"onlinerl: {error.strerror}{where}: {advice[error.errno]}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


# ------------------------------------------------------------------------- options that all verbs share


def with_settings(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the verb `settings` as its first argument, from -c, --home and the dotted overrides."""

    @click.option(
        "-c",
        "--config",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Settings file (YAML).",
    )
    @click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Folder of the database, the weights, the runs and the logs [default: ./onlinerl-data; "
        "`demo` takes ./onlinerl-demo].",
    )
    @click.argument("overrides", nargs=-1, metavar="[SETTING=VALUE]...")
    @wraps(verb)
    def run(
        *arguments: Any, file: Path | None, home: Path | None, overrides: Sequence[str], **options: Any
    ) -> Any:
        more = [
            f"server.{name}={options.pop(name)}"
            for name in ("host", "port", "feedback_port")
            if options.get(name) is not None
        ]
        for name in ("host", "port", "feedback_port"):
            options.pop(name, None)
        if isinstance(first := options.get("version"), str):
            overrides, options["version"] = (first, *overrides), None
        settings = load_settings(file, [*overrides, *more], home=home)
        same = [*(["-c", str(file)] if file else []), *(["--home", str(home)] if home else []), *overrides]
        click.get_current_context().meta[SAME] = "".join(f" {shlex.quote(word)}" for word in same)
        return verb(settings, *arguments, **options)

    return run


policy_option = click.option("--policy", metavar="P", help="The policy; needed where there are several.")
VERSION = click.IntRange(min=0, max=2**63 - 1)
"""Ids of versions: what the database's integers hold."""


class VersionOrSetting(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """An optional version before the overrides: a first word that is an override is none (`with_settings`
    puts it where it belongs)."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The id, or the override as it is."""
        if isinstance(value, str) and "=" in value:
            return value
        return int(VERSION.convert(value, param, ctx))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def chosen(settings: Settings, policy: str | None) -> str:
    """The policy that was named, or the only one."""
    return settings.chosen(policy, option="--policy")


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """The database."""
    from onlinerl.store.database import Database

    database = Database.open(settings.database_url)
    try:
        yield database
    finally:
        database.close()


def empty(settings: Settings) -> bool:
    """Whether nothing was ever kept there. Looking must not make files."""
    from onlinerl.store.database import file_of

    return not file_of(settings.database_url).exists()


def moment(seconds: float | None) -> str | None:
    """The same for people."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def print_json(data: Any) -> None:
    """On standard output."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, nothing: str) -> None:
    """A table, or the sentence `nothing` where there are no rows."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not rows:
        click.echo(nothing)
        return
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console().print(table)


# -------------------------------------------------------------------------------------------- verbs


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Online reinforcement learning for a deployed LLM service.

    Every verb takes -c FILE (settings as YAML), --home DIR, and dotted overrides such as
    policies.tab.train.lr=2e-6, which win over the file.
    """


@cli.command()
@click.option("--host", help="Address to listen on (server.host).")
@click.option("--port", type=int, help="Port of the inference API (server.port) [default: 8081].")
@click.option(
    "--feedback-port", type=int, help="Port of the feedback API (server.feedback_port) [default: 8082]."
)
@with_settings
def serve(settings: Settings) -> None:
    """Serve the policies, collect feedback, publish new versions; Ctrl-C ends it."""
    from onlinerl import serve as server

    server.main(settings, same=click.get_current_context().meta[SAME])


@cli.command()
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="Unix socket to answer on.")
@policy_option
@with_settings
def replica(settings: Settings, socket: Path, policy: str | None) -> None:
    """One embedded engine (`serve` starts it). Ends when its standard input does."""
    from onlinerl.loop import run

    name = chosen(settings, policy)
    line = [sys.executable, "-m", "onlinerl.replica", "--socket", str(socket), "--policy", name]
    engine = settings.policies[name].engine.model_dump_json()
    os.execve(line[0], line, run.child_environment({run.SETTINGS_VARIABLE: engine}))


@cli.command()
@policy_option
@click.option(
    "--max-steps", type=click.IntRange(1, 2**63 - 1), metavar="N", help="End after so many batches."
)
@click.option("--follow", is_flag=True, help="Keep going as feedback arrives.")
@with_settings
def train(settings: Settings, policy: str | None, max_steps: int | None, follow: bool) -> None:
    """One training run on the feedback there is. A run whose process died is carried on."""
    from onlinerl import base
    from onlinerl.loop import run

    name = chosen(settings, policy)
    with opened(settings) as database:
        base.ensure(settings, name, database)
    line = run.command(name, max_steps=max_steps, follow=follow)
    os.execve(line[0], line, run.environment(settings))


@cli.command()
@json_option
@with_settings
def validate(settings: Settings, as_json: bool) -> None:
    """Learn offline, from a judge or simulated users, and measure it on held-out prompts."""
    from onlinerl.loop import run

    line = [sys.executable, "-m", "onlinerl.validate", *(["--json"] if as_json else [])]
    os.execve(line[0], line, run.environment(settings))


@cli.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of demo.png and demo.json [default: the home]."
)
@with_settings
def demo(settings: Settings, out: Path | None) -> None:
    """Turn the whole ring on this machine with simulated developers; ends in a table and a plot."""
    from onlinerl.demo import story

    story.run(settings, out)


# ------------------------------------------------------------------------------------------ versions


@cli.group()
def versions() -> None:
    """Look at the versions of a policy, and choose which one is live."""


@versions.command("list")
@policy_option
@json_option
@with_settings
def list_versions(settings: Settings, policy: str | None, as_json: bool) -> None:
    """All versions, of all policies or of one."""
    from onlinerl.store import versions as store

    found: list[Version] = []
    if not empty(settings):
        with opened(settings) as database, database.read() as c:
            found = _of(settings, policy, store.list_(c, policy))
    elif policy is not None:
        chosen(settings, policy)
    if as_json:
        print_json([version.describe() for version in found])
        return
    rows = [
        (v.policy, v.id, v.state.value, v.parent, v.run, moment(v.created_at), moment(v.live_at))
        for v in found
    ]
    columns = ("policy", "id", "state", "parent", "run", "created (UTC)", "went live (UTC)")
    print_table(columns, rows, nothing="no versions yet: `onlinerl serve` makes version 0 from the model")


def _of(settings: Settings, policy: str | None, found: list[Version]) -> list[Version]:
    """What was found of the policy. The settings need not name it any more; what nobody knows is refused."""
    if policy is not None and not found:
        chosen(settings, policy)
    return found


@contextmanager
def kept(settings: Settings) -> Iterator[Database]:
    """The database, where there is one already."""
    if empty(settings):
        url = settings.store.url
        where, other = (url, "another store.url") if url else (settings.home, "--home")
        raise NotFound(f"there is no data in {where} yet; start `onlinerl serve`, or choose {other}")
    with opened(settings) as database:
        yield database


@versions.command("show")
@click.argument("version", type=VERSION)
@policy_option
@json_option
@with_settings
def show_version(settings: Settings, version: int, policy: str | None, as_json: bool) -> None:
    """One version: state, lineage, what it learned from, its metrics."""
    from onlinerl.store import versions as store
    from onlinerl.weights import directory

    with kept(settings) as database, database.read() as c:
        found = store.get(c, chosen(settings, policy), version)
    manifest = directory.read_manifest(found.url)
    if as_json:
        print_json({**found.describe(), "manifest": manifest.as_json()})
        return
    learned = manifest.data
    data = {**found.describe(), "tensors": len(manifest.tensors)}
    if manifest.adapter_base is not None:
        data["adapter"] = f"on {found.policy}@{manifest.adapter_base}"
    if learned.samples:
        data["learned from"] = f"{learned.samples} samples in {learned.steps} steps"
        data["asked (UTC)"] = f"{moment(learned.first_at)} to {moment(learned.last_at)}"
    metrics: Mapping[str, float] = data.pop("metrics")
    rows = [*data.items(), *((name, f"{value:.6g}") for name, value in metrics.items())]
    print_table(("", found.name), [row for row in rows if row[1] is not None], nothing="")


@versions.command("promote")
@click.argument("version", type=VERSION)
@policy_option
@json_option
@with_settings
def promote_version(settings: Settings, version: int, policy: str | None, as_json: bool) -> None:
    """Make a version live: new requests get it once the engines hold it; running ones keep theirs."""
    from onlinerl.store import versions as store
    from onlinerl.weights import directory

    name = chosen(settings, policy)
    with kept(settings) as database:
        with database.read() as c:
            asked = store.get(c, name, version)
        if asked.collected_at is None:  # else promote says why not
            directory.verify(asked.url, asked.digest)
        with database.write() as c:
            live = store.promote(c, name, version, actor=ACTOR)
    print_json(live.describe()) if as_json else click.echo(f"{live.name} is live")


@versions.command("rollback")
@click.option(
    "--to", type=VERSION, metavar="ID", help="A retired version [default: the one that was live before]."
)
@policy_option
@json_option
@with_settings
def rollback_version(settings: Settings, to: int | None, policy: str | None, as_json: bool) -> None:
    """Go back to the version that was live before; new requests get it in under a second."""
    from onlinerl.store import versions as store

    name = chosen(settings, policy)
    with kept(settings) as database, database.write() as c:
        live = store.rollback(c, name, to=to, actor=ACTOR)
    print_json(live.describe()) if as_json else click.echo(f"{live.name} is live again")


@versions.command("verify")
@click.argument("version", type=VersionOrSetting(), required=False)
@policy_option
@json_option
@with_settings
def verify_versions(settings: Settings, version: int | None, policy: str | None, as_json: bool) -> int:
    """Recompute every SHA-256 of a version, or of all; exits with 1 when one is broken."""
    from onlinerl.errors import WeightsError
    from onlinerl.store import versions as store
    from onlinerl.weights import directory

    with kept(settings) as database, database.read() as c:
        if version is None:
            every = _of(settings, policy, store.list_(c, policy))
            found = [one for one in every if one.collected_at is None]
        else:
            found = [store.get(c, chosen(settings, policy), version)]
    results = []
    for one in found:
        try:
            directory.verify(one.url, one.digest)
        except WeightsError as error:
            results.append({"policy": one.policy, "id": one.id, "intact": False, "fault": str(error)})
        else:
            results.append({"policy": one.policy, "id": one.id, "intact": True, "fault": ""})
    if as_json:
        print_json(results)
    else:
        rows = [(f"{r['policy']}@{r['id']}", r["fault"] or "intact") for r in results]
        print_table(("version", "result"), rows, nothing="no versions")
    return 0 if all(result["intact"] for result in results) else 1


@versions.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@policy_option
@json_option
@with_settings
def collect_versions(settings: Settings, dry_run: bool, policy: str | None, as_json: bool) -> None:
    """Delete the weights that nothing needs any more; their rows and manifests' digests stay.

    The live version, the one before it, candidates and what a run works on are kept.
    """
    from onlinerl.store import versions as store
    from onlinerl.weights import directory

    removed = []
    with kept(settings) as database:
        for name in [chosen(settings, policy)] if policy else list(settings.policies):
            if dry_run:
                with database.read() as c:
                    keep = store.keep(c, name)
                    rest = {version.id for version in store.list_(c, name)} - keep
            else:
                with database.write() as c:
                    keep, rest = store.collect(c, name)
            for one in directory.gc(settings.weights_url, name, keep, registered=rest, dry_run=dry_run):
                removed.append({"policy": name, "folder": one.folder, "bytes": one.bytes})
    if as_json:
        print_json(removed)
        return
    rows = [(r["policy"], r["folder"], f"{r['bytes']:,}") for r in removed]
    print_table(("policy", "folder", "bytes"), rows, nothing="nothing to delete")


# --------------------------------------------------------------------------------------- experiments


@cli.group()
def experiments() -> None:
    """Try a version on live users, watch what comes of it, and end it."""


experiment_argument = click.argument("experiment", type=click.IntRange(min=1, max=2**63 - 1))


@experiments.command("list")
@policy_option
@json_option
@with_settings
def list_experiments(settings: Settings, policy: str | None, as_json: bool) -> None:
    """All experiments, of all policies or of one; the bars are how wide the interval was."""
    from onlinerl.experiments import picture
    from onlinerl.store import experiments as store

    found: list[tuple[Experiment, list[Decision]]] = []
    if not empty(settings):
        with opened(settings) as database, database.read() as c:
            found = [(one, store.decisions(c, one.id)) for one in store.list_(c, policy)]
    if policy is not None and not found:
        chosen(settings, policy)
    if as_json:
        print_json([one.describe() for one, _ in found])
        return
    rows = [
        (
            f"{one.policy}/{one.id}",
            one.state.value,
            f"{one.treatment.name} against {one.control.name}",
            picture.sparkline(picture.points(decisions)),
            _said(one, decisions),
        )
        for one, decisions in found
    ]
    columns = ("experiment", "state", "arms", "interval", "verdict (times UTC)")
    nothing = "no experiments yet: `onlinerl experiments start VERSION`, or the setting publish: experiment"
    print_table(columns, rows, nothing=nothing)


def _said(experiment: Experiment, decisions: Sequence[Decision]) -> str:
    """Where an experiment stands, in a sentence."""
    from onlinerl.records import ExperimentState

    last = decisions[-1]
    if experiment.state is ExperimentState.WAITING:
        proposed = [one for one in decisions if one.proposed][-1]
        how = f"`onlinerl experiments confirm {experiment.id}` does it"
        return f"proposes to {PROPOSALS[proposed.kind.value]}: {proposed.reason}; {how}"
    if experiment.state is not ExperimentState.RUNNING:
        return f"{experiment.state} {moment(experiment.ended_at)}: {experiment.message}"
    if not experiment.begun:
        return "waits until both arms are loaded"
    stage = f"stage {experiment.stage + 1} of {len(experiment.plan['stages'])}"
    return f"{stage}, {experiment.share:.0%} get {experiment.treatment.name}: {last.reason}"


def _who(plan: Plan) -> str:
    """Whose requests take part, in a sentence."""
    people = "everybody with a user key" if plan.users == "all" else f"{len(plan.users)} listed users"
    where = f" in {', '.join(plan.projects)}" if plan.projects else ""
    share = "" if plan.share == 1 else f", {plan.share:.0%} of them"
    return f"{people}{where}{share} by {plan.unit}, in stages of {', '.join(f'{s:.0%}' for s in plan.stages)}"


PROPOSALS = {"promote": "promote the treatment", "futile": "give up"}


@experiments.command("show")
@experiment_argument
@policy_option
@json_option
@with_settings
def show_experiment(settings: Settings, experiment: int, policy: str | None, as_json: bool) -> None:
    """One experiment: its interval over time, its guardrails, and every decision."""
    from onlinerl.experiments import picture
    from onlinerl.loop import promotion
    from onlinerl.store import experiments as store

    with kept(settings) as database, database.read() as c:
        found = store.get(c, chosen(settings, policy), experiment)
        decisions = store.decisions(c, found.id)
        look = promotion.now(c, found)
    now = [] if look is None else [look.decision]
    if as_json:
        told = now[0].describe() if now else None
        print_json({**found.describe(), "now": told, "decisions": [one.describe() for one in decisions]})
        return
    click.echo(f"{found.treatment.name} against {found.control.name}: {_said(found, [*decisions, *now])}")
    click.echo(_who(Plan.model_validate(dict(found.plan))))
    looks = picture.points([*decisions, *now])
    if looks:
        click.echo("\ndifference, in points of reward per 100 requests, over time:")
        click.echo("\n".join(picture.chart(looks)))
    if look is not None:
        columns = ("guardrail", "control", "treatment", "is")
        print_table(columns, [_guard(guard) for guard in look.guards], nothing="")
    history = [
        (moment(one.at), one.stage + 1, one.kind.value, "proposed" if one.proposed else one.actor, one.reason)
        for one in decisions
        if one.kind.value != "continue"
    ]
    print_table(("at (UTC)", "stage", "decision", "by", "reason"), history, nothing="")


def _guard(guard: Guard) -> tuple[str, str, str, str]:
    if not guard.known:
        return guard.name, "", "", "not known yet"
    stands = "broken" if guard.broken else "safe" if guard.safe else "neither safe nor broken yet"
    return guard.name, f"{guard.control:.3g}", f"{guard.treatment:.3g}", stands


@experiments.command("start")
@click.argument("treatment")
@click.option("--control", metavar="V", help="What it is tried against [default: the live version].")
@policy_option
@json_option
@with_settings
def start_experiment(
    settings: Settings, treatment: str, control: str | None, policy: str | None, as_json: bool
) -> None:
    """Try the version TREATMENT (3, or POLICY@3) on live users; it begins once a `serve` has loaded it.

    Its plan is that of policies.P.experiments, overrides included.
    """
    from onlinerl.loop import promotion

    name = chosen(settings, policy)
    tried = promotion.arm(settings, name, treatment)
    against = None if control is None else promotion.arm(settings, name, control)
    with kept(settings) as database, database.write() as c:
        started = promotion.start(
            c,
            settings,
            name,
            control=against,
            treatment=tried,
            plan=settings.policies[name].experiments,
            actor=ACTOR,
            now=time.time(),
        )
    if as_json:
        print_json(started.describe())
        return
    click.echo(f"experiment {started.id} tries {started.treatment.name} against {started.control.name}")


@experiments.command("stop")
@experiment_argument
@click.option("--reason", default="stopped by a person", show_default=True, help="Why, in a sentence.")
@policy_option
@json_option
@with_settings
def stop_experiment(
    settings: Settings, experiment: int, reason: str, policy: str | None, as_json: bool
) -> None:
    """End an experiment: everybody is served the live version, and a canary is rejected."""
    from onlinerl.loop import promotion

    name = chosen(settings, policy)
    with kept(settings) as database, database.write() as c:
        ended = promotion.stop(c, name, experiment, actor=ACTOR, reason=reason, now=time.time())
    print_json(ended.describe()) if as_json else click.echo(f"experiment {ended.id} is {ended.state}")


@experiments.command("confirm")
@experiment_argument
@policy_option
@json_option
@with_settings
def confirm_experiment(settings: Settings, experiment: int, policy: str | None, as_json: bool) -> None:
    """Do what an experiment proposes that waits for a person (decide: ask): promote, or give up."""
    from onlinerl.loop import promotion

    name = chosen(settings, policy)
    with kept(settings) as database, database.write() as c:
        ended = promotion.confirm(c, name, experiment, actor=ACTOR, now=time.time())
    print_json(ended.describe()) if as_json else click.echo(f"experiment {ended.id} is {ended.state}")


# ------------------------------------------------------------------------------------------ replicas


@cli.group()
def replicas() -> None:
    """Look at the engines of a running `serve`."""


@replicas.command("list")
@json_option
@with_settings
def list_replicas(settings: Settings, as_json: bool) -> None:
    """Each replica: whether it answers, the versions it holds, what it is doing."""
    import asyncio

    from onlinerl import serve as server

    found = asyncio.run(server.ask_replicas(settings))
    if as_json:
        print_json(found)
        return
    columns = ("replica", "policy", "state", "versions", "running", "waiting")
    rows = [(r["name"], r["policy"], r["state"], r["versions"], r["running"], r["waiting"]) for r in found]
    print_table(columns, rows, nothing="no replicas")


# ------------------------------------------------------------------------------- people, and their code


@cli.command()
@click.option(
    "--url",
    metavar="U",
    help="The inference API, such as http://127.0.0.1:8081 [default: the `serve` that runs on --home].",
)
@click.option("--feedback-url", metavar="U", help="The feedback API [default: --url's].")
@click.option(
    "--protocol",
    type=click.Choice(["native", "continue", "fork"]),
    default="native",
    show_default=True,
    help="Whose wire form is spoken.",
)
@click.option(
    "--users",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="How many developers.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="How many requests they make in all.",
)
@click.option(
    "--code",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Python files that they work on [default: held-out packages of the standard library].",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed, the same people.")
@click.option("--taste", default="lenient", show_default=True, help="What they accept.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="Divides their reading times.")
@click.option("--model", help="The model that they ask for; needed where there are several policies.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Longest answer they ask for.",
)
@click.option("--temperature", type=float, help="Sent with each request [default: the client's own].")
@json_option
@with_settings
def simulate(
    settings: Settings,
    url: str | None,
    feedback_url: str | None,
    code: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """N simulated developers at work over HTTP: they ask, read, accept, reject, wait too long, cancel."""
    from rich.console import Console

    from onlinerl.datasets import simulate as people

    if url is None:
        from onlinerl import serve as server

        url, known = server.addresses(settings)
        feedback_url = feedback_url or known
    report = people.run(url, feedback_url=feedback_url, code=code, progress=not as_json, **options)
    if as_json:
        print_json(report.as_json())
    else:
        Console().print(report.table())
    if report.errors == report.requests:
        kinds = ", ".join(report.error_kinds)
        hint = ": name one of the server's models with --model" if "HTTP 404" in report.error_kinds else ""
        raise EngineError(f"none of the {report.requests} requests was answered ({kinds}){hint}")


@cli.command()
@click.option(
    "--code",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of Python files [default: held-out packages of the standard library].",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE.jsonl", help="Where they go."
)
@click.option(
    "--split",
    type=click.Choice(["all", "train", "test"]),
    default="all",
    show_default=True,
    help="Which files; the two halves never share one.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=1000, show_default=True, metavar="N", help="Most prompts."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which places are chosen.")
@json_option
@with_settings
def dataset(
    settings: Settings, code: Path | None, out: Path, split: Any, limit: int, seed: int, as_json: bool
) -> None:
    """Fill-in-the-middle prompts from any folder of Python code, one JSON object a line."""
    from onlinerl.datasets import fim

    found = fim.collect(code, split=split, limit=limit, seed=seed, progress=not as_json)
    count = fim.write(out, found.prompts)
    if as_json:
        print_json({"prompts": count, "files": found.files, "skipped": dict(found.skipped)})
        return
    skipped = ", ".join(f"{number} {why}" for why, number in sorted(found.skipped.items())) or "none"
    click.echo(f"{count} prompts from {found.files} files in {out}; files left out: {skipped}")


if __name__ == "__main__":
    main()
