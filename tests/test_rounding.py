"""What share of the stored weights a version changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onlinerl.errors import WeightsError
from onlinerl.learning.rounding import changed, unchanged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_share_is_counted_in_numbers_over_all_files(tmp_path: Path, dtype: torch.dtype) -> None:
    one, two = torch.ones(3, 4, dtype=dtype), torch.ones(8, dtype=dtype)
    files = {"one": tmp_path / "1.safetensors", "two": tmp_path / "2.safetensors"}
    save_file({"one": one, "of another model": two}, files["one"])
    save_file({"two": two}, files["two"])
    assert changed({"one": one, "two": two}, files) == 0.0
    moved = two.clone()
    moved[:3] += 2 * torch.finfo(dtype).eps
    assert changed({"one": one, "two": moved}, files) == 3 / 20
    assert changed({"one": -one, "two": moved}, files) == 15 / 20
    assert changed({"one": -one.T.contiguous().T}, files) == 1.0, "however it lies in memory"
    fp32 = one.float() * (1 + torch.finfo(dtype).eps / 4)
    assert changed({"one": fp32.to(dtype)}, files) == 0.0, "rounded away"


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(WeightsError, match="cannot be read"):
        changed({"one": torch.ones(1)}, {"one": file})
    save_file({"two": torch.ones(1)}, file)
    with pytest.raises(WeightsError, match="cannot be read"):
        changed({"one": torch.ones(1)}, {"one": file})


def test_the_warning_names_the_formats_once_and_what_to_do() -> None:
    text = unchanged("tab@2", "tab@1", [torch.bfloat16, torch.float32, torch.bfloat16], "train.lora.lr")
    assert "tab@2 serves the very weights of tab@1" in text
    assert "too small for bfloat16 and float32." in text
    assert "raise train.lora.lr" in text
