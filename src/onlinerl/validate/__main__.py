"""`python -m onlinerl.validate [--json] [-c FILE] [--home DIR] [SETTING=VALUE]...`: one offline run.

`onlinerl validate` gives the settings as JSON in the environment variable ONLINERL_SETTINGS. On a machine
that has no more of onlinerl's dependencies than this house needs, they are given as to any verb. Exit codes:
0 ended, 1 failed or stopped by a guard (then the report is there), 2 wrong settings, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onlinerl.config import Settings, load_settings
from onlinerl.errors import OnlineRLError, SettingsError
from onlinerl.redaction import redacted

VARIABLE = "ONLINERL_SETTINGS"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="onlinerl.validate", description="One offline run")
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="Settings file (YAML).")
    parser.add_argument("--home", type=Path, metavar="DIR", help="Folder of the reports.")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE")
    options = parser.parse_args()
    try:
        settings = _settings(options)
        from onlinerl.validate.course import check  # torch takes seconds: wrong settings should not

        check(settings)
        from onlinerl.validate.run import run

        tree = run(settings, quiet=options.json)
    except (SettingsError, ValidationError) as error:
        print(f"onlinerl: {redacted(str(error))}", file=sys.stderr)
        return 2
    except OnlineRLError as error:
        print(f"onlinerl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "onlinerl: interrupted: this run has no report, and its steps, if any, are in log.jsonl",
            file=sys.stderr,
        )
        return 130
    if options.json:
        print(json.dumps(tree, indent=1))
    if tree["stopped_by"]:
        print(f"onlinerl: stopped: {tree['stopped_by']}", file=sys.stderr)
        return 1
    return 0


def _settings(options: Any) -> Settings:
    if VARIABLE in os.environ:
        return Settings.model_validate_json(os.environ[VARIABLE])
    return load_settings(options.config, options.overrides, home=options.home)


if __name__ == "__main__":
    sys.exit(main())
