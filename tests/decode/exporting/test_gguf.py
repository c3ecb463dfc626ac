"""Drafters as GGUF files: frequencies, vocabulary, what llama.cpp can't hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from decode.exporting.compare import ExportVerdict, GreedyText, compare_export
from decode.exporting.formats import MAKERS, read_export, write_export
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter
from specalign.formats.gguf import FILE
from specalign.lm.model import Target
from tests.builders import PROMPT, block_network
from tests.published_blocks import backbone, dflash_config, write

FILL_IN = {"block_layout": "fill_in"}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_half_precision(
    tmp_path: Path, target: Target, vocabulary: Path, dtype: torch.dtype
) -> None:
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    drafter.to(dtype).float()
    write_export("gguf", drafter, tmp_path / "out", dtype, "", vocabulary)
    verdict = ExportVerdict("gguf", tmp_path / "out")
    compare_export(drafter, verdict, [GreedyText(PROMPT, [5, 9])])
    assert verdict.exit_code == 0, verdict.lines
    assert {p.name for p in (tmp_path / "out").iterdir()} == {FILE, "README.md", "export.json"}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_frequencies_of_another_engines_drafter(
    tmp_path: Path, target: Target, vocabulary: Path, scaling: dict[str, Any] | None
) -> None:
    folder = write(
        tmp_path / "theirs", dflash_config(target, rope_scaling=scaling), backbone(target)
    )
    drafter = load_drafter(folder, target)
    write_export("gguf", drafter, tmp_path / "out", torch.float32, "", vocabulary)
    assert ("rope_freqs.weight" in read_export("gguf", tmp_path / "out").tensors) is (
        scaling is not None
    )
    verdict = ExportVerdict("gguf", tmp_path / "out")
    compare_export(drafter, verdict, [GreedyText(PROMPT, [5, 9])])
    assert verdict.exit_code == 0, verdict.lines


def test_what_the_file_does_not_hold(tmp_path: Path, target: Target, vocabulary: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    theirs = write(tmp_path / "theirs", dflash_config(target, rope_scaling=yarn), backbone(target))
    with pytest.raises(UserError, match="rope_type=yarn: the format holds fixed frequencies"):
        MAKERS["gguf"](load_drafter(theirs, target))
    drafter, out = block_network(target, "taps", whole=True, options=FILL_IN), tmp_path / "out"
    with pytest.raises(UserError, match="--target-gguf FILE"):
        write_export("gguf", drafter, out, torch.float32, "")
    raw = vocabulary.read_bytes()
    (tmp_path / "torn.gguf").write_bytes(raw[:100])
    at = raw.index(b"tokenizer.ggml.model") + len("tokenizer.ggml.model")
    (tmp_path / "long.gguf").write_bytes(
        raw[:at] + (9).to_bytes(4, "little") + raw[at + 4 :]
    )  # an endless array
    writer = GGUFWriter(tmp_path / "number.gguf", "llama")
    writer.add_uint32("tokenizer.ggml.tokens", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in ("torn", "long", "number"):
        with pytest.raises(UserError, match=f"--target-gguf=.*{name}.gguf: can't be read"):
            write_export("gguf", drafter, out, torch.float32, "", tmp_path / f"{name}.gguf")
    assert not out.exists()
