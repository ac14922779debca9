"""What a kill leaves in a run's folder: whole checkpoints, and a log that goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from onlinerl.learning.checkpoints import Checkpoints
from onlinerl.learning.log import RunLog


class Killed(BaseException):
    pass


def half_removed(path: Any, *_: Any, **__: Any) -> None:
    """shutil.rmtree, killed after its first file."""
    for file in sorted(Path(path).iterdir()) if Path(path).is_dir() else []:
        file.unlink()
        raise Killed


def save(checkpoints: Checkpoints, batch: int, value: float) -> None:
    checkpoints.save(batch, {"w": torch.full((2,), value)}, {"w/step": torch.tensor(1.0)}, {"value": value})


@pytest.mark.parametrize("batch", [2, 4])
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """The same batch is saved again at the end of a run; the oldest goes when a new one comes."""
    checkpoints = Checkpoints(tmp_path)
    for number in (1, 2):
        save(checkpoints, number, float(number))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half_removed)
        with pytest.raises(Killed):
            save(checkpoints, batch, 9.0)
    for number in checkpoints.batches():
        one = checkpoints.read(number)
        assert one.weights()["w"].tolist() == [one.state["value"]] * 2
        assert one.optimizer()
    assert checkpoints.latest() is not None
    save(checkpoints, 5, 5.0)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "00000005"
    assert not list(tmp_path.glob(".*")), "what the kill left is tidied up"


def test_a_log_goes_on_after_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    for text in ("", '{"event": "start"}\n', '{"event": "start"}\n{"event": "st'):
        (tmp_path / "log.jsonl").write_text(text)
        with RunLog(tmp_path, total=None) as log:
            log.event("resume", batch=2)
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["event"] == "resume"
        assert "" not in lines
