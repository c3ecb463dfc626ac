"""Targets from folders, names and files, and what is wrong with those that don't load."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.common.errors import UserError
from align.target.loading import load_target, load_tokenizer
from align.target.model import Target


def test_folder_in_hub_layout_gives_the_same_model(target: Target, tmp_path: Path) -> None:
    plain = load_target("debug", fast=False)
    plain.model.save_pretrained(tmp_path)
    plain.tokenizer.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32")
    tokens = torch.arange(4, 20)[None]
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, target.forward(tokens).logits_BLV)
    assert loaded.hash == load_target(str(tmp_path), dtype="float32").hash
    assert loaded.eos_ids == target.eos_ids


def test_broken_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="can't be loaded"):
        load_target(str(tmp_path))
    for cut, says in (
        (None, "lacks 'model.layers.1.mlp.up_proj.weight'"),
        (40, "can't be loaded"),
        (0, "can't be loaded"),
    ):
        whole = load_target("debug", fast=False)
        whole.model.save_pretrained(tmp_path)
        whole.tokenizer.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        if cut is None:
            tensors = load_file(str(path))
            save_file(
                {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"},
                str(path),
                metadata={"format": "pt"},
            )
        else:
            path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(UserError, match=says):
            load_target(str(tmp_path))
    for key, value in {"num_attention_heads": 0, "hidden_size": "a"}.items():
        load_target("debug", fast=False).model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(UserError, match="can't be loaded"):
            load_target(str(tmp_path))
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUFnot really")
    with pytest.raises(UserError, match="not a readable GGUF"):
        load_target(str(junk))


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(UserError, match="did you mean 'float32'"):
        load_target("debug", dtype="flot32")
    with pytest.raises(UserError, match="unknown"):
        load_target("debug", device="gpuu")
    assert load_target("debug", dtype="bf16").dtype_name == "bfloat16"


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PretrainedConfig, LlamaForCausalLM, LlamaConfig, PreTrainedTokenizerFast
class C(LlamaConfig):
    model_type = "own"
class M(LlamaForCausalLM):
    config_class = C
class T(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("whose", ["model", "tokenizer"])
def test_code_that_comes_with_a_model_runs_only_when_asked_for(
    target: Target,
    tmp_path: Path,
    whose: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody is asked on the terminal."""
    folder, mark = tmp_path / "m", tmp_path / "ran"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    target.model.save_pretrained(str(folder))
    target.tokenizer.save_pretrained(str(folder))
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    name, added = {
        "model": ("config.json", {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}),
        "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": [None, "own.T"]}),
    }[whose]
    values = json.loads((folder / name).read_text())
    values |= {"auto_map": added} | ({"model_type": "own"} if whose == "model" else {"tokenizer_class": "T"})
    (folder / name).write_text(json.dumps(values))
    if whose == "model":
        with pytest.raises(UserError, match="comes with Python code of its own.*--trust-remote-code"):
            load_target(str(folder))
    else:
        try:  # a tokenizer with a class of its own may be readable without it
            load_target(str(folder))
        except UserError as error:
            assert "--trust-remote-code" in str(error)
        try:
            load_tokenizer(folder)
        except UserError as error:
            assert "--trust-remote-code" in str(error)
    assert not mark.exists() and "y/N" not in capsys.readouterr().out
    trusted = load_target(str(folder), trust_remote_code=True)
    assert mark.exists() and trusted.trust_remote_code


@pytest.mark.parametrize(
    "error", [KeyError("llama.block_count"), ZeroDivisionError(), IndexError("list index out of range")]
)
def test_a_malformed_gguf_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its reader stumbles over."""

    def broken(path: Path, check: object) -> Path:
        raise error

    monkeypatch.setattr("align.target.loading.converted_folder", broken)
    for room in ("names", "loading"):
        monkeypatch.setattr(f"align.target.{room}.check_gguf", lambda path: None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"model\.gguf' can't be loaded"):
        load_target(str(tmp_path / "model.gguf"))


def test_absurd_sizes_of_a_hub_model_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of its cached config, with its weights and without them."""
    load_target("debug", fast=False).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr("align.target.loading.resolve_folder", str)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))

    def refusal(layers: int) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        with pytest.raises(UserError) as caught:
            load_target("some/model")
        return str(caught.value)

    said = "target 'some/model': config.json: num_hidden_layers={}: {}"
    assert refusal(2000) == said.format(2000, "the weights are far too small for that")
    (tmp_path / "model.safetensors").unlink()
    assert refusal(4 * 10**15) == said.format(4 * 10**15, "no machine has room for that")
