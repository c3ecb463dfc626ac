"""`decode.load`: a decoder from names and folders, and what it refuses."""

from __future__ import annotations

import inspect
from pathlib import Path
from rlcompleter import Completer
from typing import Any

import pytest
import torch

import decode
from align.common.errors import UserError
from align.common.files import sha256_file
from align.models.checkpoints.block import save_drafter
from align.target.loading import load_target, reload
from align.target.model import Target
from align.target.names import DEFAULT_TARGET
from decode import Decoder, Sampling
from decode.drafters.block import BlockProposer
from decode.engine.call_options import check_options
from decode.systems import drafter_spec
from decode.systems import load as module
from tests.builders import PROMPT, switching_target
from tests.builders import block_network as network


@pytest.fixture(scope="module")
def target() -> Target:
    target = load_target("debug", dtype="float32", device="cpu")
    target.eos_ids = ()
    return target


def test_load(target: Target, tmp_path: Any) -> None:
    assert decode.load(target, None).drafter is None and decode.load(target, "none").name == "plain"
    assert decode.load(target, "lookup", draft_tokens=5).drafter.draft_tokens == 5  # type: ignore[union-attr]
    for drafter, line in (
        ("lokup", "did you mean 'lookup'"),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "missing"), "no such folder, and no hub id that can be had"),
    ):
        with pytest.raises(UserError, match=line):
            decode.load("never/loaded", drafter)
    for method, line in (("tolerator", "drafter='diffusion=FOLDER'"), ("drafter", "needs drafter='FOLDER'")):
        with pytest.raises(UserError, match=line):
            decode.load("never/loaded", method=method)
    with pytest.raises(UserError, match="did you mean 'token'"):
        decode.load("never/loaded", "lookup", "tokens")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, target: Target) -> list[str]:
    """Names of targets that were loaded, in whose place the debug target comes."""
    found: list[str] = []

    def load(spec: str, *given: Any, **options: Any) -> Target:
        found.append(" ".join([spec, *given]))
        return target

    monkeypatch.setattr(module, "load_target", load)
    return found


