"""Every format has a name, a maker and lines that serve it."""

from __future__ import annotations

import ast
import shlex
from dataclasses import replace
from typing import Any

import pytest

from align.target.model import Target
from decode.exporting.registry import FORMATS, sglang_line
from decode.method_names import EXPORTS
from tests.builders import block_network


def test_names_are_those_of_the_command_and_every_line_names_the_folder(target: Target) -> None:
    config = block_network(target, "taps").config
    assert {*FORMATS, "draft_model"} == set(EXPORTS)
    for name, form in FORMATS.items():
        lines = form.serve(config, "FOLDER")
        assert lines and any("FOLDER" in line for line in lines), name


@pytest.mark.parametrize(
    ("name", "options", "served"),
    [
        ("dspark", {}, ("vllm", "sglang")),
        ("dspark", {"markov_rank": 4, "markov": "linear"}, ("vllm", "sglang")),
        ("dspark", {"markov_rank": 4, "markov": "linear", "draft_vocab_size": 9}, ("vllm",)),
        ("dspark", {"markov_rank": 4, "markov": "tanh", "draft_vocab_size": 9}, ("sglang",)),
        ("dflash", {"draft_vocab_size": 9}, ("vllm", "sglang")),
        ("dflash", {"hidden_act": "gelu"}, ()),
        ("speculators", {"hidden_act": "gelu"}, ()),
    ],
)
def test_lines_are_those_of_engines_that_serve_it(
    target: Target, name: str, options: dict[str, Any], served: tuple[str, ...]
) -> None:
    config = replace(block_network(target, "taps", whole=True).config, **options)
    lines = FORMATS[name].serve(config, "FOLDER")
    assert len(lines) == len(served) and all(a in b for a, b in zip(served, lines, strict=True)), lines


def test_lines_name_folders_as_a_shell_and_python_read_them(target: Target) -> None:
    folder = "x 6'q \"z"
    config = block_network(target, "taps", whole=True).config
    for name, form in FORMATS.items():
        for line in form.serve(config, folder):
            if line.startswith(("vllm", "python", "llama")):
                assert any(folder in word.replace('\\"', '"') for word in shlex.split(line)), (name, line)
            elif "x 6" in line:
                assert any(
                    isinstance(node, ast.Constant) and node.value == folder
                    for node in ast.walk(ast.parse(line))
                ), line


@pytest.mark.parametrize(
    ("layout", "rank", "kind"),
    [("fill_in", 0, "draft-dflash"), ("anchor_first", 0, "draft-dspark"), ("fill_in", 4, "draft-dspark")],
)
def test_llama_cpp_is_told_how_to_read_a_file(target: Target, layout: str, rank: int, kind: str) -> None:
    """It reads any file either way, and the other one drafts next to nothing that is right."""
    config = replace(block_network(target, "taps", markov_rank=rank).config, block_layout=layout)
    (line,) = FORMATS["gguf"].serve(config, "FOLDER")
    assert f"--spec-type {kind} " in line and f"--spec-draft-n-max {config.block_size}" in line


def test_sglang_is_told_all_three_numbers_of_a_small_language_model_or_none() -> None:
    """It asserts that."""
    three = ("--speculative-num-steps 5", "--speculative-eagle-topk 1", "--speculative-num-draft-tokens 6")
    assert all(words in sglang_line("STANDALONE", "org/t", "F", 5) for words in three)
    assert [words in sglang_line("DFLASH", "org/t", "F", 5) for words in three] == [False, False, True]
