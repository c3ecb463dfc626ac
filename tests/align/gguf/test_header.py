"""What a GGUF file's header says, and what is wrong with it, before torch is there."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from align.common.errors import UserError
from align.gguf.header import check_known, read_by_transformers, read_header
from tests.target_models import tiny_model


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf_file(path: Path, *pairs: bytes, tensors: bytes = b"", count: int = 0) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, len(pairs)) + b"".join(pairs) + tensors)
    return path


ARCHITECTURE = pair("general.architecture", 8, text("qwen3"))


def test_numbers_texts_and_types_of_tensors_are_read(tmp_path: Path) -> None:
    numbers = struct.pack("<IQ3I", 4, 3, 1, 2, 3)
    texts = struct.pack("<IQ", 8, 2) + text("a") + text("bc")
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 1, 2)
    tensors = b"".join(
        text(name) + struct.pack("<I2QIQ", 2, 4, 4, kind, 0)
        for name, kind in (("a", 0), ("b", 12), ("c", 12))
    )
    path = gguf_file(
        tmp_path / "a.gguf",
        ARCHITECTURE,
        pair("n", 9, numbers),
        pair("t", 9, texts),
        pair("x", 9, nested),
        pair("qwen3.block_count", 4, struct.pack("<I", 7)),
        pair("eps", 6, struct.pack("<f", 0.5)),
        tensors=tensors,
        count=3,
    )
    header = read_header(path)
    assert header.architecture == "qwen3" and header.values["eps"] == 0.5 and header.types == {0: 1, 12: 2}
    assert header.sizes == {"num_hidden_layers": 7} and not {"n", "t", "x"} & header.values.keys()


def deep() -> bytes:
    return pair("x", 9, struct.pack("<IQ", 9, 1) * 20000)


@pytest.mark.parametrize(
    "content",
    [
        b"GGUX" + bytes(40),
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 99, b""),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 8, struct.pack("<Q", 1 << 40)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + deep(),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<I", 1 << 31) + bytes(90),
    ],
)
def test_what_is_no_header_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.gguf: not a readable GGUF file"):
        read_header(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (
            [pair("general.architecture", 8, text("gemma33"))],
            "'gemma33' is not supported .did you mean 'gemma3'",
        ),
        ([], "architecture 'None' is not supported"),
        ([pair("general.architecture", 8, text("gpt-oss"))], "reader leaves out the experts of 'gpt-oss'"),
        (
            [pair("general.architecture", 8, text("gemma4"))],
            "reader leaves out the layers' scales of 'gemma4'",
        ),
        ([pair("general.architecture", 8, text("deci"))], "reader has no model for 'deci'"),
        (
            [pair("general.architecture", 8, text("mistral"))],
            "knows no tensors .llama.cpp's files of Mistral say 'llama'. of 'mistral'",
        ),
    ],
)
def test_what_no_reader_knows_is_refused(tmp_path: Path, pairs: list[bytes], says: str) -> None:
    path = gguf_file(tmp_path / "a.gguf", *pairs)
    with pytest.raises(UserError, match=says):
        check_known(path, read_header(path))


def test_known_architectures_are_transformers_own() -> None:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    theirs: set[Any] = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS}
    theirs -= {"general", "tokenizer", "t5", "t5encoder", "umt5"}
    assert {"gemma3", "phi3", "qwen35", "qwen35moe"} <= read_by_transformers() == theirs


def test_what_is_said_of_the_reader_is_so() -> None:
    """llama.cpp writes Gemma 4's scales as `layer_output_scale.weight`."""
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = get_gguf_hf_weights_map(tiny_model("gemma4_text", 260), TensorProcessor())
    assert {n for n in names if n.startswith("blk.0.layer_output_scale")} == {"blk.0.layer_output_scale"}
    assert "deci" not in CONFIG_MAPPING
    assert "mistral" not in gguf.MODEL_ARCH_NAMES.values()


def test_commands_refuse_it_before_torch_is_imported(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "a.gguf", pair("general.architecture", 8, text("bert")))
    code = (
        "import sys; from align.target.names import check_name\n"
        f"try: check_name({str(path)!r})\nexcept Exception as e: print(e, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "architecture 'bert' is not supported" in out and out.strip().endswith("False False")
