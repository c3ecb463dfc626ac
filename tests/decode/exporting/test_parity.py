"""From a trained drafter to exported folders and a verdict on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.common.errors import UserError
from align.models.checkpoints.block import save_drafter
from align.target.model import Target
from decode.exporting.engine_reader import TransformersReader
from decode.exporting.parity import exported, in_process
from decode.suites.registry import prompts_of
from tests.builders import block_network
from tests.target_models import asking_target, write_gguf


@pytest.fixture
def drafter(tmp_path: Path, target: Target) -> str:
    network = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    card = "---\nlicense: mit\n---\n| expected τ, greedy | 1.5 |\n"
    save_drafter(network, tmp_path / "drafter", card=card)
    return str(tmp_path / "drafter")


def test_several_formats_at_once_are_compared_with_the_drafter(tmp_path: Path, drafter: str) -> None:
    names = ("dflash", "transformers", "speculators")
    folders = {name: tmp_path / "out" / name for name in names}
    verdicts = exported(drafter, "block", "debug", folders, device="cpu", limit=1, max_new_tokens=8)
    assert [v.format for v in verdicts] == list(names) and all(v.same and v.lines for v in verdicts)
    card = (folders["dflash"] / "README.md").read_text()
    assert "license: mit" in card and "| expected τ, greedy | 1.5 |" in card
    assert "vllm serve debug --speculative-config" in card
    assert any("generate(assistant_model=" in line for line in verdicts[1].lines)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"block_layout": "fill_in"}, ("dflash", "speculators", "transformers", "gguf")),
        ({"markov_rank": 4, "markov": "vanilla"}, ("dspark", "gguf")),
        ({"markov_rank": 4, "markov": "tanh"}, ("dspark",)),
    ],
)
def test_a_pruned_vocabulary_is_compared_as_each_engine_drafts_with_it(
    tmp_path: Path, target: Target, vocabulary: Path, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    """Over its rows of the head as they are stored, rounded; or, where the format holds none, over the target's whole vocabulary."""
    network = block_network(target, "taps", options=options)
    save_drafter(network, tmp_path / "drafter")
    folders = {name: tmp_path / "out" / name for name in names}
    words = {"device": "cpu", "limit": 1, "max_new_tokens": 8, "vocabulary": vocabulary}
    for verdict in exported(str(tmp_path / "drafter"), "block", "debug", folders, **words):
        assert verdict.same and any("whole outputs" in line for line in verdict.lines), verdict.lines[-1]


def test_a_target_whose_generation_config_asks_for_other_text(
    tmp_path: Path, target: Target, drafter: str
) -> None:
    """Penalties and the like are applied neither here nor where transformers itself writes, with a drafter of either kind."""
    folder = asking_target(tmp_path / "its", target, repetition_penalty=1.8, no_repeat_ngram_size=2)
    names = ("transformers", "custom_generate", "draft_model")
    for name in names:
        own, role = (folder, "autoregressive") if name == "draft_model" else (drafter, "block")
        words: dict[str, Any] = {"device": "cpu", "dtype": "float32", "limit": 1, "max_new_tokens": 12}
        (verdict,) = exported(own, role, folder, {name: tmp_path / name}, **words)
        assert verdict.same, verdict.lines


