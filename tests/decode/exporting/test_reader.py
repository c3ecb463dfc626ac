"""Readers refuse what they can't read in one line. Other engines' folders, loaded, draft what a reader of the same files says; and our
exports come in and go out to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.checkpoints.block import load_drafter, save_drafter
from align.target.model import Target
from decode.drafters.block import BlockProposer
from decode.engine.compiled import stock_model
from decode.engine.decoder import Decoder
from decode.exporting.engine_reader import EngineReader, PackageReader, SpeculatorsReader
from decode.exporting.ladder import distance, trained
from decode.exporting.reader import FilesReader, Reader
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, block_network
from tests.published_blocks import (
    IDS,
    backbone,
    dflash_config,
    dspark_config,
    markov_tensors,
    pruned,
    speculators_config,
    write,
)

Maker = Callable[[Target], tuple[dict[str, Any], dict[str, Tensor]]]


def _dspark(kind: str, **changes: Any) -> Maker:
    def made(target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
        held = backbone(target) | markov_tensors(target, kind, 6, target.vocab_size)
        return dspark_config(target, kind, 6, **changes), held

    return made


def _speculators(kind: str, change: float, **changes: Any) -> Maker:
    def made(target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
        held = backbone(target) | pruned(target, change)
        if kind == "dspark":
            held |= markov_tensors(target, "vanilla", 6, len(IDS))
            changes.update(markov_rank=6, markov_head_type="vanilla", enable_confidence_head=False)
        return speculators_config(target, kind, **changes), held

    return made


PUBLISHED: dict[str, Maker] = {
    "dflash": lambda target: (dflash_config(target), backbone(target)),
    "dflash, the target's own angles": lambda target: (
        dflash_config(target, rope_theta=target.rope_theta), backbone(target)
    ),
    "dflash, linear": lambda target: (
        dflash_config(target, rope_scaling={"rope_type": "linear", "factor": 4.0}), backbone(target)
    ),
    "dflash, yarn": lambda target: (
        dflash_config(target, rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4
        }), backbone(target)
    ),
    "dflash, pruned": lambda target: (dflash_config(target), backbone(target) | pruned(target)),
    "dspark vanilla": _dspark("vanilla"),
    "dspark gated": _dspark("gated"),
    "dspark rnn": _dspark("rnn"),
    "dspark, fill-in": _dspark("gated", sample_from_anchor=False),
    "speculators": _speculators("dflash", 0.0),
    "speculators, another head": _speculators("dflash", 0.3),
    "speculators dspark": _speculators("dspark", 0.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


def same(drafter: BlockDrafter, reader: Reader, tokens: list[int]) -> None:
    """Hidden states and draft tokens, of the training graph and of the session that decodes."""
    found = reader.trace(reader.states(tokens[:-1]), tokens[-1])
    wanted = trained(drafter, tokens)
    for name in ("fused context", "rotary tables", "hidden states", "draft logits"):
        assert distance(found[name], wanted[name]) < 1e-4, name
    assert torch.equal(found["draft tokens"], wanted["draft tokens"])


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_folders_draft_as_their_definition_says(
    tmp_path: Path, target: Target, model: Any, kind: str
) -> None:
    folder = write(tmp_path / "theirs", *PUBLISHED[kind](target))
    drafter = load_drafter(folder, target)
    assert (drafter.head is not None) == (kind == "speculators, another head")
    for tokens in (PROMPT, [5, 9], [1, 90, 17, 2, 3, 1, 40, 0, 90]):
        same(drafter, FilesReader(folder, model), tokens)
    # as this project keeps it, and out again
    save_drafter(drafter, tmp_path / "ours", dtype=torch.float32)
    again = load_drafter(tmp_path / "ours", target)
    assert again.config == drafter.config
    same(again, FilesReader(folder, model), PROMPT)
    layout = "dspark" if not drafter.config.fill_in else None if drafter.markov is not None else "dflash"
    if layout is not None:
        FORMATS[layout].write(again, tmp_path / "out", torch.float32, "")
        same(drafter, FilesReader(tmp_path / "out", model), PROMPT)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_decoding_with_them_is_lossless(tmp_path: Path, target: Target, kind: str) -> None:
    """Greedy outputs are plain decoding's; a draw coupled by the same noise gives the same tokens."""
    drafter = load_drafter(write(tmp_path / "theirs", *PUBLISHED[kind](target)), target)
    for nodes in (0, 4):
        decoder = Decoder(target, BlockProposer(drafter, tree_nodes=nodes))
        plain = Decoder(target).generate(PROMPT, max_new_tokens=16).tokens
        assert decoder.generate(PROMPT, max_new_tokens=16).tokens == plain
    coupled = [
        Decoder(target, proposer, "gumbel")
        .generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=3)
        .tokens
        for proposer in (BlockProposer(drafter, tree_nodes=0), BlockProposer(drafter, 1, tree_nodes=0))
    ]
    assert coupled[0] == coupled[1]


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("dflash", PackageReader),
        ("dflash, the target's own angles", PackageReader),
        ("dflash, yarn", PackageReader),
        ("speculators", SpeculatorsReader),
        ("speculators, another head", SpeculatorsReader),
    ],
)
def test_the_package_itself_drafts_the_same(
    tmp_path: Path, target: Target, model: Any, kind: str, package: type[EngineReader]
) -> None:
    if not package.installed():
        pytest.skip(f"{package.name} is not installed")
    folder = write(tmp_path / "theirs", *PUBLISHED[kind](target))
    same(load_drafter(folder, target), package(folder, model), PROMPT)


