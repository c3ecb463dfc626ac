"""Every format holds what was trained, refuses the rest by its option, and other engines' folders draft by their definition."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from decode.engine.stock import stock_model
from decode.exporting.exports import (
    ExportVerdict,
    GreedyText,
    compare_export,
    decode_greedily,
    trace_drafter,
)
from decode.exporting.formats import MAKERS, distance, read_export, write_export
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.formats.tensors import EMBEDDING
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from tests.block_definition import PublishedDrafter
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
from tests.target_models import tiny_model, tiny_target

FILL_IN = {"block_layout": "fill_in"}
VANILLA = {"markov_rank": 8, "markov": "vanilla"}
HELD: list[tuple[str, bool, dict[str, Any]]] = [
    ("dflash", True, FILL_IN),
    ("speculators", True, FILL_IN),
    ("speculators", False, FILL_IN),
    ("transformers", True, FILL_IN),
    ("dspark", True, {"confidence_head": True}),
    ("dspark", False, {**VANILLA, "confidence_head": True}),
]


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


def logits_after(drafter: BlockDrafter, tokens: list[int]) -> Tensor:
    """Of the first draft after the tokens, the last of which is the anchor."""
    return trace_drafter(drafter, GreedyText(tokens, []))[0, 0]


@pytest.mark.parametrize(("name", "whole", "options"), HELD)
def test_an_export_is_the_drafter_and_comes_in_and_goes_out_to_the_byte(
    tmp_path: Path, target: Target, model: Any, name: str, whole: bool, options: Any
) -> None:
    drafter = block_network(target, "taps", whole=whole, options=options)
    drafter.to(torch.bfloat16).float()
    first, second = tmp_path / "first", tmp_path / "second"
    write_export(name, drafter, first, torch.float32)
    verdict = ExportVerdict(name, first)
    compare_export(drafter, verdict, decode_greedily(drafter, [PROMPT], 8), model)
    assert verdict.exit_code == 0, verdict.lines
    write_export(name, load_drafter(first, target), second, torch.float32, "")
    for file in ("config.json", "model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    if name != "transformers":
        found = PublishedDrafter(first, model).logits(PROMPT)[0]
        if drafter.draft_vocab is not None and len(found) == target.vocab_size:
            found = found[drafter.draft_vocab]
        assert distance(found, logits_after(drafter, PROMPT)) < 1e-4


def test_missing_biases_are_written_as_zeros(tmp_path: Path, target: Target, model: Any) -> None:
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    drafter.config.attention_bias = True
    biased = BlockDrafter(drafter.config, target)
    biased.load_state_dict(drafter.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in biased.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    write_export("dflash", biased, tmp_path / "out", torch.float32, "")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert not held["layers.0.self_attn.o_proj.bias"].any()
    found = PublishedDrafter(tmp_path / "out", model).logits(PROMPT)[0]
    assert distance(found, logits_after(biased, PROMPT)) < 1e-4
    with pytest.raises(UserError, match="train with drafter.attention_bias=false"):
        MAKERS["transformers"](biased)


@pytest.mark.parametrize(
    ("name", "options"),
    [("dflash", FILL_IN), ("speculators", FILL_IN), ("transformers", FILL_IN), ("dspark", VANILLA)],
)  # fmt: skip
def test_targets_that_scale_embeddings(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Gemma's: engines that read rows unscaled get scaled ones, in fp32."""
    gemma = tiny_target("gemma3_text")
    assert embedding_scale(gemma) == 8
    drafter = block_network(gemma, "taps", whole=True, options=options)
    drafter.to(torch.bfloat16).float()
    write_export(name, drafter, tmp_path / "out", torch.bfloat16)
    verdict = ExportVerdict(name, tmp_path / "out")
    model = tiny_model("gemma3_text", gemma.vocab_size)
    compare_export(drafter, verdict, decode_greedily(drafter, [PROMPT], 8), model)
    assert verdict.exit_code == 0, verdict.lines
    held = read_export(tmp_path / "out")
    if name in ("dflash", "speculators", "dspark"):
        assert held.tensors[EMBEDDING].dtype == torch.float32
        torch.testing.assert_close(held.tensors[EMBEDDING], gemma.embedding_VD * 8)
        found = PublishedDrafter(tmp_path / "out", model).logits(PROMPT)[0]
        assert distance(found, logits_after(drafter, PROMPT)) < 1e-2


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "context", "options", "says"),
    [
        ("dspark", "taps", {**FILL_IN, "markov_rank": 4}, "=anchor_first and drafter.markov=vanilla or linear$"),
        ("dflash", "shared_kv", FILL_IN, "train with drafter.context=taps"),
            ("dflash", "taps", {**FILL_IN, "target_layers": [0, 3]}, "layer 3 is the target's last"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused(
    target: Target, name: str, context: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        MAKERS[name](block_network(target, context, options=options))


def test_unserved_targets_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads with a bias (GPT-J's, Phi's), which two engines add to drafts; embeddings that are normed."""
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    monkeypatch.setattr(target, "head_bias_V", torch.ones(target.vocab_size))
    MAKERS["speculators"](drafter)
    for name in ("dflash", "transformers"):
        with pytest.raises(UserError, match=f"--format {name}: the output head .* has a bias"):
            MAKERS[name](drafter)
    own = target.embed
    monkeypatch.setattr(target, "embed", lambda tokens: F.normalize(own(tokens), dim=-1))
    with pytest.raises(UserError, match="speculators: its target .* normalizes embeddings"):
        MAKERS["speculators"](drafter)


# ---- other engines' folders ----

Maker = Callable[[Target], tuple[dict[str, Any], dict[str, Tensor]]]


def _dspark(kind: str, **changes: Any) -> Maker:
    def make(target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
        held = backbone(target) | markov_tensors(target, kind, 6, target.vocab_size)
        return dspark_config(target, kind, 6, **changes), held

    return make


def _speculators(kind: str, change: float, **changes: Any) -> Maker:
    def make(target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
        held = backbone(target) | pruned(target, change)
        if kind == "dspark":
            held |= markov_tensors(target, "vanilla", 6, len(IDS))
            changes.update(markov_rank=6, markov_head_type="vanilla", enable_confidence_head=False)
        return speculators_config(target, kind, **changes), held

    return make


def _dflash(**changes: Any) -> Maker:
    return lambda target: (dflash_config(target, **changes), backbone(target))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PUBLISHED: dict[str, Maker] = {
    "dflash": _dflash(),
    "dflash, yarn": _dflash(rope_scaling=YARN),
    "dflash, pruned": lambda target: (dflash_config(target), backbone(target) | pruned(target)),
    "dspark vanilla": _dspark("vanilla"),
    "dspark gated": _dspark("gated"),
    "dspark rnn": _dspark("rnn"),
    "speculators": _speculators("dflash", 0.0),
    "speculators, another head": _speculators("dflash", 0.3),
    "speculators dspark": _speculators("dspark", 0.0),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_folders_draft(tmp_path: Path, target: Target, model: Any, kind: str) -> None:
    folder = write(tmp_path / "theirs", *PUBLISHED[kind](target))
    drafter = load_drafter(folder, target)
    assert (drafter.head is not None) == (kind == "speculators, another head")
    save_drafter(drafter, tmp_path / "ours", dtype=torch.float32)
    again = load_drafter(tmp_path / "ours", target)
    assert again.config == drafter.config
    published = PublishedDrafter(folder, model)
    for tokens in (PROMPT, [5, 9], [1, 90, 17, 2, 3, 1, 40, 0, 90]):
        found = published.logits(tokens)[0]
        if (offsets := published.tensors.get("d2t")) is not None:  # rows there are in another order
            found = found[(offsets + torch.arange(len(offsets))).argsort()]
        for one in (drafter, again):
            assert distance(found, logits_after(one, tokens)) < 1e-4
