"""What formats share: the card, and the comparison of whole outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from align.models.block_config import BlockConfig
from align.target.model import Target
from decode.exporting.registry import FORMATS
from tests.builders import block_network


def named(target: Target, name: str) -> BlockConfig:
    return replace(block_network(target, "taps").config, block_size=4, target=name)


def test_a_card_says_library_licence_tags_and_figures(tmp_path: Path, target: Target) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n| expected τ | 2 |\n")
    page = FORMATS["speculators"].card(tmp_path, named(target, "org/TARGET"), "mine").splitlines()
    assert page[:6] == [
        "---", "library_name: speculators", "base_model: org/TARGET", "license: mit",
        "tags: [speculative-decoding, discrete-diffusion, drafter]", "---",
    ]  # fmt: skip
    assert "# mine: drafts 4 tokens a pass for org/TARGET" in page and "    vllm serve FOLDER" in page
    assert page[-4:] == ["| measured in training | |", "|---|---|", "| expected τ | 2 |", ""]


def test_a_card_shows_names_as_text(tmp_path: Path, target: Target) -> None:
    page = FORMATS["speculators"].card(tmp_path, named(target, "<img src=x>"), "[a](b)").splitlines()
    assert "# [a]\\(b): drafts 4 tokens a pass for &lt;img src=x&gt;" in page


def test_a_card_names_the_engine_that_reads_its_folder(tmp_path: Path, target: Target) -> None:
    page = FORMATS["gguf"].card(tmp_path, named(target, "org/TARGET"), "mine").splitlines()
    assert page[1] == "library_name: llama.cpp" and any("llama-server" in line for line in page)
