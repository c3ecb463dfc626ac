"""Tensors that do not fit are refused by their name; vocabularies come out ascending, with their head where it is not the target's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.errors import UserError
from specalign.formats.block import load_drafter
from specalign.formats.tensors import read_vocabulary
from specalign.formats.weights import INDEX, read_folder
from specalign.lm.model import Target
from tests.published_blocks import IDS, backbone, dflash_config, pruned, write

Tensors = dict[str, Tensor]


def _set(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def plant(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name])

    return plant


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (_set("fc.weight", lambda w: w[:, :64]), r"fc.weight has shape \(64, 64\), expected \(64, 128\)"),
        (_set("norm.weight", lambda w: w * torch.nan), "norm.weight contains non-finite values"),
        (_set("norm.weight", lambda w: w.to(torch.float8_e4m3fn)), "norm.weight is of type float8_e4m3fn"),
        (lambda t: t.update({"layers.0.self_attn.o_proj.bias": torch.ones(64)}), "o_proj.bias is not zero"),
        (_set("d2t", lambda d: d.float()), "d2t must hold ascending"),
        (_set("d2t", lambda d: d + 300), "d2t must hold ascending"),
        (lambda t: t.pop("d2t"), "lm_head.weight has shape"),
        (_set("lm_head.weight", lambda w: w[:-1]), "lm_head.weight has shape"),
        (_set("lm_head.weight", lambda w: w.flip(0)), "lm_head.weight holds another target's rows"),
        (lambda t: t.update({"embed_tokens.weight": torch.randn(7, 64)}), "embed_tokens.weight has shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_name(
    tmp_path: Path, target: Target, plant: Callable[[Tensors], None], says: str
) -> None:
    tensors = backbone(target) | pruned(target)
    plant(tensors)
    folder = write(tmp_path / "theirs", dflash_config(target), tensors)
    with pytest.raises(UserError, match=says) as refused:
        load_drafter(folder, target)
    assert "\n" not in str(refused.value)


def test_vocabularies_come_out_ascending(target: Target) -> None:
    """An engine may keep the commonest token first: rows of the head and of the Markov head go along."""
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))
    head = pruned(target, 0.2)["lm_head.weight"][order]
    bias = torch.randn(len(IDS), 3)
    held = {
        "d2t": IDS[order] - torch.arange(len(IDS)),
        "lm_head.weight": head,
        "markov_head.markov_w2.weight": bias,
    }
    vocab, rows = read_vocabulary(held, target, Path("here"))
    assert vocab is not None and rows is not None
    assert torch.equal(vocab, IDS) and torch.equal(rows[order], head)
    assert torch.equal(held.pop("markov_head.markov_w2.weight")[order], bias) and not held
    assert read_vocabulary(pruned(target), target, Path("here"))[1] is None  # the target's own rows
    whole: Tensors = {
        "lm_head.weight": target.head_weight_VD,
        "embed_tokens.weight": target.embedding_VD,
    }
    assert read_vocabulary(whole, target, Path("here")) == (None, None) and not whole


def test_shards(tmp_path: Path, target: Target) -> None:
    folder, tensors = write(tmp_path / "theirs", dflash_config(target), {}), backbone(target)
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), ("model-1.safetensors", "model-2.safetensors")
    for file, part in zip(files, (names[:9], names[9:]), strict=True):
        save_file({n: tensors[n] for n in part}, str(folder / file))
    mapped = {n: files[i >= 9] for i, n in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapped}))
    assert read_folder(folder, "it").keys() == tensors.keys()
    assert load_drafter(folder, target).config.block_size == 4
    (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": "../other.safetensors"}}))
    with pytest.raises(UserError, match="which is not in the folder"):
        read_folder(folder, "it")
