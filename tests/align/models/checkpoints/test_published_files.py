"""Where weights and config of a published checkpoint lie, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.models.checkpoints.published import find, load_published
from tests.published_ddits import (
    MDLM_RUN,
    SEDD,
    assert_same,
    network,
    refuses,
    state,
    write_hub,
    write_run,
)


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


class Foreign:
    """Stands for omegaconf's objects in Lightning's hyperparameters."""


def test_foreign_objects_are_not_unpickled(tmp_path: Path) -> None:
    net = network(time_input="zero")
    content = {"state_dict": state(net, "backbone."), "hyper_parameters": {"config": Foreign()}}
    run = write_run(tmp_path, MDLM_RUN, "checkpoints/last.ckpt", content)
    says = refuses(
        run, r"holds \S*test_published_files.Foreign objects, not tensors alone, and is not unpickled"
    )
    command = says.split('python -c "')[1].split('"')[0]
    exec(command, {})  # the line it gives is one that works
    assert_same(load_published(run / "checkpoints" / "last.weights.pt").network, net)


def test_torn_files_say_so(tmp_path: Path) -> None:
    net = network(scale_by_sigma=True)
    folder = write_hub(tmp_path, SEDD, state(net))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refuses(folder, "model.safetensors: not readable")
    weights.unlink()
    refuses(folder, "no weights, neither model.safetensors nor pytorch_model.bin")
    for content in (b"", b"hello", whole[:99]):
        (folder / "pytorch_model.bin").write_bytes(content)
        refuses(folder, "pytorch_model.bin: not readable")
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    refuses(folder, "holds a list, not named tensors")
    torch.save({"a": 1}, folder / "pytorch_model.bin")
    refuses(folder, "'a' is a int, not a tensor")
