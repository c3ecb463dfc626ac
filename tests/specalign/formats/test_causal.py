"""A saved autoregressive drafter is an ordinary causal LM."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from align.makers.standalone import adapt
from specalign.common.batch import Batch
from specalign.formats.masked_lm import load_masked_lm, save_masked_lm
from specalign.formats.standalone import save_causal
from specalign.lm.inspection.parts import is_tied
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import causal_drafter as drafter
from tests.target_models import save_with_flag


def test_the_folder_is_an_ordinary_causal_lm(target: Target, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = drafter(target)
    save_causal(made, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, target.embedding_VD)
    weights = model.state_dict()
    for name, weight in made.named_parameters():
        assert torch.equal(weights[name.removeprefix("model.")], weight), name
    assert model.generation_config.eos_token_id == target.model.generation_config.eos_token_id
    text = "Say a word."
    own = AutoTokenizer.from_pretrained(str(tmp_path))
    assert own(text)["input_ids"] == target.tokenizer(text)["input_ids"]
    opened = load_target(str(tmp_path), "float32", "cpu")
    assert opened.chat_tokens(text) == target.chat_tokens(text)
    record = json.loads((tmp_path / "drafter.json").read_text())
    assert (record["kind"], record["block_size"]) == ("autoregressive", 3)
    assert record["layers"] == [0, 3]


@pytest.mark.parametrize(
    ("head", "flag"),
    [("other", True), ("other", False), ("equal", True), ("equal", False), ("none", True)],
)
def test_every_drafter_keeps_its_trained_head(head: str, flag: bool, tmp_path: Path) -> None:
    """Whatever the target's config says of it; p is transformers' own."""
    name = save_with_flag(tmp_path / "target", head, flag)
    target, tokens = load_target(name, "float32"), torch.arange(4, 30)[None]
    stock = AutoModelForCausalLM.from_pretrained(name)(tokens).logits
    torch.testing.assert_close(target.forward(tokens).logits_BLV, stock, atol=1e-4, rtol=1e-4)
    tables = 1 if flag and head != "other" else 2
    assert is_tied(target) == (tables == 1)
    made, batch = drafter(target), Batch(tokens, torch.arange(26)[None], tokens * 0, tokens > 0)
    with torch.no_grad():
        before = made.logits(made(batch))
    save_causal(made, tmp_path / "saved")
    after = load_target(str(tmp_path / "saved"), "float32", fast=False).forward(tokens).logits_BLV
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(tokens).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(opened, before, atol=1e-4, rtol=1e-4)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(
        stored.get("lm_head.weight", stored["model.embed_tokens.weight"]), target.head_weight_VD
    )
    for share in (True, False):
        network = adapt(target, [0, 2], 3, share_embedding=share)
        save_masked_lm(network, tmp_path / f"masked-{share}")
        again = load_masked_lm(tmp_path / f"masked-{share}", target)
        assert torch.equal(again(tokens), network(tokens))
