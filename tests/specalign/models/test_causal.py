"""Autoregressive drafters out of the target's layers: what training computes is what decoding drafts; an ordinary folder."""

from pathlib import Path

import pytest
import torch

from specalign.formats.standalone import save_causal
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import causal_drafter as drafter
from tests.builders import packed_batch as batch


def test_any_causal_lm_of_the_vocabulary_may_start_it(target: Target, tmp_path: Path) -> None:
    """With an embedding and a head of its own, which stay as they are and are saved."""
    first = drafter(target)
    first._own = [first.embedding_VD + 0.01, first.head_weight_VD + 0.01]
    save_causal(first, tmp_path / "a")
    made = drafter(target, str(tmp_path / "a"))
    assert not made.has_targets_head
    save_causal(made, tmp_path / "b")
    opened = load_target(str(tmp_path / "b"), "float32", "cpu", fast=False)
    assert torch.equal(opened.embedding_VD, first.embedding_VD)
    rows = batch(target)
    with torch.no_grad():
        found = made.logits(made(rows))[1:]
    expected = opened.forward(rows.tokens_BL[1:]).logits_BLV
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["debug", "debug-gpt2", "debug-qwen2"])
def test_training_computes_what_decoding_computes(name: str, tmp_path: Path) -> None:
    """At every place of packed rows: the saved folder, opened as any causal LM, over that document alone."""
    target = load_target(name, dtype="float32", device="cpu")
    made = drafter(target)
    save_causal(made, tmp_path)
    rows = batch(target)
    with torch.no_grad():
        found = made.logits(made(rows))
    opened = load_target(str(tmp_path), "float32", "cpu")
    # a document that does not begin its row; a whole row
    for b, first, last in ((0, 9, 17), (1, 0, 20)):
        alone = opened.forward(rows.tokens_BL[b : b + 1, first:last]).logits_BLV
        torch.testing.assert_close(found[b : b + 1, first:last], alone, atol=1e-4, rtol=1e-3)