def test_without_a_drafter_the_shipped_one_is_taken(
    target: Target, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    save_drafter(network(target, "shared_kv"), tmp_path)
    monkeypatch.setattr(drafter_spec, "DEFAULT_DRAFTER", tmp_path)
    assert decode.load().name == "block+lookup" and decode.load(DEFAULT_TARGET, "auto").name == "block+lookup"
    assert decode.load(DEFAULT_TARGET, method="drafter").name == "block"
    assert capsys.readouterr().err == ""
    assert decode.load(DEFAULT_TARGET, None).name == decode.load(DEFAULT_TARGET, "none").name == "plain"
    assert decode.load("owner/other").name == "lookup"
    assert (
        capsys.readouterr().err == "note: no drafter is shipped for owner/other: drafting by prompt lookup\n"
    )
    assert decode.load(target).name == "lookup"
    assert repr(decode.load(target)) == "<Decoder of debug: lookup, verifier auto>"


def test_a_copy_of_the_packaged_target_has_the_shipped_drafter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy, other = tmp_path / "a copy.gguf", tmp_path / "other.gguf"
    copy.write_bytes(b"GGUF, the same")
    other.write_bytes(b"GGUF, another one")
    entry = ("package", "1.0", "member", sha256_file(copy))
    monkeypatch.setattr(drafter_spec, "WHEELS", {DEFAULT_TARGET: entry})
    assert drafter_spec.shipped_for(str(copy)) == str(drafter_spec.DEFAULT_DRAFTER)
    assert drafter_spec.shipped_for("wheel:package") == str(drafter_spec.DEFAULT_DRAFTER)
    assert drafter_spec.shipped_for(str(other)) is drafter_spec.shipped_for(str(tmp_path)) is None


def test_paths_and_torch_objects(opened: list[str], target: Target, tmp_path: Path) -> None:
    save_drafter(network(target, "shared_kv"), tmp_path / "d")
    dtype, device = torch.float32, torch.device("cpu")
    decoder = decode.load(tmp_path / "m", tmp_path / "d", dtype=dtype, device=device)
    assert decoder.name == "block+lookup" and opened == [f"{tmp_path / 'm'} float32 cpu"]
    assert decode.load(target, method="block", drafter=tmp_path / "d").name == "block"
    for wrong, line in ((3, "a GGUF file, not int"), (target.model, "in memory decodes with")):
        with pytest.raises(UserError, match=line):
            decode.load(wrong)  # type: ignore[arg-type]


def test_completion_and_star_import() -> None:
    assert {*decode.__all__} <= {*dir(decode)} and "import_module" not in dir(decode)
    assert {
        name.removeprefix("decode.").rstrip("(")
        for name in Completer({"decode": decode}).attr_matches("decode.l")
    } == {"load"}
    for name in decode.__all__:
        assert getattr(decode, name).__name__ == name


def test_template_switches_and_system_prompt(target: Target, tmp_path: Path) -> None:
    """Of a target in a folder: each changes the prompt as a conversation with them would."""
    plain, own = load_target("debug", fast=False), switching_target()
    plain.model.save_pretrained(tmp_path)
    own.tokenizer.save_pretrained(tmp_path)
    folder = str(tmp_path)
    decoder = decode.load(folder, template_kwargs={"enable_thinking": False}, system="Be brief.")
    text = decoder.target.tokenizer.decode(decoder.target.chat_tokens("Hi"))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>") and text.endswith("assistant\n<none>")
    assert reload(decoder.target).chat == decoder.target.chat
    with pytest.raises(UserError, match="has no switch 'enable_thinkin'.*did you mean 'enable_thinking'"):
        decode.load(folder, template_kwargs={"enable_thinkin": False})
    with pytest.raises(UserError, match="belong to the target, which is loaded: give them to load_target"):
        decode.load(target, system="Be brief.")
    with pytest.raises(UserError, match="draft_tokens=0"):
        decode.load(target, "lookup", draft_tokens=0)
    assert decode.UserError is UserError


def test_an_option_that_it_does_not_have() -> None:
    with pytest.raises(UserError, match="no option 'draftr' .did you mean 'drafter'"):
        decode.load("never/loaded", draftr="lookup")
    with pytest.raises(
        UserError, match="decode.load has no option 'temperature': it is an option of generate"
    ):
        decode.load("never/loaded", temperature=0.7)
    for name in inspect.signature(decode.load).parameters:
        with pytest.raises(
            UserError, match=f"generate has no option '{name}': it is an option of decode.load"
        ):
            check_options("generate", [name])


@pytest.mark.parametrize("drafter", ["lookup", "none", None])
def test_options_of_trained_drafters_are_refused_for_others(target: Target, drafter: str | None) -> None:
    for option in ({"tree_nodes": 3}, {"steps": 2}, {"order": "random"}, {"drafter_tokenizer": "debug"}):
        with pytest.raises(UserError, match=next(iter(option))):
            decode.load(target, drafter, **option)  # type: ignore[arg-type]
    decoder = decode.load(target, drafter, "greedy", tree_nodes=0, draft_tokens=4, copying=True)
    plain = Decoder(target).generate(PROMPT, max_new_tokens=6)
    assert decoder.generate(PROMPT, max_new_tokens=6).tokens == plain.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_drafter_is_loaded_by_its_folder(target: Target, tmp_path: Path, dtype: str) -> None:
    net = network(target, "shared_kv", markov_rank=8)
    save_drafter(net, tmp_path, dtype=torch.float32)
    if dtype == "bfloat16":
        target = load_target("debug", dtype=dtype, device="cpu")
    assert decode.load(target, str(tmp_path)).name == "block+lookup"  # as decode.generate
    decoder = decode.load(target, str(tmp_path), copying=False)
    assert decoder.name == "block"
    for sampling in (Sampling(), Sampling(1.0, seed=0)):
        assert len(decoder.generate(PROMPT, max_new_tokens=20, sampling=sampling).tokens) > 0
    if dtype == "float32":
        own = Decoder(target, BlockProposer(net, tree_nodes=None)).generate(PROMPT, max_new_tokens=20)
        assert own.accepted == decoder.generate(PROMPT, max_new_tokens=20).accepted


def test_a_drafter_of_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    net = network(target, "taps")
    net.config.hidden_size = 32
    save_drafter(net, tmp_path)
    with pytest.raises(UserError, match="hidden_size is 32"):
        decode.load(target, tmp_path)
