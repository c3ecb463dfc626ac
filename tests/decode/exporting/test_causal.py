"""An autoregressive drafter's export is its folder, opened by transformers as it is."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from align.common.errors import UserError
from align.models.checkpoints.causal import save_causal
from align.target.debug import debug_model
from align.target.loading import load_target
from align.target.model import Target
from decode.exporting import causal
from decode.exporting.causal import export
from decode.exporting.parity import exported, in_process
from decode.exporting.verdict import Verdict
from decode.suites.prompt import Prompt
from tests.builders import PROMPT, causal_drafter

PROMPTS = [Prompt("a", "Why is the sky blue?")]


def made(folder: Path, dtype: str, out: Path | None = None, **other: Any) -> Verdict:
    """What is said of the export of the drafter in `folder`."""
    folders = {"draft_model": out or folder / "out"}
    options = {"target": "debug", "dtype": dtype, "device": "cpu", "limit": 1, "max_new_tokens": 12, **other}
    return exported(str(folder / "drafter"), "autoregressive", folders=folders, **options)[0]


def test_the_folder_is_an_assistant_of_transformers(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter", card="---\nlicense: mit\n---\n")
    verdict = made(tmp_path, "float32")
    assert verdict.same and "draft_model" in verdict.serve[0].lines[0]
    assert "tensors: the same" in verdict.lines[0] and "logits over" in verdict.lines[1]
    assert "1 of 1 outputs as plain greedy ones" in verdict.lines[2]
    assert "1 of 1 prompt accepted call for call alike" in verdict.lines[3]
    (note,), page = verdict.notes, (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in page and note[1:] in page and "'debug', which is no hub id" in note
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("drafter", "out"))
    ids = torch.tensor([PROMPT])
    assert torch.equal(first(ids).logits, second(ids).logits)
    several = {name: tmp_path / "other" / name for name in ("draft_model", "dflash")}
    with pytest.raises(UserError, match="--format dflash: .* fits --format draft_model"):
        export(str(tmp_path / "drafter"), "debug", several, "float32")
    assert not (tmp_path / "other").exists()


def test_weights_are_stored_in_the_type_that_is_asked_for(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter")
    (tmp_path / "x 6'q").mkdir()
    for dtype in ("bfloat16", "float16"):
        out = tmp_path / "x 6'q" / dtype
        verdict = made(tmp_path, dtype, out)
        assert verdict.same and any(f"rounded to {dtype}" in note for note in verdict.notes)
        held = load_file(out / "model.safetensors").values()
        assert {t.dtype for t in held} == {getattr(torch, dtype)}
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        said = shlex.split(verdict.serve[0].lines[0])[-1]  # as a shell reads it
        assert json.loads(said)["model"] == str(out)


def test_tied_weights_that_share_their_storage(tmp_path: Path, target: Target) -> None:
    """As a file of torch's own holds them; written in the type that they have."""
    save_causal(causal_drafter(target), tmp_path / "drafter")
    held = load_file(weights := tmp_path / "drafter" / "model.safetensors")
    held = {name: tensor.float() for name, tensor in held.items()}
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    torch.save(held, tmp_path / "drafter" / "pytorch_model.bin")
    weights.unlink()
    (tmp_path / "drafter" / "checksums.json").unlink(missing_ok=True)
    config = json.loads((path := tmp_path / "drafter" / "config.json").read_text())
    path.write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert (verdict := made(tmp_path, "float32")).same, verdict.lines


