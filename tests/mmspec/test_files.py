"""Files that are written whole."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from mmspec.files import atomic


def test_permissions_are_those_of_other_new_files(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with atomic(tmp_path / "model.safetensors") as part:
        save_file({"weight": torch.zeros(1)}, part)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
