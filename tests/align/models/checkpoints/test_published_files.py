"""Where weights and config of a published checkpoint lie, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.models.checkpoints.published_files import config_values, find, read_checkpoint, unpack


def test_a_run_a_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "folder"
    for path in (
        run / ".hydra/config.yaml",
        run / "checkpoints/last.ckpt",
        folder / "config.json",
        folder / "model.safetensors",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder / "config.json").write_text("{}")
    run_files = run / "checkpoints/last.ckpt", run / ".hydra/config.yaml"
    assert find(run) == find(run_files[0]) == run_files
    assert find(folder) == (folder / "model.safetensors", folder / "config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no weights, neither model\.safetensors nor"):
        find(folder)


def test_sections_of_a_training_checkpoint(tmp_path: Path) -> None:
    w = torch.zeros(1)
    content = {"state_dict": {"_orig_mod.w": w}, "ema": {"shadow_params": [w]}}
    torch.save(content, tmp_path / "last.ckpt")
    tensors, averaged = unpack(read_checkpoint(tmp_path / "last.ckpt"), tmp_path)
    assert tensors.keys() == {"w"} and averaged is not None and len(averaged) == 1
    assert unpack({"w": w}, tmp_path)[1] is None
    for bad, says in [
        ({"model": {"w": w}}, "misses 'ema'"),
        ({"w": 1}, "'w' is a int"),
        ({"model": {"w": w}, "ema": {"shadow_params": [1]}}, "must be a list of tensors"),
    ]:
        with pytest.raises(UserError, match=says):
            unpack(bad, tmp_path)


def test_the_config_is_in_the_checkpoint_or_beside_it(tmp_path: Path) -> None:
    assert config_values({"hyper_parameters": {"config": {"a": 1}}}, None, tmp_path) == {"a": 1}
    (tmp_path / "config.yaml").write_text("a: 2\n")
    assert config_values({}, tmp_path / "config.yaml", tmp_path) == {"a": 2}
    with pytest.raises(UserError, match="put its config.json or .hydra/config.yaml beside it"):
        config_values({}, None, tmp_path)
