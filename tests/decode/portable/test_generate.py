"""A `custom_generate` folder writes what plain `generate` writes, greedily and sampled, under its own settings, and alone."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.ao.quantization import quantize_dynamic
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from decode.engine.stock import stock_model
from decode.exporting.registry import FORMATS
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import PROMPT, block_network, overfit_block_network
from tests.fakes import Streamer
from tests.target_models import tiny_model
from tests.target_wrappers import save_wrapper, tiny_wrapper

IDS = torch.tensor([PROMPT])


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("export") / "out"
    FORMATS["custom_generate"].write(overfit_block_network(target, PROMPT), out, torch.float32, "")
    return str(out)


class Counting(LogitsProcessor):
    """Knows how often it was called: what a stateful processor of a user's does."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        tokens = (7 * self.calls + input_ids[:, -1:]) % 256
        return scores.scatter(1, tokens, 30.0 - self.calls % 3 * 20)


class EndsAt(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 13)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "ends": {"eos_token_id": list(range(0, 256, 3))},
    "own criterion": {"stopping_criteria": StoppingCriteriaList([EndsAt()])},
    "one token": {"max_new_tokens": 1},
    "states that are not returned": {"output_hidden_states": True},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "beside another model": {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 9]])},
}


def written(model: Any, folder: str, **words: Any) -> tuple[Any, list[int]]:
    accepted = list[int]()
    torch.manual_seed(3)
    out = model.generate(
        words.pop("ids", IDS),
        custom_generate=folder,
        trust_remote_code=True,
        accepted=accepted,
        **words,
    )
    return out, accepted


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_generates_own(model: Any, folder: str, name: str) -> None:
    words = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **SETTINGS[name]}
    torch.manual_seed(3)
    own = model.generate(IDS, **words)
    found, accepted = written(model, folder, **words)
    assert torch.equal(found, own)
    if name == "greedy":
        assert sum(accepted) > 8


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization")
def test_processes_that_wait_and_packed_weights_are_refused(model: Any, folder: str) -> None:
    """The latter also of a model that drafted before, whose head it has read."""
    words: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="^synced_gpus: each process"):
        written(model, folder, synced_gpus=True, **words)
    for drafted in (False, True):
        for parts in ({torch.nn.Linear}, {"model.layers.1.mlp.up_proj"}, {"lm_head"}):
            own = copy.deepcopy(model)
            if drafted:
                written(own, folder, **words)
            packed = quantize_dynamic(own, parts)
            with pytest.raises(
                ValueError, match="^(model|lm_head).*is quantised by torch.ao"
            ) as refused:
                written(packed, folder, **words)
            assert "\n" not in str(refused.value)


def test_a_processor_is_called_once_a_token_in_order(model: Any, folder: str) -> None:
    words: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    own, ours = Counting(), Counting()
    wanted = model.generate(IDS, logits_processor=LogitsProcessorList([own]), **words)
    found, _ = written(model, folder, logits_processor=LogitsProcessorList([ours]), **words)
    assert torch.equal(found, wanted) and own.calls == ours.calls


