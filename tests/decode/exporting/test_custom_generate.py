"""A `custom_generate` folder is compared as a user runs it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.engine.stock import stock_model
from decode.exporting.exports import ExportVerdict, compare_export, decode_greedily, export_drafter
from decode.exporting.formats import make_custom_generate, write_export
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from tests.builders import PROMPT, block_network, overfit_block_network
from tests.target_models import tiny_target

WHY = Prompt("a", "Why is the sky blue?")


def test_a_target_in_bf16_and_a_folder_that_loads_here(tmp_path: Path) -> None:
    """Its head stays in bf16, and what is written is in its model's dtype."""
    target = load_target("debug", "float32", "cpu")
    target.model.bfloat16().save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"), "float32", "cpu")
    save_drafter(block_network(target, "shared_kv", markov_rank=8), tmp_path / "drafter")
    drafter, out = str(tmp_path / "drafter"), tmp_path / "out"
    folders = {"custom_generate": out}
    (verdict,) = export_drafter(drafter, target, folders, prompts=[WHY])
    assert verdict.exit_code == 0 and "1 of 1 outputs equal" in verdict.lines[-1], verdict.lines
    sources = {p.name for p in (out / "custom_generate").iterdir()}
    assert sources == {"generate.py", "drafter.py", "requirements.txt"}
    load_drafter(out, target)


@pytest.mark.parametrize("fault", ["a tensor", "the code"])
def test_planted_faults(tmp_path: Path, target: Target, fault: str) -> None:
    drafter, out = overfit_block_network(target, PROMPT), tmp_path / "out"
    write_export("custom_generate", drafter, out, torch.float32, "")
    if fault == "a tensor":
        held = load_file(out / "model.safetensors")
        held["layers.0.self_attn.k_norm.weight"] *= -3
        save_file(held, out / "model.safetensors")
    else:
        source = out / "custom_generate" / "drafter.py"
        wrong = source.read_text().replace(
            '"rms_norm_eps"]', '"rms_norm_eps"] + self.config["head_dim"]'
        )
        source.write_text(wrong)
    verdict = ExportVerdict("custom_generate", out)
    compare_export(drafter, verdict, decode_greedily(drafter, [PROMPT], 20), stock_model(target))
    if fault == "a tensor":
        assert verdict.exit_code == 1 and "k_norm.weight differs" in verdict.lines[0]
    else:  # the output stays the model's, whatever the drafter
        assert verdict.exit_code == 3 and "1 of 1 outputs equal, " in verdict.lines[-1]


def test_what_the_format_does_not_hold(target: Target) -> None:
    last = block_network(target, "taps", options={"target_layers": [0, target.num_layers - 1]})
    with pytest.raises(UserError, match="is the target's last"):
        make_custom_generate(last)
    with pytest.raises(UserError, match="keeps state"):
        make_custom_generate(block_network(tiny_target("qwen3_next"), "taps", whole=True))
