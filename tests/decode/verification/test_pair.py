"""`decode.verify` calls honest pairs of every kind lossless."""

import json
from functools import partial
from pathlib import Path

import pytest

from decode.verification import batches, cases, end_to_end, rows, rules
from decode.verify import main
from specalign.formats.block import save_drafter
from specalign.formats.standalone import save_causal, save_standalone
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


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the settings, half of the cases, one rule and a shorter joint law: the pair of
    tests/decode/test_verify.py has all."""
    every, check = batches.settings, rules.check_rules
    monkeypatch.setattr(batches, "settings", lambda *given: every(*given)[::3])
    monkeypatch.setattr(rules, "check_rules", partial(check, seeds=2, names=("token",)))
    monkeypatch.setattr(end_to_end, "LENGTH", 3)
    monkeypatch.setattr(batches, "LONG", 200)
    for name in ("_OF_BLOCKS", "_OF_DIFFUSION"):
        compared, drawn = getattr(cases, name)
        half = dict(list(compared.items())[::2]), [drawn[i] for i in (0, 2, -1, 4)]
        monkeypatch.setattr(cases, name, half)


CAPTURED = [PAIRS[1], PAIRS[2], PAIRS[4], PAIRS[6]]
RUNS = [("eager", *pair) for pair in PAIRS] + [("captured", *pair) for pair in CAPTURED]


@pytest.mark.parametrize(("engine", "kind", "drafter", "dtype"), RUNS)
def test_an_honest_pair_is_lossless(
    engine: str, kind: str, drafter: str, dtype: str, tmp_path: Path
) -> None:
    target, out = str(tmp_path / "target"), tmp_path / "v"
    named = write_drafter(drafter, write_target(kind, Path(target)), tmp_path / "drafter")
    prompts = ["--suite", "builtin", "--limit", "2", "--max-new-tokens", "8"]
    options = ["--dtype", dtype, "--engine", engine]
    main(["--target", target, *named, *options, *prompts, "--out", str(out)])
    record = json.loads((out / "verdict.json").read_text())
    counts = {check["check"]: check["counts"] for check in record["checks"]}
    assert counts["rows"]["logits of a node"] > 150
    assert counts["randomness"]["outcomes of rounds"] > 80


def test_prompts_of_3000_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROUNDS", 1)
    target, out, prompts = str(tmp_path / "target"), tmp_path / "v", tmp_path / "p.jsonl"
    named = write_drafter("block", write_target("mistral", Path(target)), tmp_path / "drafter")
    words = " ".join(f"item {i * i % 997}" for i in range(290))
    prompts.write_text(json.dumps({"prompt": words}) + "\n")
    given = ["--prompts", str(prompts), "--max-new-tokens", "6"]
    main(["--target", target, *named, *given, "--out", str(out)])
    assert json.loads((out / "verdict.json").read_text())["pair"]["prompts"] == 1


def test_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = batches.settings
    monkeypatch.setattr(batches, "settings", lambda *given: every(*given)[::2])
    target = load_target("debug", dtype="float32", device="cpu")
    save_drafter(block_network(target, "shared_kv"), tmp_path / "block")
    save_standalone(diffusion_drafter(target, "masked_lm"), tmp_path / "diffusion")
    save_causal(causal_drafter(target), tmp_path / "autoregressive")
    folders = {kind: tmp_path / kind for kind in ("block", "diffusion", "autoregressive")}
    folders["variable_prefix"] = folders["block"]
    named = ",".join(f"{kind}={folder}" for kind, folder in folders.items())
    methods = ["--methods", "all,hierarchical:copying=true", "--suite", "builtin", "--limit", "1"]
    new, out = ["--max-new-tokens", "6"], tmp_path / "v"
    main(["--target", "debug", "--drafter", named, *methods, *new, "--out", str(out)])
    record = json.loads((out / "verdict.json").read_text())
    assert record["lossless"]
    assert {"d2sd", "specdiff2", "hierarchical"} <= {*record["pair"]["methods"]}
