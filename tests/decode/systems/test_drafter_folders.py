"""Drafters as they are typed: whether they exist, and of which kind they are."""

from pathlib import Path

import pytest

import decode
from align.config.drafter import DrafterConfig
from align.makers.standalone import make_causal
from decode.systems.construction import build
from decode.systems.drafter_folders import (
    DEFAULT_DRAFTER,
    NamedDrafter,
    check_methods,
    drafters_by_kind,
    drafters_for,
    kind_of,
    read_drafters,
    target_for,
    target_of,
)
from decode.systems.opening import OpenDrafters, open_drafters
from decode.systems.parsing import read_method
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.formats.standalone import save_causal, save_standalone
from specalign.lm.names import DEFAULT_TARGET
from tests.published_blocks import backbone, dflash_config, speculators_config, write


def test_drafters_are_typed_objects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    named = read_drafters(f"{tmp_path}, diffusion={tmp_path}")
    assert named == (NamedDrafter(str(tmp_path)), NamedDrafter(str(tmp_path), "diffusion"))
    assert ",".join(map(str, named)) == f"{tmp_path},diffusion={tmp_path}"
    assert read_drafters(None) == () and drafters_for(named, DEFAULT_TARGET) == named
    assert drafters_for((), DEFAULT_TARGET) == (NamedDrafter(str(DEFAULT_DRAFTER)),)
    for text, says in (
        ("difusion=c", "unknown kind 'difusion'.*'diffusion'"),
        ("lookup", "must be a folder"),
        ("debug", "no such folder, and not an available hub id"),
    ):
        with pytest.raises(UserError, match=says):
            read_drafters(text)
    for spec in ("debug", "some/where/model.gguf"):  # any target may draft
        assert read_drafters(f"autoregressive={spec}") == (NamedDrafter(spec, "autoregressive"),)


def test_kinds_by_files(parts: OpenDrafters, tmp_path: Path) -> None:
    save_standalone(parts["diffusion"], tmp_path / "sedd")
    small = make_causal(parts.target, DrafterConfig(kind="autoregressive", layers=2))
    save_causal(small, tmp_path / "small")
    assert kind_of(str(tmp_path / "sedd")) == "diffusion"
    assert kind_of(str(DEFAULT_DRAFTER)) == "block"
    assert kind_of(str(tmp_path / "small")) == kind_of(DEFAULT_TARGET) == "autoregressive"
    method = read_method("autoregressive")
    opened = open_drafters([method], {"autoregressive": str(tmp_path / "small")}, parts.target)
    assert build(method, opened).drafter is not None
    decoder = decode.load(parts.target, tmp_path / "small", draft_tokens=3, copying=False)
    assert decoder.name == "autoregressive" and decoder.drafter.draft_tokens == 3  # type: ignore[union-attr]
    with pytest.raises(UserError, match="block=.*not a drafter of kind block"):
        open_drafters([read_method("block")], {"block": str(tmp_path / "sedd")}, parts.target)
    with pytest.raises(UserError, match="both of kind diffusion"):
        drafters_by_kind([NamedDrafter(str(tmp_path / "sedd"))] * 2)
    for kind in ("block", "variable_prefix"):
        with pytest.raises(UserError, match=f"{kind}=.*that drafter is of kind diffusion"):
            drafters_by_kind(read_drafters(f"{kind}={tmp_path / 'sedd'}"))


def test_a_second_block_drafter(parts: OpenDrafters, tmp_path: Path) -> None:
    first = parts["block"]
    save_drafter(first, tmp_path / "first")
    first.config.extra["prefix_decay"] = 4.0
    save_drafter(first, tmp_path / "second")
    del first.config.extra["prefix_decay"]
    both = drafters_by_kind(read_drafters(f"{tmp_path / 'first'},{tmp_path / 'second'}"))
    assert both == {"block": str(tmp_path / "first"), "variable_prefix": str(tmp_path / "second")}
    notes: list[str] = []
    drafters_by_kind(read_drafters(f"variable_prefix={tmp_path / 'first'}"), notes.append)
    assert "was not trained to continue a drafted prefix" in notes[0]
    with pytest.raises(UserError, match="did you mean .*first"):
        read_drafters(str(tmp_path / "firts"))


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_other_engines_folders_are_blocks(parts: OpenDrafters, tmp_path: Path, layout: str) -> None:
    target = parts.target
    config = speculators_config(target, draft_vocab_size=260)
    config = dflash_config(target) if layout == "dflash" else config
    folder = str(write(tmp_path / "theirs", config, backbone(target)))
    named = read_drafters(folder)
    assert drafters_by_kind(named) == {"block": folder}
    check_methods([read_method("block")], named)
    with pytest.raises(UserError, match="needs a drafter of kind diffusion"):
        check_methods([read_method("specdiff")], named)
    assert target_of(folder) == (None if layout == "dflash" else "some/model")
    plain = decode.load(target, None).generate([4, 90, 17], max_new_tokens=12)
    drafted = decode.load(target, folder).generate([4, 90, 17], max_new_tokens=12)
    assert drafted.tokens == plain.tokens


def test_the_target_that_a_drafter_was_made_for(parts: OpenDrafters, tmp_path: Path) -> None:
    own, parts["block"].config.target = parts["block"].config.target, "runs/finetuned"
    save_drafter(parts["block"], tmp_path)
    parts["block"].config.target = own
    assert target_for("org/model", str(tmp_path)) == "org/model"
    with pytest.raises(UserError, match="no such folder: runs/finetuned.*use --target"):
        target_for(None, str(tmp_path))
    assert target_for(None, "nowhere") == DEFAULT_TARGET