def test_weights_that_are_rounded(tmp_path: Path, drafter: str) -> None:
    """Compared as the export holds them, with a note; written in their own type there is none."""
    weights = load_file(file := Path(drafter) / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    wide = {k: v.float() * (1 + 2e-3 * torch.randn(v.shape, generator=noise)) for k, v in weights.items()}
    save_file(wide, file)
    (Path(drafter) / "checksums.json").unlink(missing_ok=True)
    for dtype, notes in (("bfloat16", 1), ("float32", 0)):
        (verdict,) = exported(
            drafter,
            "block",
            "debug",
            {"dflash": tmp_path / dtype},
            dtype=dtype,
            device="cpu",
            limit=1,
            max_new_tokens=8,
        )
        assert verdict.same and sum("rounded to" in note for note in verdict.notes) == notes
        prompts = prompts_of("builtin", limit=1)[0][0].prompts
        assert in_process(drafter, "block", "debug", prompts, 8, "transformers", None, device="cpu").same


def test_others_are_told_the_target(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hub id of --target where the drafter was trained for a folder; where there is none, that they can't know it."""
    network = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    network.config.target = str(tmp_path)
    save_drafter(network, tmp_path / "drafter")
    found = {}
    for name in ("", "org/model"):
        monkeypatch.setattr("decode.exporting.parity.hub_id", {"debug": name}.get)
        out = tmp_path / f"out {name[:3]}"
        words: dict[str, Any] = {"device": "cpu", "limit": 0}
        (verdict,) = exported(str(tmp_path / "drafter"), "block", "debug", {"speculators": out}, **words)
        config, record = (json.loads((out / n).read_text()) for n in ("config.json", "export.json"))
        said = [note for note in verdict.notes if "no hub id" in note]
        assert (said != []) is ("no hub id" in (out / "README.md").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == record["target"]
        found[record["target"]] = len(said)
    assert found == {str(tmp_path): 1, "org/model": 0}


@pytest.mark.parametrize("made_for", ["some/model", "runs/code"])
def test_a_folder_that_is_given_as_the_target_is_named(tmp_path: Path, target: Target, made_for: str) -> None:
    """It may hold a finetuned model, whatever the drafter was made for; in the hub's cache it has that name."""
    network = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    network.config.target = made_for
    save_drafter(network, tmp_path / "drafter")
    cached = tmp_path / "models--org--finetune/snapshots/0"
    for place, name, notes in ((tmp_path / "its", str(tmp_path / "its"), 1), (cached, "org/finetune", 0)):
        folder, out = asking_target(place, target), tmp_path / f"out{notes}"
        words: dict[str, Any] = {"device": "cpu", "limit": 0, "dtype": "float32"}
        (verdict,) = exported(str(tmp_path / "drafter"), "block", folder, {"dflash": out}, **words)
        assert sum("no hub id" in note for note in verdict.notes) == notes
        page, record = (out / "README.md").read_text(), json.loads((out / "export.json").read_text())
        line = verdict.serve[0].lines[0]
        assert record["target"] == name and name in page and made_for not in page + line


def test_nothing_is_written_where_a_vocabulary_does_not_fit(
    tmp_path: Path, target: Target, drafter: str
) -> None:
    (tmp_path / "torn.gguf").write_bytes(b"GGUFxxxx")
    write_gguf(tmp_path / "other.gguf", target, tokenizer="llama")
    folders = {name: tmp_path / "out" / name for name in ("dflash", "gguf")}
    for name, says in (("torn", "can't be read"), ("other", "tokens, the drafter's target has")):
        words: dict[str, Any] = {"device": "cpu", "limit": 0, "vocabulary": tmp_path / f"{name}.gguf"}
        with pytest.raises(UserError, match=f"--target-gguf=.*{name}.gguf: .*{says}"):
            exported(drafter, "block", "debug", folders, **words)
        assert not (tmp_path / "out").exists()


def test_a_format_that_cannot_be_compared_leaves_the_verdicts_of_the_others(
    tmp_path: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(TransformersReader, "generate", broken)
    names = ("transformers", "speculators")
    folders = {name: tmp_path / "out" / name for name in names}
    first, second = exported(drafter, "block", "debug", folders, device="cpu", limit=1, max_new_tokens=8)
    assert "whole outputs" in first.lines[-2] and "can't run it: sizes do not match" in first.lines[-1]
    assert first.conclusion == "NOT COMPARED TO THE END" and not first.same
    assert second.conclusion == "THE SAME DRAFTER"


def test_nothing_is_written_where_one_format_refuses(tmp_path: Path, drafter: str) -> None:
    folders = {"dflash": tmp_path / "out" / "dflash", "dspark": tmp_path / "out" / "dspark"}
    with pytest.raises(UserError, match="block_layout=anchor_first"):
        exported(drafter, "block", "debug", folders, device="cpu", limit=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("role", ["block", "autoregressive"])
def test_a_place_that_cannot_be_written_is_said_before_anything_is_opened(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("align.common.claims.os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match="--out=.*out/dflash: .*can't be written"):
        exported("nowhere", role, "nowhere", {"dflash": tmp_path / "out/dflash"})
