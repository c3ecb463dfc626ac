"""Lines that serve an export: for engines that can, read as they were meant, with options that fit the machine."""

import ast
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.exporting import EXPORTS
from decode.exporting.formats import resolved_name, serve
from specalign.lm.model import Target
from tests.builders import block_network
from tests.target_models import asking_target, write_gguf


def test_names_of_targets(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder by its whole path, from wherever it is named; a GGUF file by its converted folder; a debug target by its name."""
    folder = asking_target(tmp_path / "my target", target)
    write_gguf(tmp_path / "target.gguf", target)
    monkeypatch.chdir(tmp_path)
    assert resolved_name("my target") == folder and resolved_name("debug") == "debug"
    converted = Path(resolved_name("target.gguf"))
    assert converted.is_absolute() and (converted / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "options", "served"),
    [
        ("dspark", {"draft_vocab_size": 9}, ("vllm",)),
        ("dspark", {"markov_rank": 4, "markov": "linear"}, ("vllm", "sglang")),
        ("dflash", {"draft_vocab_size": 9}, ("vllm", "sglang")),
        ("dflash", {"hidden_act": "gelu"}, ()),
    ],
)
def test_lines_are_those_of_engines_that_serve_it(
    target: Target, name: str, options: dict[str, Any], served: tuple[str, ...]
) -> None:
    config = replace(block_network(target, "taps", whole=True).config, **options)
    lines = [snippet.lines[0] for snippet in serve(name, config, target, "FOLDER")]
    assert len(lines) == len(served), lines
    assert all(engine in line for engine, line in zip(served, lines, strict=True)), lines


@pytest.mark.parametrize("folder", ["x 6'q \"z", "two  spaces/`tick`", "ein Ordner/é", "$HOME/a;b"])
def test_lines_quote_names(target: Target, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = block_network(target, "taps", whole=True).config
    monkeypatch.setattr("decode.exporting.formats.resolved_name", lambda name: folder)
    found = 0
    for form in EXPORTS:
        for snippet in serve(form, config, target, folder):
            if snippet.language == "bash":
                (line,) = snippet.lines
                assert sum(folder in word.replace('\\"', '"') for word in shlex.split(line)) >= 1, (
                    line
                )
            else:
                nodes = ast.walk(ast.parse("\n".join(snippet.lines)))
                assert sum(isinstance(n, ast.Constant) and n.value == folder for n in nodes) == 3
            found += 1
            text = snippet.as_text()
            indent = "" if snippet.language == "python" else "      "  # Python is pasted as it is
            assert all(f"{indent}{line}" in text for line in snippet.lines)
    assert found == 7
