"""GGUF files by their first bytes, in a folder of their own, and in parts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from align.common.errors import UserError
from align.gguf.header import read_header
from align.gguf.parts import gguf_of_folder, is_gguf, join_parts, part_paths, whole_header
from align.planning.target_sizes import read_target_sizes
from align.target.loading import load_target
from align.target.model import Target
from align.target.names import check_name, folder_kind
from tests.target_models import write_gguf


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    return load_target("debug", fast=False)


@pytest.fixture
def parts(plain: Target, tmp_path: Path) -> list[Path]:
    """The debug target in three parts, as the package gguf splits it."""
    write_gguf(tmp_path / "tiny.gguf", plain)
    reader = gguf.GGUFReader(str(tmp_path / "tiny.gguf"))
    (tmp_path / "split").mkdir()
    writer = gguf.GGUFWriter(str(tmp_path / "split" / "tiny.gguf"), "llama", split_max_tensors=15)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, tensor.data.shape, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted((tmp_path / "split").iterdir())


def same_model(name: Path, plain: Target) -> bool:
    tokens = torch.arange(4, 30)[None]
    check_name(str(name))
    assert read_target_sizes(str(name)).parameters == read_target_sizes("debug").parameters
    loaded = load_target(str(name), dtype="float32", fast=False)
    found = loaded.forward(tokens).logits_BLV
    torch.testing.assert_close(found, plain.forward(tokens).logits_BLV, atol=1e-5, rtol=1e-5)
    return loaded.chat_tokens("Hello") == plain.chat_tokens("Hello")


@pytest.mark.parametrize(
    "name", ["sha256-b179c9", "sha256-1.2.3", "TINY.GGUF", "tiny.Gguf", "folder/any.gguf"]
)
def test_the_first_bytes_decide(name: str, plain: Target, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write_gguf(path, plain)
    assert is_gguf(path) and same_model(path, plain)


def test_a_folder_with_one_is_that_one(plain: Target, tmp_path: Path, parts: list[Path]) -> None:
    folder = parts[0].parent
    assert gguf_of_folder(folder) == parts[0] and same_model(folder, plain)
    (folder / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    assert gguf_of_folder(folder) == parts[0]
    (folder / "tiny-mmproj.gguf").write_bytes(b"GGUF")
    assert gguf_of_folder(folder) == parts[0]
    for name in ("b.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf"):
        (folder / name).write_bytes(b"GGUF")
    with pytest.raises(UserError, match="several GGUF models: .*: b.gguf, c-00001-of-00002.gguf, tiny-00001"):
        check_name(str(folder))
    (tmp_path / "empty").mkdir()
    assert gguf_of_folder(tmp_path / "empty") is None
    with pytest.raises(UserError, match="empty has no config.json"):
        load_target(str(tmp_path / "empty"))


def test_a_config_without_weights_leaves_the_model_to_the_gguf(plain: Target, tmp_path: Path) -> None:
    """Hub repositories of GGUF files often hold a config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", plain)
    plain.model.config.save_pretrained(folder)
    assert same_model(folder, plain)
    plain.model.save_pretrained(folder)
    assert folder_kind(str(folder), folder) == folder  # its weights in hub layout come first


def test_any_part_names_the_whole(plain: Target, parts: list[Path], tmp_path: Path) -> None:
    assert all(part_paths(part) == parts for part in parts) and len(parts) == 3
    assert same_model(parts[1], plain) and same_model(parts[2], plain)
    join_parts(parts, tmp_path / "whole.gguf")
    whole, joined = read_header(tmp_path / "tiny.gguf"), read_header(tmp_path / "whole.gguf")
    assert (whole.values, whole.shapes, whole.lengths) == (joined.values, joined.shapes, joined.lengths)
    assert whole_header(parts).shapes == whole.shapes and whole_header(parts).types == whole.types
    kept: Any = tmp_path / "merged-00001-of-00002.gguf"  # a whole file under a part's name
    shutil.copy(tmp_path / "tiny.gguf", kept)
    assert part_paths(kept) == [kept] and same_model(kept, plain)


@pytest.mark.parametrize("damage", ["missing", "renamed", "swapped", "cut", "of another model"])
def test_parts_that_are_not_whole_are_named(damage: str, parts: list[Path], tmp_path: Path) -> None:
    name = parts[0]
    if damage == "missing":
        parts[1].unlink()
        says = "split into 3 parts: tiny-00002-of-00003.gguf is missing"
    elif damage == "renamed":
        name = tmp_path / "whole.gguf"
        shutil.copy(parts[0], name)
        says = "one of 3 parts of a split GGUF file: .*NAME-00001-of-00003.gguf"
    elif damage == "swapped":
        shutil.copy(parts[2], parts[1])
        says = "tiny-00002-of-00003.gguf: is part 3, not 2"
    elif damage == "cut":
        parts[2].write_bytes(parts[2].read_bytes()[:-5000])
        says = "tiny-00003-of-00003.gguf: tensor .* it is cut off"
    else:
        shutil.copy(tmp_path / "tiny.gguf", parts[1])
        says = "one of 1 parts"
    with pytest.raises(UserError, match=says):
        check_name(str(name))
    with pytest.raises(UserError, match=says):
        load_target(str(name))
