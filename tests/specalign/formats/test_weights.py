"""Weights in files: whole or in shards, and what does not hold them."""

from pathlib import Path

import pytest
import torch

from specalign.common.errors import UserError
from specalign.formats.weights import read_weights, weight_files, write_weights


def test_shards_give_way_to_one_file_and_back(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.full((16, 16), float(i)) for i in range(4)}
    for size, count in (("3KB", 2), ("5GB", 1), ("1KB", 4)):
        write_weights(tensors, tmp_path, size)
        files = weight_files(tmp_path)
        assert len(files) == count == len(list(tmp_path.glob("*.safetensors")))
        found = {name: t for file in files for name, t in read_weights(file).items()}
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_what_holds_no_weights_is_one_line(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    torn = tmp_path / "model.safetensors"
    torn.write_bytes(b"{}")
    with pytest.raises(UserError, match="model.safetensors: not readable"):
        read_weights(torn)
    torch.save({"a": torch.tensor(float("nan"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="a contains non-finite values"):
        read_weights(tmp_path / "pytorch_model.bin")
