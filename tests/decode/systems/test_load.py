"""`decode.load`: a decoder from names and folders, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

import decode
from decode import Decoder
from decode.proposers.block import BlockProposer
from decode.systems import drafter_folders
from decode.systems import load as module
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target, reload
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET
from tests.builders import PROMPT, switching_target
from tests.builders import block_network as network

pytestmark = pytest.mark.usefixtures("endless")


def test_what_is_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    for options, says in (
        ({"drafter": "lokup"}, "did you mean 'lookup'"),
        ({"drafter": str(tmp_path)}, "no config.json"),
        ({"drafter": str(tmp_path / "missing")}, "no such folder, and not an available hub id"),
        ({"method": "tolerator"}, "diffusion=FOLDER"),
        ({"method": "plain", "steps": 2}, "options after colons: method='plain:steps=2'"),
        ({"drafter": "lookup", "tree_nodes": 3}, "tree_nodes"),
        ({"drafter": None, "steps": 2}, "steps and order"),
        ({"engine": "capture"}, "did you mean 'captured'"),
    ):
        with pytest.raises(UserError, match=says):
            decode.load("never/loaded", **options)  # type: ignore[arg-type]


def test_compiled_rounds_need_a_gpu() -> None:
    with pytest.raises(UserError, match="engine=compiled needs a GPU"):
        decode.load("debug", None, device="cpu", engine="compiled")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, target: Target) -> list[str]:
    """Names of targets that were loaded; the debug target stands in for them."""
    found: list[str] = []

    def load(spec: str, *given: Any, **options: Any) -> Target:
        found.append(" ".join([spec, *given]))
        return target

    monkeypatch.setattr(module, "load_target", load)
    return found


def test_default_drafters(
    target: Target, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    save_drafter(network(target, "shared_kv"), tmp_path)
    monkeypatch.setattr(drafter_folders, "DEFAULT_DRAFTER", tmp_path)
    for given in ((), (DEFAULT_TARGET, "auto")):
        assert decode.load(*given).name == "block+lookup"
    assert decode.load(DEFAULT_TARGET, method="drafter").name == "block"
    assert capsys.readouterr().err == ""
    for none in (None, "none"):
        assert decode.load(DEFAULT_TARGET, none).name == "plain"
    assert decode.load("owner/other").name == "lookup"
    note = "note: no drafter is shipped for owner/other; drafting with prompt lookup\n"
    assert capsys.readouterr().err == note
    assert repr(decode.load(target)) == "<Decoder of debug: lookup, verifier auto>"


def test_template_switches_and_system_prompt(target: Target, tmp_path: Path) -> None:
    own = switching_target()
    load_target("debug", fast=False).model.save_pretrained(tmp_path)
    own.tokenizer.save_pretrained(tmp_path)
    folder = str(tmp_path)
    decoder = decode.load(folder, template_kwargs={"enable_thinking": False}, system="Be brief.")
    text = decoder.target.tokenizer.decode(decoder.target.chat_tokens("Hi"))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>") and text.endswith(
        "assistant\n<none>"
    )
    assert reload(decoder.target).chat == decoder.target.chat
    with pytest.raises(UserError, match="'enable_thinkin'.*did you mean 'enable_thinking'"):
        decode.load(folder, template_kwargs={"enable_thinkin": False})
    with pytest.raises(UserError, match="the target is already loaded; pass .* to load_target"):
        decode.load(target, system="Be brief.")


def test_a_saved_drafter_is_loaded_by_its_folder(target: Target, tmp_path: Path) -> None:
    net = network(target, "shared_kv", markov_rank=8)
    save_drafter(net, tmp_path, dtype=torch.float32)
    assert decode.load(target, str(tmp_path)).name == "block+lookup"
    decoder = decode.load(target, str(tmp_path), copying=False)
    own = Decoder(target, BlockProposer(net, tree_nodes=None)).generate(PROMPT, max_new_tokens=20)
    assert own.accepted == decoder.generate(PROMPT, max_new_tokens=20, adapt=False).accepted


def test_a_drafter_of_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    net = network(target, "taps")
    net.config.hidden_size = 32
    save_drafter(net, tmp_path)
    with pytest.raises(UserError, match="hidden_size is 32"):
        decode.load(target, tmp_path)
