"""`decode.verify` calls honest pairs of every kind lossless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decode.verify import main
from specalign.formats.block import save_drafter
from specalign.formats.causal import save_causal
from specalign.formats.standalone import save_standalone
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import block_network, causal_drafter, diffusion_drafter
from tests.target_models import tiny_model
from tests.tokenizers import KINDS

pytestmark = pytest.mark.slow

STANDALONE = {"sedd": "ddit", "mdlm": "masked_lm", "other vocabulary": "ddit"}
PAIRS = [
    ("mistral", "block", "float32"),  # sliding window
    ("gemma3_text", "block", "float32"),  # sliding and full layers
    ("mixtral", "block", "bfloat16"),
    ("llama", "whole vocabulary", "float32"),
    ("llama", "sedd", "float32"),
    ("llama", "mdlm", "float32"),
    ("llama", "autoregressive", "float32"),
    ("llama", "other vocabulary", "float32"),
    ("mamba", "block", "float32"),
    ("qwen3_next", "block", "float32"),  # recurrent and full layers
]
"""Architecture of the target, drafter, dtype. The drafter `block` has a part of the vocabulary."""


def write_target(kind: str, folder: Path) -> Target:
    tokenizer = debug_model("Llama")[1]
    tiny_model(kind, len(tokenizer), max_position_embeddings=8192).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(str(folder), dtype="float32", device="cpu")


def write_drafter(kind: str, target: Target, folder: Path) -> list[str]:
    """Write a drafter. Returns the arguments that name it."""
    if kind == "lookup":
        return ["--drafter", "lookup"]
    named = ["--drafter", str(folder)]
    if kind == "autoregressive":
        save_causal(causal_drafter(target), folder)
    elif kind in STANDALONE:
        if kind == "other vocabulary":
            tokenizer = KINDS["unigram"]()
            tokenizer.save_pretrained(str(folder.parent / "tokenizer"))
            target.vocab_size = len(tokenizer)
            named += ["--drafter-tokenizer", str(folder.parent / "tokenizer")]
        save_standalone(diffusion_drafter(target, STANDALONE[kind]), folder)
    else:
        save_drafter(block_network(target, "taps", 8, whole=kind == "whole vocabulary"), folder)
    return named


@pytest.mark.parametrize(("kind", "drafter", "dtype"), PAIRS)
def test_an_honest_pair_is_lossless(kind: str, drafter: str, dtype: str, tmp_path: Path) -> None:
    named = write_drafter(drafter, write_target(kind, tmp_path / "target"), tmp_path / "drafter")
    prompts = ["--suite", "builtin", "--limit", "2", "--max-new-tokens", "12"]
    main(
        [
            "--target",
            str(tmp_path / "target"),
            *named,
            "--dtype",
            dtype,
            *prompts,
            "--out",
            str(tmp_path / "v"),
        ]
    )
    counts = {
        c["check"]: c["counts"]
        for c in json.loads((tmp_path / "v" / "verdict.json").read_text())["checks"]
    }
    assert counts["rows"]["logits of a node"] > 200
    assert counts["randomness"]["outcomes of rounds"] > 100


def test_prompts_of_3000_tokens(tmp_path: Path) -> None:
    target = write_target("mistral", tmp_path / "target")
    named = write_drafter("block", target, tmp_path / "drafter")
    words = " ".join(f"item {i * i % 997}" for i in range(290))
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}. {words}"}) + "\n" for n in "ab")
    )
    given = ["--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8"]
    main(["--target", str(tmp_path / "target"), *named, *given, "--out", str(tmp_path / "v")])
    record = json.loads((tmp_path / "v" / "verdict.json").read_text())
    assert record["pair"]["prompts"] == 2
