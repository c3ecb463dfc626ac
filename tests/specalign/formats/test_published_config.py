"""Configs of the published layouts: what is written is read as the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specalign.common.errors import UserError
from specalign.formats.published import find, load_published
from tests.published_ddits import (
    BD3LM,
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


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy that lacks the dotted key."""
    head, _, rest = key.partition(".")
    kept = {k: v for k, v in config.items() if k != head or rest}
    return {**kept, head: without(config[head], rest)} if rest else kept


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (without(SEDD, "tokens"), "config.json: missing key 'tokens'"),
        ({**SEDD, "tokens": "many"}, "tokens must be a whole number, not 'many'"),
        (
            {**SEDD, "graph": {"type": "uniform"}},
            "graph.type: a drafter trained with 'uniform' noise cannot draft",
        ),
        (
            {**SEDD, "noise": {"type": "geometric", "sigma_min": 2, "sigma_max": 1}},
            "noise.sigma_min=2 and sigma_max=1 must be numbers",
        ),
        (
            {**SEDD, "model": {**SEDD["model"], "n_heads": 3}},
            "config.json: ddit config: hidden_size=16, n_heads=3",
        ),
        (
            {**SEDD, "model": {**SEDD["model"], "n_heads": 4}},
            r"rotary_emb.inv_freq has shape \(4,\), expected \(2,\)",
        ),
        ({**SEDD, "mask_token_id": 11}, r"mask_token_id=11 is not an id within 0\.\.10"),
        (without(MDLM, "time_conditioning"), "missing key 'time_conditioning'"),
        ({**MDLM, "time_conditioning": 0}, "time_conditioning must be true or false, not 0"),
        (without(BD3LM, "block_size"), "missing key 'block_size'"),
        ({**BD3LM, "causal": True}, "an autoregressive model"),
        (
            {**MDLM_RUN, "data": {"tokenizer_name_or_path": "bert-base-uncased"}},
            "tokenizer 'bert-base-uncased' may have its own mask token",
        ),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    prefix = "" if "tokens" in config or "graph" in config else "backbone."
    net = network(scale_by_sigma=True)
    refuses(write_hub(tmp_path, config, state(net, prefix)), says)


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
        run,
        r"holds \S*test_published_config.Foreign objects, not tensors alone, and is not unpickled",
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
