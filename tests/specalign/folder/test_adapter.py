"""Folders of LoRA adapters: merged into their base on loading, or one line that says why not; never the base alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from align.config.parser import load_recipe
from align.planning.target_sizes import read_target_sizes
from align.writing.outline import _small_files, outline
from specalign.common.errors import UserError
from specalign.folder import adapter
from specalign.folder.adapter import CONFIG, adapter_of, merge_adapter
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.names import check_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base in `base`, an adapter of it in `adapter`, and what both make together in `logits.pt`."""
    model, tokenizer = debug_model("Llama")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    changed = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for name, weight in changed.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    changed.save_pretrained(tmp_path / "adapter")
    write(tmp_path, base_model_name_or_path=str(tmp_path / "base"))
    tokens = torch.arange(4, 30)[None]
    torch.save((tokens, changed.merge_and_unload()(tokens).logits), tmp_path / "logits.pt")
    return tmp_path


def write(folder: Path, **values: Any) -> None:
    path = folder / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check_merged(folder: Path) -> Any:
    name = str(folder / "adapter")
    check_name(name)
    target = load_target(name, dtype="float32", fast=False)
    tokens, logits = torch.load(folder / "logits.pt")
    torch.testing.assert_close(target.forward(tokens).logits_BLV, logits, atol=1e-4, rtol=1e-4)
    assert read_target_sizes(name).parameters == read_target_sizes(str(folder / "base")).parameters
    assert _small_files(name, None) == folder / "base"
    return target


@pytest.mark.parametrize("beside", ["nothing", "a whole model"])
def test_an_adapter_is_merged_into_its_base(beside: str, folder: Path) -> None:
    for path in () if beside == "nothing" else (folder / "base").iterdir():
        if beside != "config.json" or path.name == "config.json":
            shutil.copy(path, folder / "adapter")
    check_merged(folder)


def test_a_base_may_be_named_from_the_adapters_folder(folder: Path) -> None:
    write(folder, base_model_name_or_path="../base", revision="main")
    found = adapter_of(folder / "adapter", "m")
    assert found is not None and found.revision == "main"
    check_merged(folder)


def test_its_own_chat_template_counts_without_a_tokenizer(folder: Path) -> None:
    (folder / "adapter" / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    assert len(check_merged(folder).chat_tokens("ab")) == 2
    recipe = load_recipe(["recipe=debug_block", f"target.name={folder / 'adapter'}"])
    assert len(outline(recipe).chat_tokens("ab")) == 2


def test_its_own_generation_config_counts(folder: Path) -> None:
    path = folder / "adapter" / "generation_config.json"
    path.write_text('{"eos_token_id": [7, 9]}')
    assert check_merged(folder).eos_ids == (7, 9)
    assert outline(
        load_recipe(["recipe=debug_block", f"target.name={folder / 'adapter'}"])
    ).eos_ids == (7, 9)
    path.write_text('{"temperature": 0.5}')
    assert (
        check_merged(folder).eos_ids
        == load_target(str(folder / "base"), "float32", fast=False).eos_ids
    )
    path.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(
        UserError, match=r"generation_config\.json: eos_token_id: .* is no token's id"
    ):
        load_target(str(folder / "adapter"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"base_model_name_or_path": None}, "base_model_name_or_path=None names no model: name its base there, or merge"),
        ({"base_model_name_or_path": "owner/none"}, "an adapter of 'owner/none', which is unavailable: target 'owner/none'"),
        ({"peft_type": "PROMPT_TUNING"}, "of peft_type=PROMPT_TUNING, which can't be merged"),
    ],
)  # fmt: skip
def test_what_can_not_be_merged_is_one_line(
    values: dict[str, Any], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specalign.lm.loading.hub_reachable", lambda: False)
    write(folder, **values)
    with pytest.raises(UserError, match=says):
        load_target(str(folder / "adapter"))


@pytest.mark.parametrize("damage", ["renamed", "cut", "one lacks"])
def test_weights_that_do_not_fit_are_never_passed_over(damage: str, folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    if damage == "one lacks":
        weights.pop(next(iter(weights)))
    elif damage == "renamed":
        weights = {name.replace("q_proj", "x_proj"): weight for name, weight in weights.items()}
    else:
        weights = {name: weight[:, :3].contiguous() for name, weight in weights.items()}
    save_file(weights, path)
    with pytest.raises(UserError, match="an adapter of '.*base' that can't be merged into it: "):
        load_target(str(folder / "adapter"))


def test_without_weights_or_peft_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match="needs the package peft: pip install .*; or merge it .peft: merge_and_unload",
    ):
        check_name(str(folder / "adapter"))
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="an adapter of '.*base' without its weights"):
        check_name(str(folder / "adapter"))
    assert adapter_of(folder / "base", "m") is None and callable(merge_adapter)


def write_grown(folder: Path, tied: bool, **options: Any) -> None:
    """An adapter of a base with one token less, with its tokenizer."""
    model, tokenizer = debug_model("Llama")
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        changed = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **options))
        for name, weight in changed.named_parameters():
            if "lora_B" in name or "modules_to_save" in name or "token" in name:
                torch.nn.init.normal_(weight, std=0.1)
    changed.peft_config["default"].base_model_name_or_path = str(folder / "base")
    changed.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}, {"trainable_token_indices": [259, 260]}],
)
def test_an_adapter_of_embedding_or_head_is_refused(
    options: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    write_grown(tmp_path, tied, **options)
    with pytest.raises(UserError, match="changes the embedding or the head; merge it"):
        load_target(str(tmp_path / "adapter"))
