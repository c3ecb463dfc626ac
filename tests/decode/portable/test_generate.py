"""A `custom_generate` folder writes what plain `generate` writes, greedily and sampled, under its own settings, and alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from align.target.model import Target
from decode.engine.compiled import stock_model
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, overfit_block_network
from tests.fakes import Streamer
from tests.target_models import tiny_model

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
        return scores.scatter(
            1, torch.tensor([[(7 * self.calls + int(input_ids[0, -1])) % 256]]), 30.0 - self.calls % 3 * 20
        )


class EndsAt(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 13)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "ends": {"eos_token_id": list(range(0, 256, 3))},
    "minimum": {"min_new_tokens": 12, "eos_token_id": [17, 203, 4]},
    "own criterion": {"stopping_criteria": StoppingCriteriaList([EndsAt()])},
    "one token": {"max_new_tokens": 1},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "sampled, filtered": {"do_sample": True, "top_p": 0.8, "top_k": 20, "temperature": 1.3},
    "beside another model": {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 9]])},
}


def written(model: Any, folder: str, **words: Any) -> tuple[Any, list[int]]:
    accepted = list[int]()
    torch.manual_seed(3)
    out = model.generate(
        words.pop("ids", IDS), custom_generate=folder, trust_remote_code=True, accepted=accepted, **words
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
    words = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    words |= {"output_scores": True, "output_logits": True}
    wanted, (found, _) = model.generate(IDS, **words), written(model, folder, **words)
    assert torch.equal(wanted.sequences, found.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(wanted[name]), rtol=1e-4, atol=1e-4)
    streamer = Streamer()
    out, _ = written(model, folder, max_new_tokens=10, pad_token_id=0, streamer=streamer)
    assert streamer.ended and streamer.tokens == out[0].tolist()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: drafts are"),
        ({"dola_layers": "low"}, "dola_layers: drafts are"),
        ({"force_words_ids": [[7]]}, "force_words_ids: drafts are"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}, "padding_side='left'"),
        ({"assistant_model": object()}, "assistant_model"),
    ],
)
def test_what_it_cannot_honour_is_refused(model: Any, folder: str, words: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        written(model, folder, max_new_tokens=4, pad_token_id=0, **words)


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
    words = [sys.executable, "-c", ALONE, str(tmp_path / "model"), folder, ",".join(map(str, PROMPT))]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
