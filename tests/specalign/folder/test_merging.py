"""Exports for a target that is an adapter: the printed lines serve what the drafter was trained for, never the base alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from decode import export
from decode.exporting.serving import merge_snippet, merged_name
from specalign.formats.block import save_drafter
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import block_network


def write_adapter(folder: Path) -> str:
    """An adapter in `my adapter` of a model in `base`, both in that folder; returns the adapter's folder."""
    model, tokenizer = debug_model("Llama")
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    changed = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for name, weight in changed.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.5)
    changed.peft_config["default"].base_model_name_or_path = str(folder / "base")
    changed.save_pretrained(folder / "my adapter")
    return str(folder / "my adapter")


def check_lines_merge(adapter: str) -> None:
    """The lines write a model that is the adapter's target."""
    snippet = merge_snippet(adapter)
    assert snippet is not None
    exec("\n".join(snippet.lines), {})
    merged, target = (
        load_target(name, "float32", fast=False) for name in (merged_name(adapter), adapter)
    )
    tokens = torch.arange(4, target.vocab_size)[None]
    logits = target.forward(tokens).logits_BLV
    torch.testing.assert_close(merged.forward(tokens).logits_BLV, logits, atol=1e-4, rtol=1e-4)
    assert merged.eos_ids == target.eos_ids
    assert merged.chat_tokens("ab") == target.chat_tokens("ab")


def test_the_lines_write_what_the_drafter_was_trained_for(tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path))
    check_lines_merge(str(folder))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    check_lines_merge(str(folder))


@pytest.mark.parametrize("push", [False, True])
def test_an_export_serves_the_merged_model(
    push: bool,
    tmp_path: Path,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, out, drafter = write_adapter(tmp_path), tmp_path / "out", tmp_path / "drafter"
    save_drafter(
        block_network(target, "taps", whole=True, options={"block_layout": "fill_in"}), drafter
    )
    words = [
        "--drafter",
        str(drafter),
        "--target",
        adapter,
        "--format",
        "speculators",
        "--out",
        str(out),
    ]
    if push:
        words += ["--push", "me/drafter"]
        monkeypatch.setattr(export, "_push", lambda *a: export.check_public(a[0], a[3], {}))
    export.main([*words, "--device", "cpu", "--limit", "1", "--max-new-tokens", "4"])
    base = '"base"' if push else str(tmp_path / "base")
    merged = merged_name(adapter, push)
    for text in (capsys.readouterr().out, (out / "README.md").read_text()):
        _, merges, served = text.partition("merge_and_unload()")
        written, _, served = served.partition("tokenizer.save_pretrained(")
        assert merges and f'model.save_pretrained("{merged}")' in written
        assert base not in served.replace(merged, "").replace(adapter, "") and merged in served
    for path in out.rglob("*.json"):
        if path.name in ("config.json", "specalign_export.json"):
            assert str(tmp_path / "base") not in path.read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == merged
