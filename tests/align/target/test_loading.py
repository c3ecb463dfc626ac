"""Targets from folders, names and files, and what is wrong with those that don't load."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from align.common.errors import UserError
from align.config.drafter import DrafterConfig
from align.makers.causal import make_causal
from align.target.loading import load_target, load_tokenizer
from align.target.model import Target
from decode.drafters.lookup import LookupDrafter
from decode.engine.decoder import Decoder
from tests.quantised_checkpoints import save_quantised
from tests.target_models import WINDOW, some_text, tiny_model
from tests.target_wrappers import save_wrapper, tiny_wrapper


def test_folder_in_hub_layout_gives_the_same_model(target: Target, tmp_path: Path) -> None:
    plain = load_target("debug", fast=False)
    plain.model.save_pretrained(tmp_path)
    plain.tokenizer.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32")
    tokens = torch.arange(4, 20)[None]
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, target.forward(tokens).logits_BLV)
    assert loaded.hash == load_target(str(tmp_path), dtype="float32").hash
    assert loaded.eos_ids == target.eos_ids


@pytest.mark.parametrize("text", ['{"eos_token_id": [2, 70', "", "[]", None])
def test_a_broken_generation_config_is_not_passed_over(text: str | None, tmp_path: Path) -> None:
    """It says which tokens end a text."""
    target = load_target("debug")
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.unlink(missing_ok=True)
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("beside", [[], [5000, 7], [*range(260, 20_000)]])
def test_a_text_ends_where_generate_ends_it(
    beside: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the generation config's tokens alone, where it names some: not at the config's, nor at the tokenizer's."""
    own, prompt = load_target("debug", fast=False), [9, 8, 7]
    own.eos_ids = ()
    written = Decoder(own).generate(prompt, max_new_tokens=16).tokens
    first, second, third = sorted({*written}, key=written.index)[1:4]
    own.model.config.eos_token_id = first
    own.tokenizer.eos_token = own.tokenizer.convert_ids_to_tokens(second)
    own.model.save_pretrained(tmp_path)
    own.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [third, *beside]}))
    loaded = load_target(str(tmp_path), "float32", fast=False)
    assert f"ends a text at {min([third, *(i for i in beside if i < 260)])}" in capsys.readouterr().err
    given = torch.tensor([prompt])
    stock = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    output = stock.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=16, do_sample=False)
    wanted = output[0, 3:].tolist()
    for drafter in (None, LookupDrafter(3)):
        assert Decoder(loaded, drafter).generate(prompt, max_new_tokens=16).tokens == wanted
    assert wanted == written[: written.index(third) + 1]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["</s>", -1, 2.5, [2, "7"]])
def test_an_end_that_is_no_token_is_refused(file: str, value: Any, tmp_path: Path) -> None:
    whole = load_target("debug", fast=False)
    whole.model.save_pretrained(tmp_path)
    whole.tokenizer.save_pretrained(tmp_path)
    found = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(found | {"eos_token_id": value}))
    with pytest.raises(UserError, match=rf"{file}: eos_token_id: .* is no token's id"):
        load_target(str(tmp_path))


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


