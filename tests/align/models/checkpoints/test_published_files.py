"""Where weights and config of a published checkpoint lie, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.models.checkpoints import published_files
from align.models.checkpoints.published import load_published
from align.models.checkpoints.published_files import config_values, find, read_checkpoint, unpack
from tests.published_ddits import (
    MDLM,
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


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hub(tmp_path, MDLM, state(network(time_input="zero"), "backbone."))
    asked: list[Any] = []

    def model_folder(name: str, what: str, files: list[str]) -> Path:
        asked.append((name, what))
        return folder

    monkeypatch.setattr(published_files, "model_folder", model_folder)
    assert load_published("kuleshov-group/mdlm-owt").family == "mdlm"
    assert asked == [("kuleshov-group/mdlm-owt", "checkpoint")]
    monkeypatch.undo()
    refuses(str(tmp_path / "nowhere"), "no such folder, and no hub id")


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


def test_a_config_that_is_no_text(tmp_path: Path) -> None:
    folder = write_hub(tmp_path, MDLM_RUN, {})
    (folder / ".hydra").mkdir(exist_ok=True)
    (folder / ".hydra/config.yaml").write_bytes(b"\xff: 1")
    (folder / "checkpoints").mkdir(exist_ok=True)
    torch.save({"state_dict": {}}, folder / "checkpoints/last.ckpt")
    refuses(folder, "is not UTF-8 text")
