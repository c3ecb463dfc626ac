"""p is the model's own, or it is refused in one line."""

import pytest
import torch

from specalign.common.errors import UserError
from specalign.lm import masks
from specalign.lm.debug import debug_model
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from specalign.lm.slabs import IndexedSlab
from tests.target_models import some_text, tiny_model, tiny_target


def test_tokens_that_a_model_never_writes_have_no_probability() -> None:
    """The padding of Inkling's vocabulary."""
    never = range(250, 260)
    target, own = tiny_target("inkling_text"), tiny_model("inkling_text", 260)
    tokens = some_text(target, 40)
    p = target.forward(tokens).logits_BLV.softmax(-1)
    with torch.no_grad():
        wanted = own(tokens).logits.softmax(-1)
    torch.testing.assert_close(p[..., : wanted.shape[-1]], wanted, rtol=1e-4, atol=1e-6)
    assert not p[..., list(never)].any() and target.never_V.nonzero()[:, 0].tolist() == [*never]
    hidden = target.forward(tokens).hidden_BLD
    product, columns = hidden @ target.head_weight_VD.T, torch.arange(1, 260, 3)
    assert target.finish is not None
    logits = target.head(hidden)
    torch.testing.assert_close(target.finish(product, None), logits)
    finished = target.finish(product[..., columns], columns)
    torch.testing.assert_close(finished, logits[..., columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "says"),
    [("recurrent_gemma", "(a rejected draft changes .*: it keeps a state outside|its logits differ)"), ("openai-gpt", "it does not use a cache")],
)  # fmt: skip
def test_states_outside_the_cache_are_refused(kind: str, says: str, dtype: torch.dtype) -> None:
    """In 16 bits their differences from the model's own pass for rounding: 0.16 and 0.14 standard deviations."""
    model = tiny_model(kind, 260).to(dtype)
    with pytest.raises(UserError, match=f"'{kind}' failed the exactness check: {says}"):
        prove_target(model, debug_model("Llama")[1], ModelSource("mine"))


def test_a_model_that_scales_by_a_key_of_its_own_is_refused() -> None:
    target, model = tiny_target("granite"), tiny_model("granite", 260)
    plain = model.forward

    def scaled(*args, **kwargs):  # type: ignore[no-untyped-def]
        output = plain(*args, **kwargs)
        output.logits = output.logits * 0.7
        return output

    model.forward = scaled
    with pytest.raises(UserError, match="exactness check: its logits are not its head's"):
        prove_target(model, target.tokenizer, ModelSource("mine"))


def test_an_attention_that_is_not_the_models_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss without its sinks: the model's own attention is used instead, with our masks."""
    right = masks.biased_attention
    without_sinks = lambda q, k, v, m, s, cap, sinks: right(q, k, v, m, s, cap, None)  # noqa: E731
    monkeypatch.setattr(masks, "biased_attention", without_sinks)
    assert tiny_target("gpt_oss").attention == "its own, eager"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    model, tokenizer = debug_model("Llama")
    with torch.no_grad():
        model.model.norm.weight[3] = value
    with pytest.raises(UserError, match="target 'x': its logits are NaN or infinite"):
        prove_target(model, tokenizer, ModelSource("x"))


def test_an_indexer_that_does_not_choose_so_few_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys written elsewhere change nothing as long as all are chosen: 2,048 in a real model, of the proof's 14."""
    target = tiny_target("deepseek_v32", index_topk=2048)
    assert target.layers[0].self_attn.indexer.index_topk == 2048

    def shifted(self: IndexedSlab, new: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.index[:, :, 1 : self.owner.length + 1], new), 2)

    monkeypatch.setattr(IndexedSlab, "update_index", shifted)
    with pytest.raises(UserError, match="with a cache, its logits differ"):
        tiny_target("deepseek_v32", index_topk=2048)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("xlstm", "is not supported: it uses a custom cache class"),
        ("bert", "failed the exactness check: its logits are not its head's output"),
    ],
)
def test_unsupported_architectures_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"^target '{kind}': architecture '{kind}' {reason}"):
        tiny_target(kind)