@pytest.mark.parametrize(
    ("format_name", "whole", "options"),
    [
        ("dflash", True, {}),
        ("dflash", False, {}),
        ("speculators", True, {}),
        ("speculators", False, {}),
        ("transformers", True, {}),
        ("dspark", True, {}),
        ("dspark", False, {"markov_rank": 8, "markov": "vanilla", "confidence_head": True}),
        ("dspark", True, {"confidence_head": True}),
        ("dspark", True, {"markov_rank": 8, "markov": "linear"}),
        ("dspark", True, {"markov_rank": 8, "markov": "tanh", "confidence_head": True}),
        ("dspark", False, {"markov_rank": 8, "markov": "gated"}),
    ],
)
def test_an_export_comes_in_and_goes_out_to_the_byte(
    tmp_path: Path, target: Target, format_name: str, whole: bool, options: dict[str, Any]
) -> None:
    layout = {} if format_name == "dspark" else {"block_layout": "fill_in"}
    drafter = block_network(target, "taps", whole=whole, options={**layout, **options})
    for dtype in (torch.bfloat16, torch.float32):
        first, second = tmp_path / f"{dtype} first", tmp_path / f"{dtype} second"
        FORMATS[format_name].write(drafter, first, dtype, "card\n")
        FORMATS[format_name].write(load_drafter(first, target), second, dtype, "card\n")
        for path in first.iterdir():
            if path.name == "README.md" and options.get("markov") == "gated":
                continue  # the first one was widened, and says so
            assert path.read_bytes() == (second / path.name).read_bytes(), path.name


# ---- what is refused ----


def test_files_that_are_not_whole(tmp_path: Path, target: Target) -> None:
    drafter, model = (
        block_network(target, "taps", whole=True, options={"block_layout": "fill_in"}),
        stock_model(target),
    )
    out = tmp_path / "out"
    FORMATS["dflash"].write(drafter, out, torch.float32, "")
    config = json.loads((out / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 99]
    (out / "config.json").write_text(json.dumps(config))
    reader = FilesReader(out, model)
    with pytest.raises(UserError, match="layer 99 is none of the target's"):
        reader.drafts(reader.states(PROMPT), 1)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UserError, match="model.safetensors: not readable"):
        FilesReader(out, model)
