"""Lines that start an engine: blocks of code, for the target as it opens here, with options that fit the machine."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from align.target.model import Target
from decode.exporting import serving
from decode.exporting.registry import FORMATS
from decode.exporting.serving import GIB, ServedTarget, Snippet, on_this_machine, opened_name
from tests.builders import block_network
from tests.target_models import asking_target, write_gguf


def test_a_snippet_is_a_block_by_itself() -> None:
    snippet = Snippet("vLLM", "bash", ("vllm serve 'a ```b'",))
    assert snippet.as_markdown() == ["With vLLM:", "", "````bash", "vllm serve 'a ```b'", "````", ""]
    assert snippet.as_text() == ["  with vLLM:", "", "      vllm serve 'a ```b'", ""]


def test_a_target_goes_by_the_name_that_opens_it(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder by its whole path, from wherever it is named; a GGUF file by its converted folder; a debug target by its name."""
    folder = asking_target(tmp_path / "my target", target)
    write_gguf(tmp_path / "target.gguf", target)
    monkeypatch.chdir(tmp_path)
    assert opened_name("my target") == folder and opened_name("debug") == "debug"
    converted = Path(opened_name("target.gguf"))
    assert converted.is_absolute() and (converted / "config.json").is_file()


def test_options_that_fit_come_from_the_targets_config(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its context where that fits into a quarter of the memory, else less; memory for it and for the drafter's layers."""
    folder = Path(asking_target(tmp_path / "target", target))
    values = json.loads((folder / "config.json").read_text())
    wide = {"num_hidden_layers": 64, "num_key_value_heads": 8, "num_attention_heads": 64, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps({**values, **wide, "max_position_embeddings": 40960}))
    config = block_network(target, "taps").config
    each = 2 * 4 * (64 * 8 * 128 + 2 * config.num_key_value_heads * config.head_dim)
    for memory, context in ((1000 * GIB, 40960), (16 * GIB, int(0.25 * 16 * GIB / (1.1 * each)))):
        monkeypatch.setattr(serving, "memory_bytes", lambda memory=memory: memory)
        found = on_this_machine(str(folder), "cpu", config)
        assert found.context == context and found.dtype == "float32"
        assert context * each <= found.cache_gib * GIB <= max(0.25 * memory, GIB) + GIB
        words = found.vllm_options
        assert words[:4] == ["--dtype", "float32", "--max-model-len", str(context)]
        assert words[4:6] == ["--kv-cache-memory-bytes", f"{found.cache_gib}G"]
    assert on_this_machine(str(folder), "cuda", config).vllm_options == []  # a GPU's engine knows its memory


def test_printed_lines_are_read_by_a_shell_as_they_were_meant(tmp_path: Path, target: Target) -> None:
    folder = asking_target(tmp_path / "it's my target", target)
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    out = str(tmp_path / "my export")
    served = on_this_machine(folder, "cpu", drafter.config)
    (snippet, *_) = FORMATS["dflash"].snippets(drafter, served, out)
    done = subprocess.run(
        ["bash", "-c", snippet.lines[0].replace("vllm", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["serve", folder] and json.loads(words[-1])["model"] == out
    assert shlex.split(snippet.lines[0])[1:] == words


@pytest.mark.parametrize("same", [True, False])
def test_a_folder_is_served_by_itself_only_if_it_names_a_target_that_opens(
    target: Target, same: bool
) -> None:
    """vLLM reads the target's name in a speculators folder; where another name opens the target, only the long line starts."""
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    drafter.config.target = "org/target"
    served = ServedTarget("org/target" if same else "/cache/target")
    snippets = FORMATS["speculators"].snippets(drafter, served, "F")
    assert [s.lines[0].startswith("vllm serve F") for s in snippets] == [False, *[True] * same]
