"""Version 0: made once, by whoever comes first, from the model that the settings name."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from onlinerl import base
from onlinerl.errors import ModelError
from onlinerl.records import VersionState
from onlinerl.store import versions
from tests.store_helpers import opened
from tests.versions import settings_of


def test_the_base_is_made_once_whoever_comes_first(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with opened(tmp_path) as database:
        failed: list[BaseException] = []

        def one(same_model: bool) -> None:
            try:
                base.ensure(settings, "tab", database, same_model=same_model)
            except BaseException as error:  # noqa: BLE001  told to the test's own thread
                failed.append(error)

        threads = [threading.Thread(target=one, args=(number % 2 == 0,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failed == []
        with database.read() as c:
            (version,) = versions.list_(c)
            assert (version.id, version.state, version.parent) == (0, VersionState.LIVE, None)
            assert len(versions.history(c, "tab")) == 1


def test_another_model_under_the_same_name_is_refused_to_who_serves_it(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    model = tmp_path / "model"
    with opened(tmp_path) as database:
        base.ensure(settings, "tab", database)
        (model / "config.json").write_text(json.dumps({"model_type": "other"}))
        with pytest.raises(ModelError, match="another model"):
            base.ensure(settings, "tab", database)
        base.ensure(settings, "tab", database, same_model=False)
        shutil.rmtree(model)
        with pytest.raises(ModelError):
            base.ensure(settings, "tab", database)
        base.ensure(settings, "tab", database, same_model=False)  # a run has all it needs in its version


def test_without_a_version_0_the_model_must_be_there(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    shutil.rmtree(tmp_path / "model")
    with opened(tmp_path) as database, pytest.raises(ModelError):
        base.ensure(settings, "tab", database, same_model=False)
