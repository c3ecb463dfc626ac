"""A target's sizes from its config alone are those of the loaded target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.planning.skeleton import skeleton
from align.target.debug import DEBUG
from align.target.loading import load_target
from tests.target_models import tiny_model, tiny_target
from tests.target_wrappers import save_wrapper, tiny_wrapper

MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 4,
    "num_experts_per_tok": 1, "tie_word_embeddings": False, "max_position_embeddings": 77,
}  # fmt: skip


@pytest.mark.parametrize("spec", DEBUG)
def test_sizes_are_those_of_the_loaded_target(spec: str) -> None:
    found, target = skeleton(spec), load_target(spec, fast=False)
    assert found.parameters == sum(p.numel() for p in target.model.parameters())
    assert found.layers == tuple(sum(p.numel() for p in layer.parameters()) for layer in target.layers)
    assert (found.num_kv_heads, found.head_dim) == (target.num_kv_heads, target.head_dim)
    assert found.kept == sum(shape.numbers for shape in target.anatomy.shapes if shape is not None)
    assert (found.vocab_size, found.hidden_size) == tuple(target.head_weight_VD.shape)
    assert (found.context_limit, found.active, found.tied) == (target.context_limit, found.layers, True)


@pytest.mark.parametrize(
    "name", ["bert", "dots3_note_text", "deepseek_v3", "longcat_flash", "qwen4_exp_text", "mamba2"]
)
def test_a_config_tells_of_every_kind_of_layer(name: str, tmp_path: Path) -> None:
    """Layers within an encoder; settings of each layer; compressed keys beside experts, whose product `meta` does not know, and beside
    some that look for their tokens; an indexer that looks for its keys; no keys."""
    tiny_model(name, 260).config.save_pretrained(tmp_path)
    found, target = skeleton(str(tmp_path)), tiny_target(name)
    assert found.layers == tuple(sum(p.numel() for p in layer.parameters()) for layer in target.layers)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
    )
    assert found.kept == sum(shape.numbers for shape in target.anatomy.shapes if shape is not None)


@pytest.mark.parametrize("kind", ["glm5_next", "qwen3_vl_moe"])
def test_a_model_with_towers_is_measured_whole(tmp_path: Path, kind: str) -> None:
    """An indexer that drops pools of keys by a mask; a text model whose config ties its head, in a whole whose config does not."""
    save_wrapper(tiny_wrapper(kind), tmp_path)
    target = load_target(str(tmp_path), "float32", "cpu", fast=False)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    found = skeleton(str(tmp_path))
    assert found.kept == sum(shape.numbers for shape in target.anatomy.shapes if shape is not None)
    assert found.parameters == sum(p.numel() for p in target.model.parameters())


@pytest.mark.parametrize("kind", ["electra", "git", "longcat_flash", "dots3_note_text"])
def test_layers_are_found_where_the_target_finds_them(tmp_path: Path, kind: str) -> None:
    """In an encoder's place, with parts that attend twice, of layers that differ."""
    model = tiny_model(kind, 260)
    model.config.save_pretrained(tmp_path)
    found = skeleton(str(tmp_path))
    assert found.num_layers == 4
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert 0 < sum(found.layers) < found.parameters


def test_a_config_without_a_number_of_layers_is_one_line(tmp_path: Path) -> None:
    tiny_model("blt", 260).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no attribute 'num_hidden_layers'"):
        skeleton(str(tmp_path))


def test_a_config_alone_suffices(tmp_path: Path) -> None:
    """No weights, no tokenizer; of four experts a token is sent to one."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    found = skeleton(str(tmp_path))
    assert (found.architecture, found.num_layers, found.context_limit, found.weights_here) == (
        "mixtral",
        2,
        77,
        False,
    )
    experts = 4 * 3 * 32 * 64
    assert found.layers[0] - found.active[0] == experts * 3 // 4
    assert found.parameters == sum(found.layers) + 2 * found.embedding + found.last_norm


@pytest.mark.parametrize("kind", ["dbrx", "aria_text"])
def test_experts_are_counted_whatever_their_keys(tmp_path: Path, kind: str) -> None:
    """Of four experts two have a token."""
    model = tiny_model(kind, 260)
    model.config.save_pretrained(tmp_path)
    found = skeleton(str(tmp_path))
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert sum(found.layers) - sum(found.active) == routed // 2


def test_what_can_not_be_had_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        skeleton(str(tmp_path))
    (tmp_path / "config.json").write_text(
        '{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}'
    )
    with pytest.raises(UserError, match="encoder and a decoder"):
        skeleton(str(tmp_path))


def test_a_hub_id_out_of_reach_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("align.target.loading.hub_reachable", lambda: False)
    with pytest.raises(UserError, match=r"owner/nothing.*config\.json.*target\.name=FOLDER"):
        skeleton("owner/nothing")


def test_code_of_its_own_is_asked_for_as_everywhere(tmp_path: Path) -> None:
    own = {"model_type": "other", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps({**MIXTURE, **own}))
    with pytest.raises(UserError, match="code of its own.*trust_remote_code=true"):
        skeleton(str(tmp_path))
