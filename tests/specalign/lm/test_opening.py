"""Models as transformers opens them: of which class, with all their weights, with code of their own, or refused in a line."""

import io
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decode.engine.decoder import Decoder
from decode.proposers.lookup import LookupProposer
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.target_models import WINDOW, save_target, some_text
from tests.target_wrappers import save_wrapper, tiny_wrapper


def test_surplus_weights_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of autoregressive drafters too, which are opened so; those of other kinds are refused with them."""
    target = load_target("debug")
    save_target(target, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(str(path)) | {"model.odd": torch.ones(2), "odder": torch.ones(1)}
    save_file(weights, str(path), metadata={"format": "pt"})
    capfd.readouterr()
    load_target(str(tmp_path))
    said = capfd.readouterr().err
    assert said.endswith(
        "weights in its checkpoint that the network does not have: 'model.odd', and 1 more\n"
    )
    assert said.count("\n") == 1


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
    for drafter in (None, LookupProposer(3)):
        out = Decoder(loaded, drafter).generate(prompt[0].tolist(), max_new_tokens=12)
        assert out.tokens == wanted
    assert loaded.detokenize([280, 70]) == loaded.detokenize([70])
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


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.T5Config(), "'t5' is an encoder-decoder model; only"),
        (transformers.CLIPConfig(), "'clip' is not a left-to-right language model"),
    ],
)
def test_what_writes_no_text_by_itself_is_refused(
    config: transformers.PreTrainedConfig, says: str, target: Target, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"architecture {says}"):
        load_target(str(tmp_path))


CODE = """
from pathlib import Path
from typing import Any
Path({mark!r}).touch()
from transformers import PretrainedConfig, LlamaForCausalLM, LlamaConfig
class C(LlamaConfig):
    model_type = "own"
class M(LlamaForCausalLM):
    config_class = C
"""


def test_code_that_comes_with_a_model_runs_only_when_asked_for(
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody is asked on the terminal."""
    folder, mark = tmp_path / "m", tmp_path / "ran"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    save_target(target, folder)
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    values = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    values |= {"auto_map": auto, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="needs custom Python code.*--trust-remote-code"):
        load_target(str(folder))
    assert not mark.exists() and "y/N" not in capsys.readouterr().out
    trusted = load_target(str(folder), trust_remote_code=True)
    assert mark.exists() and trusted.trust_remote_code