def test_an_export_of_other_weights_is_named(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter")
    own = causal.write_weights
    monkeypatch.setattr(causal, "write_weights", lambda t, f: own({k: 2 * v for k, v in t.items()}, f))
    verdict = made(tmp_path, "bfloat16")
    assert verdict.conclusion == "NOT THE SAME DRAFTER" and len(verdict.lines) == 2
    assert "tensor " in verdict.lines[0] and "DIFFERENT" in verdict.lines[1]


def test_an_engine_that_drafts_otherwise_is_named(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target itself as the drafter: all is accepted here, and a third of it where the engine drafts less."""
    target.model.save_pretrained(tmp_path / "drafter")
    target.tokenizer.save_pretrained(tmp_path / "drafter")
    whole = causal.assisted

    def fewer(model: Any, prompt: list[int], count: int, assistant_model: Any) -> Any:
        assistant_model.generation_config.num_assistant_tokens = 2
        return whole(model, prompt, count, assistant_model=assistant_model)

    assert (verdict := made(tmp_path, "float32")).same, verdict.lines
    monkeypatch.setattr(causal, "assisted", fewer)
    verdict = made(tmp_path, "float32", tmp_path / "again")
    assert (
        verdict.exit_code == 3
        and "1 of 1 outputs" in verdict.lines[2]
        and "0 of 1 prompt" in verdict.lines[3]
    )


def test_a_drafter_that_drafts_the_end_of_the_text(tmp_path: Path) -> None:
    """The target itself, all of whose drafts are accepted; its outputs of 7, 12 and 4 tokens end in any place of a call."""
    target = load_target("debug-qwen2", "float32", "cpu")
    target.model.save_pretrained(tmp_path / "drafter")
    target.tokenizer.save_pretrained(tmp_path / "drafter")
    verdict = made(tmp_path, "float32", target="debug-qwen2", limit=3)
    assert verdict.same and "3 of 3 prompts accepted call for call alike" in verdict.lines[3], verdict.lines


def test_later_and_in_one_process(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter")
    made(tmp_path, "float32")
    words = (str(tmp_path / "drafter"), "autoregressive", "debug", PROMPTS, 12)
    for folder in (None, tmp_path / "out"):
        verdict = in_process(*words, "transformers", folder, device="cpu")
        assert verdict.same and len(verdict.lines) == 4
    with pytest.raises(UserError, match="--engine dflash: holds block drafters.*--engine transformers"):
        in_process(*words, "dflash", None, device="cpu")
    with pytest.raises(UserError, match="no export.json, so no export of this project"):
        in_process(*words, "transformers", tmp_path / "drafter", device="cpu")


# ---- a head of its own, whatever the flag says ----


def untied(folder: Path, flag: bool = True) -> dict[str, torch.Tensor]:
    """A small language model whose head is not its embedding, with that flag in its config.json; its tensors."""
    model, tokenizer = debug_model("Llama")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    type(model)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    values = json.loads((path := folder / "config.json").read_text())
    path.write_text(json.dumps({**values, "tie_word_embeddings": flag}))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("flag", [True, False])
def test_an_export_holds_the_head_that_the_tensors_hold(tmp_path: Path, flag: bool) -> None:
    held = untied(tmp_path / "drafter", flag)
    verdict = made(tmp_path, "float32")
    assert verdict.same, verdict.lines
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], held["lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("fault", ["head", "flag"])
def test_an_export_without_its_head_is_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Left out, or kept beside a flag by which engines leave it out."""
    untied(tmp_path / "drafter")
    if fault == "head":
        own = causal.write_weights
        monkeypatch.setattr(
            causal,
            "write_weights",
            lambda t, f: own({k: v for k, v in t.items() if k != "lm_head.weight"}, f),
        )
    else:
        answers = iter((False, True))
        monkeypatch.setattr(causal, "holds_head", lambda *given: next(answers))
    verdict = made(tmp_path, "float32")
    assert verdict.exit_code == 1 and verdict.conclusion == "NOT THE SAME DRAFTER"
    said = {"head": "tensor lm_head.weight is missing", "flag": "tie_word_embeddings is not false"}
    assert said[fault] in verdict.lines[0]


def test_a_drafter_that_was_saved_without_its_head_is_not_the_same(tmp_path: Path) -> None:
    """Trained with a target's head that is not its embedding, and saved as if it were."""
    untied(tmp_path / "target")
    target = load_target(str(tmp_path / "target"), "float32", "cpu")
    save_causal(causal_drafter(target), folder := tmp_path / "drafter")
    held = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in held.items() if k != "lm_head.weight"},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    values = json.loads((path := folder / "config.json").read_text())
    path.write_text(json.dumps({**values, "tie_word_embeddings": True}))
    (folder / "checksums.json").unlink(missing_ok=True)
    verdict = made(tmp_path, "bfloat16", target=str(tmp_path / "target"))
    assert verdict.conclusion == "NOT THE SAME DRAFTER" and any(
        "output head: MISSING" in x for x in verdict.lines
    )
