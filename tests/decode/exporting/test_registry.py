"""Every format has a name, a maker and lines that serve it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from align.target.model import Target
from decode.exporting.registry import FORMATS
from decode.method_names import EXPORTS
from tests.builders import block_network


def test_names_are_those_of_the_command_and_every_line_names_the_folder(target: Target) -> None:
    config = block_network(target, "taps").config
    assert {*FORMATS, "draft_model"} == set(EXPORTS)
    for name, form in FORMATS.items():
        lines = form.serve(config, "FOLDER")
        assert lines and any("FOLDER" in line for line in lines), name


@pytest.mark.parametrize(
    ("layout", "rank", "kind"),
    [("fill_in", 0, "draft-dflash"), ("anchor_first", 0, "draft-dspark"), ("fill_in", 4, "draft-dspark")],
)
def test_llama_cpp_is_told_how_to_read_a_file(target: Target, layout: str, rank: int, kind: str) -> None:
    """It reads any file either way, and the other one drafts next to nothing that is right."""
    config = replace(block_network(target, "taps", markov_rank=rank).config, block_layout=layout)
    (line,) = FORMATS["gguf"].serve(config, "FOLDER")
    assert f"--spec-type {kind} " in line and f"--spec-draft-n-max {config.block_size}" in line
