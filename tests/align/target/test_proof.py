"""p is the model's own, or it is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.target import interface
from align.target.debug import debug_model
from align.target.proof import prove_target
from align.target.slabs import IndexedSlab
from align.target.source import ModelSource
from decode.generate import how_it_runs
from tests.target_models import some_text, tiny_model, tiny_target
from tests.target_wrappers import tiny_wrapper


@pytest.mark.parametrize(
    ("made", "never"),
    [(lambda: tiny_wrapper("chameleon"), range(200, 204)), (lambda: tiny_model("inkling_text", 260), range(250, 260))],
)  # fmt: skip
def test_tokens_that_a_model_never_writes_have_no_probability(made: Any, never: range) -> None:
    """Chameleon's images, masked behind its head; the padding of Inkling's vocabulary, cut off there."""
    target, own = prove_target(made(), debug_model("Llama")[1], ModelSource("mine")), made()
    tokens = some_text(target, 40)
    p = target.forward(tokens).logits_BLV.softmax(-1)
    with torch.no_grad():
        wanted = own(tokens).logits.softmax(-1)
    torch.testing.assert_close(p[..., : wanted.shape[-1]], wanted, rtol=1e-4, atol=1e-6)
    assert not p[..., list(never)].any() and target.never_V.nonzero()[:, 0].tolist() == [*never]
    hidden = target.forward(tokens).hidden_BLD
    product, columns = hidden @ target.head_weight_VD.T, torch.arange(1, 260, 3)
    assert target.finish is not None
    for some in (None, columns):
        finished = target.finish(product if some is None else product[..., some], some)
        torch.testing.assert_close(finished, target.head(hidden)[..., slice(None) if some is None else some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "says"),
    [("recurrent_gemma", "a rejected draft changes .*: it keeps a state outside"), ("openai-gpt", "it keeps nothing in a cache")],
)  # fmt: skip
def test_a_state_that_no_cache_holds_is_refused_however_coarsely_it_rounds(
    kind: str, says: str, dtype: torch.dtype
) -> None:
    """In 16 bits their differences from the model's own pass for rounding: 0.16 and 0.14 standard deviations."""
    model = tiny_model(kind, 260).to(dtype)
    with pytest.raises(UserError, match=f"architecture '{kind}' can't be run exactly: {says}"):
        prove_target(model, debug_model("Llama")[1], ModelSource("mine"))


def test_a_model_that_scales_by_a_key_of_its_own_is_refused() -> None:
    target, model = tiny_target("granite"), tiny_model("granite", 260)
    plain = model.forward

    def scaled(*args, **kwargs):  # type: ignore[no-untyped-def]
        output = plain(*args, **kwargs)
        output.logits = output.logits * 0.7
        return output

    model.forward = scaled
    with pytest.raises(
        UserError, match="architecture 'granite' can't be run exactly: its logits are not its head's"
    ):
        prove_target(model, target.tokenizer, ModelSource("mine"))


@pytest.mark.parametrize(("kind", "reads"), [("kimi_k25", {5: 0}), ("gemma4", {5: 2}), ("mistral3", {})])
def test_placeholders_of_images_are_read_as_the_model_reads_them(kind: str, reads: dict[int, int]) -> None:
    """As padding, as token 0, as themselves; alone and through a cache."""
    tokenizer, own = debug_model("Llama")[1], tiny_wrapper(kind)
    target = prove_target(tiny_wrapper(kind), tokenizer, ModelSource(kind))
    assert (target.stand_ins, target.unproved) == (reads, ())
    tokens = torch.tensor([[40, 5, 90, 91, 5, 5, 17]])
    with torch.no_grad():
        wanted = own(input_ids=tokens).logits
    cache = target.new_cache(1, 7)
    parts = [target.forward(part, cache=cache).logits_BLV for part in tokens.split([4, 3], dim=1)]
    found = torch.cat([part for part in parts if part is not None], dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_a_placeholder_of_another_kind_is_said() -> None:
    model, tokenizer = tiny_wrapper("mistral3"), debug_model("Llama")[1]
    plain = model.forward

    def shifted(input_ids, **kwargs):  # type: ignore[no-untyped-def]
        output = plain(input_ids=input_ids, **kwargs)
        output.logits = output.logits + (input_ids == 5).any()
        return output

    model.forward = shifted
    target = prove_target(model, tokenizer, ModelSource("mine"))
    assert (target.stand_ins, target.unproved) == ({}, (5,))
    assert "p is not the model's after its placeholders 5" in how_it_runs(target)


def test_a_model_that_asks_for_an_image_says_what_it_is() -> None:
    says = (
        "architecture 'blip-2' does not run on text alone .it is a Blip2ForConditionalGeneration.: TypeError"
    )
    with pytest.raises(UserError, match=says):
        prove_target(tiny_wrapper("blip-2"), debug_model("Llama")[1], ModelSource("mine"))


def test_an_attention_that_is_not_the_models_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss without its sinks: the model's own attention is used instead, with our masks."""
    right = interface.biased_attention
    monkeypatch.setattr(
        interface, "biased_attention", lambda q, k, v, m, s, cap, sinks: right(q, k, v, m, s, cap, None)
    )
    assert tiny_target("gpt_oss").attention == "its own, eager"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    model, tokenizer = debug_model("Llama")
    with torch.no_grad():
        model.model.norm.weight[3] = value
    with pytest.raises(UserError, match="target 'x': its logits are NaN or infinite"):
        prove_target(model, tokenizer, ModelSource("x"))


def test_a_scale_in_front_of_the_head_is_part_of_p() -> None:
    """MiniCPM3's last states are divided before its head sees them."""
    target = tiny_target("minicpm3")
    tokens = some_text(target, 20)
    own = tiny_model("minicpm3", target.vocab_size)
    assert target.logit_form.scale == own.config.logits_scaling**-1 != 1
    torch.testing.assert_close(target.forward(tokens).logits_BLV, own(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_head_over_states_of_another_width_is_refused_with_both() -> None:
    with pytest.raises(UserError, match="its head reads states of width 128, its layers write 64"):
        tiny_target("electra", embedding_size=128)


def test_a_model_that_reads_in_both_directions_is_told_from_one_that_does_not() -> None:
    """BERT, unless its config makes it a decoder."""
    assert tiny_target("bert").attention == "grouped"
    with pytest.raises(UserError, match="it reads a text in both directions .config.json: is_decoder=false."):
        tiny_target("bert", is_decoder=False)


def test_an_indexer_that_does_not_choose_so_few_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys written elsewhere change nothing as long as all are chosen: 2,048 in a real model, of the proof's 14."""
    assert tiny_target("deepseek_v32", index_topk=2048).layers[0].self_attn.indexer.index_topk == 2048
    monkeypatch.setattr(
        IndexedSlab,
        "update_index",
        lambda self, new: torch.cat((self.index[:, :, 1 : self.owner.length + 1], new), 2),
    )
    with pytest.raises(UserError, match="through a cache its logits differ"):
        tiny_target("deepseek_v32", index_topk=2048)
