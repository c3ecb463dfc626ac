"""The target: forwards with a cache equal forwards without one, taps are the right layers, specs fail in one line."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from decode.engine.decoder import Decoder
from decode.proposers.lookup import LookupProposer
from specalign.common.batch import Batch
from specalign.common.errors import UserError
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from specalign.models.target_features import target_features
from tests.builders import shallow_target
from tests.target_models import generated, some_text, tiny_config, tiny_model


def test_forward_equals_transformers_own(target: Target) -> None:
    """Against the model under transformers' own attention and unpacked layers: an independent path."""
    plain = load_target("debug", fast=False)
    plain.model.set_attn_implementation("eager")
    tokens = some_text(target, 66).view(2, 33)
    with torch.no_grad():
        reference = plain.model(tokens, output_hidden_states=True)
    output = target.forward(tokens, taps=(0, 2))
    torch.testing.assert_close(output.logits_BLV, reference.logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(output.hidden_BLD, reference.hidden_states[-1], atol=2e-5, rtol=1e-5)
    assert output.taps_BLFD is not None
    for column, layer in enumerate((0, 2)):  # id i is hidden_states[i + 1]
        found, expected = output.taps_BLFD[:, :, column], reference.hidden_states[layer + 1]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["shared_kv", "taps"])
def test_compiled_layers_are_whole_graphs_of_the_same_numbers(context: str) -> None:
    """Of packed rows, as in training and then in validation; on a GPU Inductor takes these graphs."""
    torch._dynamo.reset()  # other tests' layers count as recompilations
    target = shallow_target(2, fast=False)
    config: Any = SimpleNamespace(context=context, target_layer_ids=[0, 1])
    batches = []
    for rows, length in ((2, 40), (2, 40), (1, 33)):
        tokens = some_text(target, rows * length).view(rows, length)
        positions = torch.arange(length).expand(rows, -1)
        document = (torch.arange(length) > length // 2).long().expand(rows, -1)
        batches.append(Batch(tokens, positions, document, torch.ones_like(tokens).bool()))
    wanted = [target_features(target, batch, config) for batch in batches]
    target.compile_layers(backend="eager", fullgraph=True)
    for batch, features in zip(batches, wanted, strict=True):
        found = target_features(target, batch, config)
        assert all(map(torch.equal, found.tensors, features.tensors))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def put_in_front(tokenizer: Any, token: str) -> None:
    """Have the tokenizer begin every text with this token."""
    first = (token, tokenizer.convert_tokens_to_ids(token))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[first]
    )


def test_a_base_model_gets_plain_text_as_its_tokenizer_begins_it(target: Target) -> None:
    base = load_target("debug")
    base.tokenizer.chat_template = None
    plain = base.chat_tokens("hi")
    assert base.detokenize(plain) == "hi" and plain[0] != base.tokenizer.bos_token_id
    put_in_front(base.tokenizer, base.tokenizer.bos_token)
    assert base.chat_tokens("hi") == [base.tokenizer.bos_token_id, *plain]
    assert len(target.chat_tokens("hi")) > len(plain) + 1


def test_a_text_of_tokens_that_the_model_has_not_is_one_line() -> None:
    """Tokenizers know more than some models' embeddings: Gemma 3 1B's one more, an image's."""
    tokenizer = load_target("debug").tokenizer
    small = prove_target(tiny_model("llama", 90), tokenizer, ModelSource("small"))
    small.tokenizer.chat_template = "{{ messages[0].content }}"
    rows = "but its embedding has 90 rows"
    for read in (small.text_tokens, small.chat_tokens):
        with pytest.raises(UserError, match=f"'z' to token 93, {rows}: remove it"):
            read("tz")
    small.tokenizer.chat_template = None
    put_in_front(small.tokenizer, "z")
    with pytest.raises(UserError, match=f"maps 'z' to token 93, {rows}"):
        small.text_tokens("t")


def test_gpt_neo_takes_chains_alone() -> None:
    """Its local layers window by place in memory; within the window a tree is each branch alone, beyond it is refused."""
    target = load_target("debug-gptneo", dtype="float32", device="cpu")
    assert target.chains_only and not load_target("debug-gpt2").chains_only
    tokens = torch.randint(4, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    whole = target.model(tokens).logits
    cache = target.new_cache(1, 320)
    target.forward(tokens[:, :280], cache=cache)
    parts = tokens[:, 280:].split([1, 5, 14], dim=1)
    found = [target.forward(part, cache=cache).logits_BLV for part in parts]
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 280:], atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]


def test_a_text_ends_with_the_first_rotary_table() -> None:
    """longrope's second table would change the keys of the tokens before it."""
    config = tiny_config("phi3", 260)
    config.original_max_position_embeddings = 50
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.7 * i for i in range(8)], "original_max_position_embeddings": 50,
    }  # fmt: skip
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = transformers.Phi3ForCausalLM(config).eval()
    tokenizer = debug_model("Llama")[1]
    target = prove_target(copy.deepcopy(own), tokenizer, ModelSource("phi3"))
    assert target.context_limit == 50
    prompt = [*some_text(target, 20)[0].tolist()] * 2
    wanted = generated(own, target, prompt, 10)
    for drafter in (None, LookupProposer(6)):
        found = Decoder(target, drafter).generate(prompt, max_new_tokens=30).tokens
        assert found == wanted