def test_surplus_weights_are_named_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of autoregressive drafters too, which are opened so; those of other kinds are refused with them."""
    target = load_target("debug")
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(str(path)) | {"model.odd": torch.ones(2), "odder": torch.ones(1)}
    save_file(weights, str(path), metadata={"format": "pt"})
    capfd.readouterr()
    load_target(str(tmp_path))
    said = capfd.readouterr().err
    assert said.endswith("weights that the network has not, and that are left out: 'model.odd', and 1 more\n")
    assert said.count("\n") == 1


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(UserError, match="did you mean 'float32'"):
        load_target("debug", dtype="flot32")
    with pytest.raises(UserError, match="unknown"):
        load_target("debug", device="gpuu")
    assert load_target("debug", dtype="bf16").dtype_name == "bfloat16"


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_a_model_with_towers_runs_on_text(kind: str, tmp_path: Path) -> None:
    """Beyond its window, with a vocabulary wider than the tokenizer's and several tokens that end a text; its position in
    three parts, or not."""
    own = tiny_wrapper(kind, vocab_size=288)
    own.generation_config.eos_token_id = [2, 7]
    save_wrapper(own, tmp_path)
    loaded = load_target(str(tmp_path), "float32", "cpu")
    assert (loaded.vocab_size, len(loaded.tokenizer), loaded.eos_ids) == (288, 260, (2, 7))
    prompt = some_text(loaded, WINDOW + 9)
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    wanted = own.generate(prompt, **given, pad_token_id=2)[0, prompt.shape[1] :].tolist()
    for drafter in (None, LookupDrafter(3)):
        assert Decoder(loaded, drafter).generate(prompt[0].tolist(), max_new_tokens=12).tokens == wanted
    assert loaded.decode([280, 70]) == loaded.decode([70])
    config = json.loads((tmp_path / "config.json").read_text())
    for file in tmp_path.glob("chat_template*"):  # old folders have it beside the processor
        file.unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    config["text_config"]["eos_token_id"] = [2, 9]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    again = load_target(str(tmp_path), "float32", "cpu")
    assert again.eos_ids == (2, 9)
    if kind == "qwen2_vl":
        assert again.tokenizer.decode(again.chat_tokens("Hi")) == "Hi!"


def test_a_whole_whose_text_model_finds_no_weights_is_opened_whole(tmp_path: Path) -> None:
    """Emu3 is listed as a causal language model too, under whose names nothing of a whole checkpoint lies."""
    own, tokens = tiny_wrapper("emu3"), torch.arange(30, 50)[None]
    save_wrapper(own, tmp_path)
    loaded = load_target(str(tmp_path), "float32", "cpu")
    assert type(loaded.model) is type(own)
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, own(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            transformers.T5Config(),
            "'t5' .no architecture named. is an encoder and a decoder: it continues no text",
        ),
        (transformers.CLIPConfig(), "'clip' .no architecture named. is no language model"),
    ],
)
def test_what_writes_no_text_by_itself_is_refused(
    config: transformers.PreTrainedConfig, says: str, target: Target, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"architecture {says}"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bitnet"])
def test_quantised_checkpoints_that_a_cpu_can_open(method: str, tmp_path: Path) -> None:
    """Those of fp8 and mxfp4 are restored, to the bit; bitnet's layers run as they are, which transformers would compile. p is
    proved in either case."""
    with torch.compiler.set_stance("force_eager"):
        _check_quantised(method, tmp_path)


def _check_quantised(method: str, tmp_path: Path) -> None:
    meant = save_quantised(method, tmp_path)
    loaded = load_target(str(tmp_path), "float32", "cpu")
    weights = loaded.model.state_dict()
    for name, weight in meant.items():
        if method != "bitnet":
            assert torch.equal(weights[name], weight), name
    plain = tiny_model("gpt_oss" if method == "mxfp4" else "llama", 260)
    plain.load_state_dict(meant, strict=False)
    tokens = torch.arange(4, 20)[None]
    found, wanted = loaded.forward(tokens).logits_BLV, plain(tokens).logits
    assert found is not None and meant
    if method == "bitnet":  # which rounds its layers' inputs to eight bits
        assert float((found - wanted).abs().mean()) < 0.1 * float(wanted.std())
        with pytest.raises(UserError, match="can't serve as drafter.kind=autoregressive: .*quantised"):
            make_causal(loaded, DrafterConfig(kind="autoregressive", layers=2))
    else:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


CODE = """
from pathlib import Path
from typing import Any
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


def test_a_config_that_transformers_refuses_says_why_in_one_line(target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError,
        match=r"can't be loaded: Validation error for field 'hidden_act': TypeError: .*expected str, got int.*",
    ):
        load_target(str(tmp_path))


def test_a_weight_in_another_shape_is_named(tmp_path: Path) -> None:
    whole, name = load_target("debug", fast=False), "model.layers.1.mlp.up_proj.weight"
    whole.model.save_pretrained(tmp_path)
    whole.tokenizer.save_pretrained(tmp_path)
    tensors = load_file(str(path := tmp_path / "model.safetensors"))
    save_file(tensors | {name: tensors[name][:40].contiguous()}, str(path), metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"lacks '{name}', or has it in another shape"):
        load_target(str(tmp_path))