def test_batches_scores_and_streamers(model: Any, folder: str) -> None:
    ids = torch.tensor([[0, 0, *PROMPT], [5, 7, *PROMPT]])
    words: dict[str, Any] = {
        "attention_mask": torch.tensor([[0, 0, *[1] * 6], [1] * 8]), "max_new_tokens": 12, "do_sample": False,
        "pad_token_id": 0, "repetition_penalty": 1.2, "eos_token_id": list(range(1, 256, 9)),
    }  # fmt: skip
    own = model.generate(ids, **words)
    assert torch.equal(written(model, folder, ids=ids, **words)[0], own)
    words = {
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    words |= {"output_scores": True, "output_logits": True}
    wanted, (found, _) = model.generate(IDS, **words), written(model, folder, **words)
    assert torch.equal(wanted.sequences, found.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(found[name]), torch.stack(wanted[name]), rtol=1e-4, atol=1e-4
        )
    streamer = Streamer()
    out, _ = written(model, folder, max_new_tokens=10, pad_token_id=0, streamer=streamer)
    assert streamer.ended and streamer.tokens == out[0].tolist()


class EndsOne(StoppingCriteria):
    """Ends the text that begins with 5 at ten tokens."""

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return (input_ids[:, 0] == 5) & (input_ids.shape[1] >= 10)


class EndsSoon(StoppingCriteria):
    """Ends all texts at its seventh call, as `max_time` does after some time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 7)


class ReadsScores(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.stack(scores).amax(dim=(0, 2)) > 3.0


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "SynthID": lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    "beside another model": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 9], [7, 9]])},
    "sampled": lambda: {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "eos_token_id": [9, 2, 151]},
    "criterion of one text": lambda: {"stopping_criteria": StoppingCriteriaList([EndsOne()])},
    "criterion beside ends": lambda: {
        "stopping_criteria": StoppingCriteriaList([EndsOne()]), "eos_token_id": [2]
    },
    "criterion with a state": lambda: {"stopping_criteria": StoppingCriteriaList([EndsSoon()])},
    "criterion of scores": lambda: {
        "stopping_criteria": StoppingCriteriaList([ReadsScores()]), "return_dict_in_generate": True,
        "output_scores": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_texts_of_a_batch_are_written_side_by_side(
    model: Any, folder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called for all texts is called as plain `generate` does, with the same random numbers."""
    ids = torch.tensor([[0, 0, *PROMPT], [5, 7, *PROMPT[:5], 9]])
    words: dict[str, Any] = {
        "attention_mask": torch.tensor([[0, 0, *[1] * 6], [1] * 8]), "max_new_tokens": 16, "do_sample": False,
        "pad_token_id": 0,
    }  # fmt: skip
    monkeypatch.setattr(
        model.generation_config, "eos_token_id", None
    )  # so that some have no end of text
    torch.manual_seed(3)
    own = model.generate(ids, **{**words, **BATCHES[name]()})
    found, accepted = written(model, folder, ids=ids, **{**words, **BATCHES[name]()})
    wanted, found = (
        out if isinstance(out, torch.Tensor) else out.sequences for out in (own, found)
    )
    assert torch.equal(found, wanted)
    assert accepted


def test_stop_strings(model: Any, folder: str, target: Target) -> None:
    words: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    said = [
        target.tokenizer.decode(token) for token in model.generate(IDS, **words)[0, 6:].tolist()
    ]
    stop = next(text for text in said if text.isascii())  # not a part of a letter
    words["tokenizer"] = target.tokenizer
    own = model.generate(IDS, stop_strings=stop, **words)
    assert 6 < own.shape[1] == 7 + said.index(stop) < 22
    assert torch.equal(written(model, folder, stop_strings=[stop], **words)[0], own)
    config = GenerationConfig(stop_strings=[stop])
    assert torch.equal(written(model, folder, generation_config=config, **words)[0], own)
    assert config.stop_strings == [stop]
    with pytest.raises(ValueError, match=r"token_healing: leave it out, .* model.heal_tokens"):
        written(model, folder, token_healing=True, **words)


def test_words_alone_for_a_model_of_images(tmp_path: Path) -> None:
    save_wrapper(model := tiny_wrapper("gemma3"), tmp_path / "target")
    drafter = block_network(load_target(str(tmp_path / "target"), "float32", "cpu"), "shared_kv")
    FORMATS["custom_generate"].write(drafter, tmp_path / "out", torch.float32, "")
    words: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    words["token_type_ids"] = torch.zeros_like(IDS)  # as its processor gives them
    own = model.generate(IDS, **words)
    assert torch.equal(written(model, str(tmp_path / "out"), **words)[0], own)
    words["token_type_ids"] = torch.ones_like(IDS)
    with pytest.raises(ValueError, match="token_type_ids: only tokens"):
        written(model, str(tmp_path / "out"), **words)


def test_a_cache_that_holds_tokens_or_an_assistant(model: Any, folder: str) -> None:
    held, empty = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[9, 9, 9]]), cache=held, use_cache=True)
    words: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="holds tokens, and every text"):
        written(model, folder, past_key_values=held, **words)
    with pytest.raises(ValueError, match="assistant_model"):
        written(model, folder, assistant_model=object(), **words)
    found, _ = written(model, folder, past_key_values=empty, **words)
    assert torch.equal(found, model.generate(IDS, **words))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "no such folder with config.json and model.safetensors"),
        ("config.json", "{", "config.json: can't be read"),
        ("config.json", "[]", "config.json: holds no object"),
        ("config.json", "{}", "config.json: 'vocab_size' is missing"),
        ("model.safetensors", "xx", "model.safetensors: can't be read"),
    ],
)
def test_broken_folders(
    model: Any, folder: str, tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    if content is None:
        (broken / file).unlink()
    else:
        (broken / file).write_text(content)
    with pytest.raises(ValueError, match=says) as error:
        written(model, str(broken), max_new_tokens=4, pad_token_id=0)
    assert "broken" in str(error.value)


def test_a_tensor_that_is_missing(model: Any, folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "broken")
    held = load_file(tmp_path / "broken" / "model.safetensors")
    del held["layers.0.self_attn.k_norm.weight"]
    save_file(held, tmp_path / "broken" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"broken/model.safetensors: 'layers.0.self_attn.k_norm.weight' is missing"
    ):
        written(model, str(tmp_path / "broken"), max_new_tokens=4, pad_token_id=0)


def test_nothing_runs_unasked_and_states_that_stay_are_refused(model: Any, folder: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(IDS, custom_generate=folder, trust_remote_code=False, max_new_tokens=4)
    recurrent = tiny_model("qwen3_next", 260)
    with pytest.raises(ValueError, match="can't be taken back|the drafter was made for"):
        written(recurrent, folder, max_new_tokens=4, pad_token_id=0)


def test_a_folder_that_is_gone_is_not_asked_for_elsewhere(
    model: Any, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def get(**words: object) -> None:
        asked.append(words)
        raise OSError("no network in this test")

    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", get)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exports").mkdir()
    with pytest.raises(ValueError, match="drafter='exports/gone': no such folder with config.json"):
        written(model, folder, drafter="exports/gone", max_new_tokens=4)
    assert asked == []


ALONE = """
import sys
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("align", "decode"):
            raise ImportError(name)
sys.meta_path.insert(0, Nobody())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([list(map(int, sys.argv[3].split(",")))])
words = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
accepted = []
out = model.generate(ids, custom_generate=sys.argv[2], trust_remote_code=True, accepted=accepted, **words)
assert torch.equal(out, model.generate(ids, **words)) and sum(accepted) > 4, (out, accepted)
"""


@pytest.mark.slow
def test_it_runs_without_this_project(model: Any, folder: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    words = [
        sys.executable,
        "-c",
        ALONE,
        str(tmp_path / "model"),
        folder,
        ",".join(map(str, PROMPT)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
