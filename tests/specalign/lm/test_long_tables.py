"""A rotary table that changes with the length: every token is the model's own under the table of its own length."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from align.config.parser import load_recipe
from align.writing.generation import Writer
from align.writing.rows import Plan
from align.writing.template import chat_template
from decode.engine.decoder import Decoder
from decode.proposers.lookup import LookupDrafter
from specalign.lm.debug import debug_model
from specalign.lm.long_tables import switch_length
from specalign.lm.proof import prove_target
from specalign.lm.source import ModelSource
from tests.target_models import generated, some_text, tiny_config

SWITCH, NEW = 50, 30


def tables(kind: str) -> tuple[Any, Any]:
    """A random model whose table changes after 50 tokens, as transformers runs it, and as a target."""
    config = tiny_config(kind, 260)
    config.original_max_position_embeddings = SWITCH
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8, "short_mscale": 1.0,
        "long_factor": [1.0 + 0.7 * i for i in range(8)], "long_mscale": 1.2, "original_max_position_embeddings": SWITCH,
    }  # fmt: skip
    config._attn_implementation = "eager"
    architecture = {
        "llama": "LlamaForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "phimoe": "PhimoeForCausalLM",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own: Any = getattr(transformers, architecture[kind])(config).eval()
    return own, prove_target(copy.deepcopy(own), debug_model("Llama")[1], ModelSource(kind))


@pytest.fixture(scope="module", params=["llama", "phi3", "phimoe"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return tables(request.param)


@torch.no_grad()
def test_each_token_is_under_the_table_of_its_length(pair: tuple[Any, Any]) -> None:
    """Pieces, drafts and a tree about the length, all rolled back to in front of it and gone over once more."""
    own, target = pair
    tokens = some_text(target, 60, 4)
    wanted = torch.cat([own(tokens[:, : i + 1]).logits[:, -1] for i in range(60)])
    other = torch.cat((tokens[:, :48], (tokens[:, 48:] + 1) % 260), 1)
    branch = torch.cat([own(other[:, : i + 1]).logits[:, -1] for i in range(60)])
    cache = target.new_cache(1, 70)

    def go(start: int, end: int) -> None:
        found = target.forward(tokens[:, start:end], cache=cache).logits_BLV[0]
        torch.testing.assert_close(found, wanted[start:end], atol=1e-4, rtol=1e-4)

    go(0, 45)
    go(45, 53)
    cache.length = 48
    # two branches of three, side by side: each crosses the length
    nodes = torch.stack((tokens[0, 48:51], other[0, 48:51]), 1).reshape(1, 6)
    steps = torch.arange(6)
    see_LL = (steps[:, None] % 2 == steps % 2) & (steps <= steps[:, None])
    found = target.forward(nodes, cache=cache, see_LL=see_LL).logits_BLV[0]
    torch.testing.assert_close(found[0::2], wanted[48:51], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1::2], branch[48:51], atol=1e-4, rtol=1e-4)
    cache.keep(48, [0, 2])
    go(50, 60)
    cache.length = 20
    for start, end in ((20, 49), (49, 50), (50, 51), (51, 60)):
        go(start, end)


def test_outputs_cross_the_length(pair: tuple[Any, Any]) -> None:
    """Plain, drafted and in a batch, whose other requests are on the other side of the length; Phi-3's `generate` drops its cache there too."""
    own, target = pair
    prompts = [some_text(target, length, length)[0].tolist() for length in (20, 38, 47, 56)]
    prompts = [prompt + prompt[:4] for prompt in prompts]
    plain = [Decoder(target).generate(p, max_new_tokens=NEW).tokens for p in prompts]
    decoder = Decoder(target, LookupDrafter(4))
    assert [decoder.generate(p, max_new_tokens=NEW).tokens for p in prompts] == plain
    for drafted in (Decoder(target), decoder):
        batch = drafted.generate_batch(prompts, batch_size=4, max_new_tokens=NEW)
        assert [output.tokens for output in batch] == plain
    if own.config.model_type == "llama":  # its own keeps keys of the other table
        return
    for prompt, written in zip(prompts, plain, strict=True):
        assert generated(own, target, prompt, NEW) == written


def test_written_rows_end_in_front_of_it(pair: tuple[Any, Any]) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.max_answer_tokens=400"])
    plan = Plan(recipe, pair[1], chat_template(pair[1]), None)
    assert Writer(pair[1], plan).capacity == SWITCH


def test_no_switch_where_the_context_ends_before() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    assert switch_length(SimpleNamespace(rope_parameters=rope), 512) is None
    assert switch_length(SimpleNamespace(rope_parameters=None), 512) is None
    several = {"a": rope, "b": {**rope, "original_max_position_embeddings": 64}}
    assert switch_length(SimpleNamespace(rope_parameters={"b": several["b"]}), 512) == 64
    with pytest.raises(NotImplementedError, match="several lengths"):
        switch_length(SimpleNamespace(rope_parameters=several), 1024)
