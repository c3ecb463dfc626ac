"""A compiled target says what the target says, and is compiled once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from decode.engine.decoder import Decoder
from decode.engine.stock import compiled, stock_model
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import PROMPT
from tests.target_models import asking_target, tiny_target


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["debug", "debug-gpt2", "debug-gptneo", "debug-qwen2"])
def test_compiled_layers_are_one_program(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say what the model says, and no prompt or length after the first ones is compiled anew. Traced, with torch's own
    operators in place of C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = load_target(spec, dtype="float32", device="cpu")
    twin = compiled(plain)
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= programs <= 5  # for lengths, not for each of the four layers
    generator = torch.Generator().manual_seed(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ((3, 1, 1, 1), (80, 90, 1, 1), (17, 4, 1), (2, 1), (70, 7, 65, 1)):
            caches = [one.new_cache(1, sum(lengths) + 3) for one in (plain, twin)]
            for length in lengths:
                tokens = torch.randint(4, 200, (1, length), generator=generator)
                expected, found = (
                    one.forward(tokens, cache=cache).logits_BLV
                    for one, cache in zip((plain, twin), caches, strict=True)
                )
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_compiled() -> None:
    plain = load_target("debug", dtype="float32", device="cpu")
    try:
        twin = compiled(plain)
    except UserError as error:
        pytest.skip(str(error))
    tokens = torch.randint(4, 200, (1, 30), generator=torch.Generator().manual_seed(0))
    outputs = []
    for one in (plain, twin):
        cache = one.new_cache(1, 40)
        outputs.append(
            [one.forward(part, cache=cache).logits_BLV for part in tokens.split([28, 1, 1], dim=1)]
        )
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_the_stock_model_has_the_attention_that_its_architecture_has(
    kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(kind)
    monkeypatch.setattr("decode.engine.compiled.reload", lambda *_, **__: target)
    assert stock_model(target).config._attn_implementation == attention


def test_the_stock_model_writes_by_the_models_own_p(tmp_path: Path, target: Target) -> None:
    """Whatever its generation config asks for; texts end where it says."""
    tokens = Decoder(target).generate(PROMPT, max_new_tokens=12).tokens
    end = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    asks = {
        "repetition_penalty": 1.8,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": tokens[:1],
        "num_beams": 2,
    }
    folder = asking_target(
        tmp_path, target, eos_token_id=[tokens[end], 3], min_new_tokens=12, **asks
    )
    ids = torch.tensor([PROMPT])
    for words in ({"do_sample": False}, {"generation_config": GenerationConfig(do_sample=False)}):
        model = stock_model(load_target(folder, "float32", "cpu"))
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **words)
        assert found[0, len(PROMPT) :].tolist() == tokens[: end + 1]
