"""`generate` with an exported folder's drafts writes what it writes without them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from decode.engine.stock import stock_model
from decode.exporting.formats import write_export
from specalign.lm.inspection.anatomy import cache_name
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import PROMPT, block_network, overfit_block_network
from tests.fakes import Streamer
from tests.target_models import tiny_model
from tests.target_wrappers import save_wrapper, tiny_wrapper

IDS = torch.tensor([PROMPT])
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An export of a drafter that knows the prompt's continuation."""
    out = tmp_path_factory.mktemp("drafter") / "exported"
    write_export("custom_generate", overfit_block_network(target, PROMPT), out, torch.float32, "")
    return str(out)


@pytest.fixture(scope="module")
def drafting(folder: str) -> dict[str, Any]:
    """Arguments of `generate`."""
    return {"custom_generate": folder, "trust_remote_code": True}


def written(model: Any, ids: Any, words: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    out = model.generate(ids, **words)
    return out if isinstance(out, torch.Tensor) else out.sequences


class Counting(LogitsProcessor):
    """Depends on how often it was called, as users' stateful processors do."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        tokens = (7 * self.calls + input_ids[:, -1:]) % 256
        return scores.scatter(1, tokens, 30.0 - self.calls % 3 * 20)


class EndsSoon(StoppingCriteria):
    """Ends all texts at its seventh call, as `max_time` does after some time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 7)


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "penalty": lambda: {"repetition_penalty": 1.3},
    "minimum": lambda: {"min_new_tokens": 12, "eos_token_id": [17, 203, 4]},
    "ends": lambda: {"eos_token_id": list(range(0, 256, 3))},
    "own processor": lambda: {"logits_processor": LogitsProcessorList([Counting()])},
    "criterion with a state": lambda: {"stopping_criteria": StoppingCriteriaList([EndsSoon()])},
    "next to another model": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 9]])},
    "SynthID": lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    "sampled": lambda: {"do_sample": True, "temperature": 0.7, "top_k": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_generates_own(model: Any, drafting: dict[str, Any], name: str) -> None:
    words = {"max_new_tokens": 24, **GREEDY}
    own = written(model, IDS, {**words, **SETTINGS[name]()})
    assert torch.equal(written(model, IDS, {**words, **SETTINGS[name](), **drafting}), own)


def test_streamers_and_accepted_drafts(model: Any, drafting: dict[str, Any]) -> None:
    words, passes, streamer = {"max_new_tokens": 24, **GREEDY}, list[int](), Streamer()
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    out = model.generate(IDS, streamer=streamer, **words, **drafting)
    handle.remove()
    assert len(passes) < 16
    assert streamer.ended and streamer.tokens == out[0].tolist()
    named = model.generate(IDS, return_dict_in_generate=True, **words, **drafting)
    assert torch.equal(named.sequences, out)


def test_what_drafts_can_not_honour(model: Any, drafting: dict[str, Any]) -> None:
    held = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[9, 9, 9]]), use_cache=True, **{cache_name(model): held})
    for words, says in (
        ({"past_key_values": held}, "must be empty"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores: is not"),
        ({"stop_strings": "x"}, "stop_strings: is not"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"inputs_embeds": torch.zeros(1, 6, 64)}, "inputs_embeds"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"position_ids": torch.tensor([[0, 2, 4, 6, 8, 10]])}, "position_ids"),
        ({"assistant_model": model}, "assistant_model"),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}, "one text without padding"),
        ({"do_sample": True, "num_return_sequences": 2}, "one text without padding"),
    ):
        with pytest.raises(ValueError, match=says):
            model.generate(IDS, max_new_tokens=4, **{**GREEDY, **drafting, **words})


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_text_for_a_model_of_images(kind: str, tmp_path: Path) -> None:
    save_wrapper(model := tiny_wrapper(kind), tmp_path / "target")
    drafter = block_network(load_target(str(tmp_path / "target"), "float32", "cpu"), "shared_kv")
    write_export("custom_generate", drafter, tmp_path / "out", torch.float32, "")
    types = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    words: dict[str, Any] = {"max_new_tokens": 8, types: torch.zeros_like(IDS), **GREEDY}
    own = model.generate(IDS, **words)
    drafting: dict[str, Any] = {"custom_generate": str(tmp_path / "out"), "trust_remote_code": True}
    assert torch.equal(model.generate(IDS, **words, **drafting), own)
    with pytest.raises(ValueError, match=f"{types}: only tokens"):
        model.generate(IDS, **{**words, types: torch.ones_like(IDS)}, **drafting)


def test_a_recurrent_model_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="can't be rolled back"):
        tiny_model("qwen3_next", 260).generate(
            IDS, custom_generate=folder, trust_remote_code=True, max_new_tokens=4, **GREEDY
        )


ALONE = """
import sys
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("align", "decode", "specalign"):
            raise ImportError(name)
sys.meta_path.insert(0, Nobody())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([list(map(int, sys.argv[3].split(",")))])
words = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
passes = []
handle = model.register_forward_hook(lambda *_: passes.append(1))
out = model.generate(ids, custom_generate=sys.argv[2], trust_remote_code=True, **words)
handle.remove()
assert torch.equal(out, model.generate(ids, **words)) and len(passes) < 12, (out, passes)
"""


@pytest.mark.slow
def test_it_runs_without_this_project(model: Any, folder: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    words = [sys.executable, "-c", ALONE, str(tmp_path / "model"), folder]
    words.append(",".join(map(str, PROMPT)))
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
