"""`python -m onlinerl.learning --policy P [--max-steps N] [--follow] [--run ID]`: one run, by itself.

The settings come as JSON in the environment variable ONLINERL_SETTINGS (the defaults without it), so that
whoever starts a run needs neither torch nor a file. Exit codes: 0 ended, 1 failed, 2 wrong settings.
"""

from __future__ import annotations

import os
import sys

import click
from pydantic import ValidationError

from onlinerl.config import Settings
from onlinerl.errors import OnlineRLError, SettingsError
from onlinerl.redaction import redacted


@click.command()
@click.option("--policy", required=True, help="The policy to train.")
@click.option("--max-steps", type=click.IntRange(min=1), help="End after so many batches.")
@click.option("--follow", is_flag=True, help="Keep going as feedback arrives.")
@click.option("--run", "id", type=int, help="The run that it is for: one that waits, or whose process died.")
def main(policy: str, max_steps: int | None, follow: bool, id: int | None) -> None:
    """Run one training run."""
    try:
        settings = Settings.model_validate_json(os.environ.get("ONLINERL_SETTINGS", "{}"))
    except ValidationError as error:
        click.echo(f"onlinerl: ONLINERL_SETTINGS: {redacted(str(error))}", err=True)
        sys.exit(2)
    from onlinerl.learning.run import outcome, train  # torch takes seconds: wrong settings should not

    try:
        run = train(settings, policy, max_steps=max_steps, follow=follow, id=id)
    except SettingsError as error:
        click.echo(f"onlinerl: {error}", err=True)
        sys.exit(2)
    except OnlineRLError as error:
        click.echo(f"onlinerl: {error}", err=True)
        sys.exit(1)
    steps = "1 step" if run.step == 1 else f"{run.step} steps"
    click.echo(f"run {run.id} of {policy}: {run.state} after {steps}: {run.message}")
    for line in outcome(settings, run):
        click.echo(line)


if __name__ == "__main__":
    main()
