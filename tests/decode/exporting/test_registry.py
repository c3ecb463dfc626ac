"""Every format has a name, a maker and lines that serve it."""

from __future__ import annotations

import ast
import shlex
from dataclasses import replace
from typing import Any

import pytest

from align.target.model import Target
from decode.exporting import EXPORTS
from decode.exporting.registry import FORMATS, sglang_line
from decode.exporting.serving import ServedTarget
from tests.builders import block_network

TARGET = ServedTarget("org/target")


def test_names_are_those_of_the_command_and_every_line_names_the_folder(target: Target) -> None:
    config = block_network(target, "taps").config
    assert {*FORMATS, "draft_model"} == set(EXPORTS)
    for name, form in FORMATS.items():
        lines = [line for snippet in form.serve(config, TARGET, "FOLDER") for line in snippet.lines]
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
    lines = [snippet.lines[0] for snippet in FORMATS[name].serve(config, TARGET, "FOLDER")]
    assert len(lines) == len(served) and all(a in b for a, b in zip(served, lines, strict=True)), lines


@pytest.mark.parametrize("folder", ["x 6'q \"z", "two  spaces/`tick`", "ein Ordner/é", "$HOME/a;b"])
def test_lines_name_folders_as_a_shell_and_python_read_them(target: Target, folder: str) -> None:
    config = block_network(target, "taps", whole=True).config
    served = ServedTarget(folder, gguf=f"{folder}.gguf")
    found = 0
    for form in FORMATS.values():
        for snippet in form.serve(config, served, folder):
            if snippet.language == "bash":
                (line,) = snippet.lines
                assert sum(folder in word.replace('\\"', '"') for word in shlex.split(line)) >= 1, line
            else:
                nodes = ast.walk(ast.parse("\n".join(snippet.lines)))
                assert sum(isinstance(n, ast.Constant) and n.value == folder for n in nodes) == 3
            found += 1
            assert snippet.as_markdown()[2].startswith("```") and all(
                line in snippet.as_markdown() for line in snippet.lines
            )
            indent = "" if snippet.language == "python" else "      "  # Python is pasted as it stands
            assert all(f"{indent}{line}" in snippet.as_text() for line in snippet.lines)
    assert found == 8


@pytest.mark.parametrize(
    ("layout", "rank", "kind"),
    [("fill_in", 0, "draft-dflash"), ("anchor_first", 0, "draft-dspark"), ("fill_in", 4, "draft-dspark")],
)
def test_llama_cpp_is_told_how_to_read_a_file(target: Target, layout: str, rank: int, kind: str) -> None:
    """It reads any file either way, and the other one drafts next to nothing that is right."""
    config = replace(block_network(target, "taps", markov_rank=rank).config, block_layout=layout)
    ((line,),) = (snippet.lines for snippet in FORMATS["gguf"].serve(config, TARGET, "FOLDER"))
    assert f"--spec-type {kind} " in line and f"--spec-draft-n-max {config.block_size}" in line


def test_sglang_is_told_all_three_numbers_of_a_small_language_model_or_none() -> None:
    """It asserts that."""
    three = ("--speculative-num-steps 5", "--speculative-eagle-topk 1", "--speculative-num-draft-tokens 6")
    lines = {name: sglang_line(name, TARGET, "F", 5).lines[0] for name in ("STANDALONE", "DFLASH")}
    assert all(words in lines["STANDALONE"] for words in three)
    assert [words in lines["DFLASH"] for words in three] == [False, False, True]


def test_a_line_that_starts_on_a_gpu_only_says_so(target: Target) -> None:
    """vLLM's build for CPUs has no DSpark."""
    config = block_network(target, "taps", whole=True).config
    here = ServedTarget("org/target", 512, 1, "float32")
    (snippet, _) = FORMATS["dspark"].serve(config, here, "FOLDER")
    assert "on a GPU" in snippet.engine and "--kv-cache-memory-bytes" not in snippet.lines[0]
    assert FORMATS["dspark"].serve(config, TARGET, "FOLDER")[0].engine == "vLLM"
    (snippet, _) = FORMATS["dflash"].serve(config, here, "FOLDER")
    assert snippet.engine == "vLLM" and "--kv-cache-memory-bytes 1G" in snippet.lines[0]
