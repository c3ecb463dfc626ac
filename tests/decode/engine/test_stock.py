"""A target as transformers runs it."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from decode.engine.decoder import Decoder
from decode.engine.stock import stock_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import PROMPT
from tests.target_models import asking_target, tiny_target


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_the_stock_model_has_the_attention_that_its_architecture_has(
    kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(kind)
    monkeypatch.setattr("decode.engine.stock.reload", lambda *_, **__: target)
    assert stock_model(target).config._attn_implementation == attention


def test_the_stock_model_writes_by_the_models_own_p(tmp_path: Path, target: Target) -> None:
    """Whatever its generation config asks for; texts end where it says."""
    tokens = Decoder(target).generate(PROMPT, max_new_tokens=12).tokens
    end = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    asks = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "num_beams": 2}
    asks |= {"suppress_tokens": tokens[:1], "min_new_tokens": 12}
    folder = asking_target(tmp_path, target, eos_token_id=[tokens[end], 3], **asks)
    ids = torch.tensor([PROMPT])
    for words in ({"do_sample": False}, {"generation_config": GenerationConfig(do_sample=False)}):
        model = stock_model(load_target(folder, "float32", "cpu"))
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **words)
        assert found[0, len(PROMPT) :].tolist() == tokens[: end + 1]
