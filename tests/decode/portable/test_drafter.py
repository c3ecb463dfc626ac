"""The exported network drafts what the trained one drafts, for every kind of drafter and several architectures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.engine.decoder import Decoder
from decode.engine.stock import stock_model
from decode.exporting.formats import write_export
from decode.portable.drafter import Drafter
from decode.portable.generate import Text, generate
from decode.proposers.block import BlockProposer
from specalign.formats.block import load_drafter
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_session import BlockSession
from tests.builders import PROMPT, block_network
from tests.published_blocks import IDS, backbone, markov_tensors, pruned, speculators_config, write
from tests.target_drafters import trained_drafter
from tests.target_models import WINDOW, some_text, tiny_model, tiny_target

KINDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "shared": ("shared_kv", True, {}),
    "fill-in, part of the vocabulary": ("shared_kv", False, {"block_layout": "fill_in"}),
    "taps": ("taps", True, {"block_layout": "fill_in"}),
    "silu": ("shared_kv", False, {"markov_rank": 8}),
    "tanh": ("taps", False, {"markov_rank": 8, "markov": "tanh"}),
    "linear": ("shared_kv", True, {"markov_rank": 8, "markov": "linear"}),
    "vanilla": ("taps", True, {"markov_rank": 8, "markov": "vanilla", "confidence_head": True}),
    "gated": ("shared_kv", False, {"markov_rank": 8, "markov": "gated"}),
    "rnn": ("taps", False, {"markov_rank": 8, "markov": "rnn"}),
    "convolution": ("shared_kv", False, {"convolution": True, "block_layout": "fill_in"}),
}


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_networks(tmp_path: Path, target: Target, model: Any, kind: str) -> None:
    context, whole, options = KINDS[kind]
    drafter = block_network(target, context, whole=whole, options={"block_size": 4, **options})
    assert_same(drafter, model, tmp_path / "out", [PROMPT, [5, 9, 200, 31, 8, 77, 140]])


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_another_engines_drafter(tmp_path: Path, target: Target, model: Any, kind: str) -> None:
    """With its own angles and their scale, its own rows of the head and a bias beside its Markov head."""
    heads = {**pruned(target, 0.3), **markov_tensors(target, kind, 6, len(IDS))}
    words = {"markov_rank": 6, "markov_head_type": kind, "enable_confidence_head": False}
    config = speculators_config(target, "dspark", **words)
    config["transformer_layer_config"]["rope_scaling"] = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128
    }  # fmt: skip
    drafter = load_drafter(write(tmp_path / "theirs", config, backbone(target) | heads), target)
    assert drafter.head is not None and drafter.config.markov_bias
    assert drafter.config.rotaries[0].scale > 1
    assert_same(drafter, model, tmp_path / "out", [PROMPT, [5, 9, 200, 31, 8, 77, 140]])


@pytest.mark.parametrize(
    ("architecture", "context"),
    [
        ("gemma3_text", "taps"),  # sliding layers, a scale in the embedding
        ("phi", "shared_kv"),  # turned in part
        ("glm4", "shared_kv"),  # in neighbouring pairs
        ("gpt2", "shared_kv"),  # learned positions
        ("deepseek_v32", "taps"),  # an indexer's keys beside the others in the cache
    ],
)
def test_architectures(tmp_path: Path, architecture: str, context: str) -> None:
    target = tiny_target(architecture)
    texts = [some_text(target, WINDOW + 16, seed)[0].tolist() for seed in range(2)]
    drafter = trained_drafter(target, texts, context, steps=2, layers=2)
    assert_same(drafter, tiny_model(architecture, target.vocab_size), tmp_path / "out", [texts[0]])


def assert_same(
    drafter: BlockDrafter, model: Any, out: Path, prompts: list[list[int]], new: int = 9
) -> None:
    """As many calls as ours, every draft is ours, and outputs are plain ones."""
    write_export("custom_generate", drafter, out, torch.float32, "")
    ours = Decoder(drafter.target, BlockProposer(drafter, tree_nodes=0))
    for prompt in prompts:
        wanted, passes = ours.generate(prompt, max_new_tokens=new), list[int]()
        handle = model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        found = generate(
            model,
            torch.tensor([prompt]),
            drafter=str(out),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        handle.remove()
        assert found[0, len(prompt) :].tolist() == wanted.tokens
        assert len(passes) == 1 + len(wanted.accepted)
        assert drafts_of(Drafter(out, model), model, prompt) == drafts_here(drafter, prompt)


@torch.no_grad()
def drafts_of(drafter: Drafter, model: Any, tokens: list[int]) -> list[int]:
    """What it drafts after the last of the tokens."""
    text = Text(model, drafter, torch.tensor([tokens[:-1]]))
    text.logits(100)
    text.take(tokens[-1])
    text.logits(100)
    return text.drafts


def drafts_here(drafter: BlockDrafter, tokens: list[int]) -> list[int]:
    target = drafter.target
    cache = target.new_cache(1, len(tokens) + 16)
    session = BlockSession(drafter, cache, len(tokens) + 16)
    out = target.forward(torch.tensor([tokens[:-1]]), cache=cache, taps=session.taps)
    session.observe(out.hidden_BLD, out.taps_BLFD, len(tokens) - 1)
    hidden_KD, token, found = session.draft_hidden(tokens[-1]), tokens[-1], list[int]()
    inputs_Kr = session.bias_inputs(hidden_KD)
    for k, row in enumerate(drafter.logits(hidden_KD)):
        if inputs_Kr is not None:
            row = row + session.bias(inputs_Kr[k], torch.tensor([token]))[0]
        best = row.argmax()
        token = int(best if drafter.draft_vocab is None else drafter.draft_vocab[best])
        found.append(token)
    return found


def test_models_of_another_shape_are_refused(tmp_path: Path, target: Target) -> None:
    drafter = block_network(target, "shared_kv")
    write_export("custom_generate", drafter, tmp_path / "out", torch.float32, "")
    with pytest.raises(ValueError, match="whose vocab_size is"):
        Drafter(tmp_path / "out", tiny_model("llama", 300))
    deeper = tiny_model("llama", target.vocab_size)
    deeper.config.num_hidden_layers += 1
    with pytest.raises(ValueError, match="whose num_target_layers is"):
        Drafter(tmp_path / "out", deeper)
    other = tiny_model("llama", target.vocab_size, num_key_value_heads=4)
    words: dict[str, Any] = {"drafter": str(tmp_path / "out"), "max_new_tokens": 4}
    with pytest.raises(ValueError, match="whose num_key_value_heads is 2, not 4"):
        generate(other, torch.tensor([PROMPT]), **words, pad_token_id=0)
