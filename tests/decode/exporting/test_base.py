"""What formats share: the card, and the comparison of whole outputs."""

from __future__ import annotations

from pathlib import Path

from decode.exporting.base import Decoded
from decode.exporting.registry import FORMATS


def test_a_card_says_library_licence_tags_and_figures(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n| expected τ | 2 |\n")
    page = FORMATS["speculators"].card(tmp_path, "TARGET", "mine", 4).splitlines()
    assert page[:6] == [
        "---", "library_name: speculators", "base_model: TARGET", "license: mit",
        "tags: [speculative-decoding, discrete-diffusion, drafter]", "---",
    ]  # fmt: skip
    assert "# mine: drafts 4 tokens a pass for TARGET" in page and "    vllm serve FOLDER" in page
    assert page[-4:] == ["| measured in training | |", "|---|---|", "| expected τ | 2 |", ""]


def test_whole_outputs_are_alike_up_to_near_ties() -> None:
    texts = Decoded([[1], [2]], [[3, 4], [5, 6]], [[1] * 60, [0] * 60])
    assert texts.as_plain([[3, 4], [5, 7]]) == 1
    same, line = texts.alike([[1] * 60, [0] * 59 + [1]], 4)
    assert same and line.startswith("1 of 2 prompts accepted call for call alike; ours: 120 calls, τ 1.500")
    assert not texts.alike([[1] * 60, [0] * 55 + [1] * 5], 4)[0]
