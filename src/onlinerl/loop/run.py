"""How a training run is started: always as a process of its own, by command.

A run shares nothing with who starts it but the store and the weights folder, so it may outlive `serve`,
and `serve` never imports torch.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from onlinerl.config import WHOLE, Settings
from onlinerl.errors import RunError

SETTINGS_VARIABLE = "ONLINERL_SETTINGS"
"""Environment variable in which a child process finds its settings as JSON."""


def command(
    policy: str, *, max_steps: int | None = None, follow: bool = False, run: int | None = None
) -> list[str]:
    """The command line of one run, under this interpreter; `run`: the one that it is to begin or carry on."""
    line = [sys.executable, "-m", "onlinerl.learning", "--policy", policy]
    if max_steps is not None:
        line += ["--max-steps", str(max_steps)]
    if follow:
        line.append("--follow")
    if run is not None:
        line += ["--run", str(run)]
    return line


def environment(settings: Settings) -> dict[str, str]:
    """This process's environment plus the settings, secrets included, with `home` made absolute."""
    absolute = settings.model_copy(update={"home": settings.home.resolve()})
    return child_environment({SETTINGS_VARIABLE: absolute.model_dump_json(context=WHOLE)})


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of any child: this one, `extra`, output unbuffered, and this very package first."""
    variables = {**os.environ, **extra, "PYTHONUNBUFFERED": "1"}
    # A child must run the code of its parent, also where that was found by sys.path alone (pytest).
    source = str(Path(__file__).resolve().parents[2])
    if source not in site.getsitepackages():
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (source, variables.get("PYTHONPATH"))))
    return variables


def start(
    settings: Settings,
    policy: str,
    *,
    max_steps: int | None = None,
    follow: bool = False,
    run: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own: it goes on when the starter dies.

    Its output goes to `home/runs/start-POLICY-TIME.log` (the run's own log lies in the run's folder); it
    tells why a run did not even begin. Raises RunError when the process or the file cannot be made.
    """
    folder = settings.home.resolve() / "runs"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"start-{policy}-{stamp}.log", "ab") as log:
            return subprocess.Popen(
                command(policy, max_steps=max_steps, follow=follow, run=run),
                env=environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise RunError(f"a run of {policy} could not be started: {error}") from None
