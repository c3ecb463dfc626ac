"""What formats share: the card, and the comparison of whole outputs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.models.block import BlockDrafter
from align.target.model import Target
from decode.engine.compiled import stock_model
from decode.exporting.registry import FORMATS
from decode.exporting.serving import ServedTarget
from decode.exporting.verdict import Decoded, Verdict
from tests.builders import PROMPT, block_network


def named(target: Target, name: str) -> BlockDrafter:
    drafter = block_network(target, "taps")
    drafter.config = replace(drafter.config, block_size=4, target=name)
    return drafter


def card_of(name: str, folder: Path, drafter: BlockDrafter) -> list[str]:
    """Lines of the card of an export into `my folder`."""
    form = FORMATS[name]
    served = ServedTarget(drafter.config.target)
    return form.card(folder, drafter, "mine", form.snippets(drafter, served, "my folder")).splitlines()


def test_a_card_says_library_licence_tags_and_figures(tmp_path: Path, target: Target) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n| expected τ | 2 |\n")
    page = card_of("speculators", tmp_path, named(target, "org/TARGET"))
    assert page[:6] == [
        "---", "library_name: speculators", "base_model: org/TARGET", "license: mit",
        "tags: [speculative-decoding, discrete-diffusion, drafter]", "---",
    ]  # fmt: skip
    assert "# mine: drafts 4 tokens a pass for org/TARGET" in page and "vllm serve 'my folder'" in page
    assert page[-4:] == ["| measured in training | |", "|---|---|", "| expected τ | 2 |", ""]


def test_lines_to_paste_are_fenced_in_a_card(tmp_path: Path, target: Target) -> None:
    for name in ("dflash", "speculators", "transformers", "gguf", "custom_generate"):
        page = card_of(name, tmp_path, named(target, "org/TARGET"))
        inside = False
        for line in page:
            if line.startswith("```"):
                inside = not inside
            elif line.startswith(("vllm ", "python ", "llama-server ", "out = ", "model = ")):
                assert inside, (name, line)
        assert not inside and any(line.startswith("```") for line in page)


def test_a_card_shows_names_as_text(tmp_path: Path, target: Target) -> None:
    drafter = named(target, "<img src=x>")
    page = FORMATS["speculators"].card(tmp_path, drafter, "[a](b)", []).splitlines()
    assert "# [a]\\(b): drafts 4 tokens a pass for &lt;img src=x&gt;" in page


def test_a_card_names_the_engine_that_reads_its_folder(tmp_path: Path, target: Target) -> None:
    page = card_of("gguf", tmp_path, named(target, "org/TARGET"))
    assert page[1] == "library_name: llama.cpp" and any("llama-server" in line for line in page)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dspark", {"markov_rank": 4, "markov": "vanilla"}, "can't run it: index .* \\(tensor d2t differs"),
        (
            "transformers",
            {"block_layout": "fill_in"},
            "can't be read .* \\(config.json: head_dim is 32, an export",
        ),
    ],
)
def test_what_an_engine_can_not_run_is_named_by_its_key(
    tmp_path: Path, target: Target, name: str, options: dict[str, Any], said: str
) -> None:
    drafter, out = block_network(target, "taps", options=options), tmp_path / "out"
    FORMATS[name].write(drafter, out, torch.float32, "")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    if name == "dspark":
        tensors["d2t"] += torch.arange(len(tensors["d2t"])) + target.vocab_size  # no offsets
    else:
        config["head_dim"] *= 2
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    verdict = Verdict(name, out)
    FORMATS[name].compare(drafter, verdict, stock_model(target), Decoded([PROMPT], [[1, 2]], [[0]]))
    assert re.search(said, verdict.lines[-1]), verdict.lines[-1]
    assert verdict.conclusion == "NOT THE SAME DRAFTER"
