"""Drafters as they are given: there or not, and of what kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import decode
from align.common.errors import UserError
from decode.systems.construction import build, open_parts
from decode.systems.drafter_folders import (
    drafters_by_role,
    given_drafters,
    possible_roles,
    read_drafters,
    role_of,
    target_for,
    target_of,
)
from decode.systems.parsing import read_method
from decode.systems.proposers import OpenDrafters
from tests.published_blocks import backbone, dflash_config, speculators_config, write


def test_drafters_by_kind() -> None:
    assert read_drafters("a/b,diffusion=c") == [(None, "a/b"), ("diffusion", "c")]
    assert read_drafters(None, "shipped") == [(None, "shipped")]
    with pytest.raises(UserError, match="unknown kind 'difusion'.*'diffusion'"):
        read_drafters("difusion=c")


def test_what_a_folder_is(parts: OpenDrafters, tmp_path: Path) -> None:
    from align.config.drafter import DrafterConfig
    from align.makers.causal import make_causal
    from align.models.checkpoints.causal import save_causal
    from align.models.checkpoints.standalone import save_standalone
    from decode.systems.drafter_folders import DEFAULT_DRAFTER

    save_standalone(parts.diffusion, tmp_path / "sedd")
    save_causal(make_causal(parts.target, DrafterConfig(kind="autoregressive", layers=2)), tmp_path / "small")
    assert role_of(str(tmp_path / "sedd")) == "diffusion" and role_of(str(DEFAULT_DRAFTER)) == "block"
    assert role_of(str(tmp_path / "small")) == "autoregressive"
    (tmp_path / "odd").mkdir()
    for named in (5, {"a": 1}, [None], [{}], "LlamaForCausalLM"):
        (tmp_path / "odd/config.json").write_text(json.dumps({"model_type": "llama", "architectures": named}))
        assert role_of(str(tmp_path / "odd")) == "diffusion"
    assert (
        role_of("HuggingFaceTB/SmolLM2-135M-Instruct") == "autoregressive"
    )  # a package's model, where there is no hub
    opened = open_parts(
        [read_method("autoregressive")], {"autoregressive": str(tmp_path / "small")}, parts.target
    )
    assert build(read_method("autoregressive"), opened).drafter is not None
    decoder = decode.load(parts.target, tmp_path / "small", draft_tokens=3, copying=False)
    assert decoder.name == "autoregressive" and decoder.drafter.draft_tokens == 3  # type: ignore[union-attr]
    with pytest.raises(UserError, match="block=.*no drafter of the kind block"):
        open_parts([read_method("block")], {"block": str(tmp_path / "sedd")}, parts.target)


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_another_engines_folder_is_a_block_drafter(parts: OpenDrafters, tmp_path: Path, layout: str) -> None:
    """Known by its config.json, before anything is loaded, with the target that it names; and it decodes."""
    target = parts.target
    config = dflash_config(target) if layout == "dflash" else speculators_config(target, draft_vocab_size=260)
    folder = str(write(tmp_path / "theirs", config, backbone(target)))
    assert role_of(folder) == "block" and possible_roles(folder) == {"block": folder}
    assert drafters_by_role(f"block={folder}") == {"block": folder}
    assert target_of(folder) == (None if layout == "dflash" else "some/model")
    plain = decode.load(target, None).generate([4, 90, 17], max_new_tokens=12)
    drafted = decode.load(target, folder).generate([4, 90, 17], max_new_tokens=12)
    assert drafted.tokens == plain.tokens


def test_a_second_drafter_says_so_itself(parts: OpenDrafters, tmp_path: Path) -> None:
    from align.models.checkpoints.block import save_drafter

    first = parts.block
    save_drafter(first, tmp_path / "first")
    first.config.extra["prefix_decay"] = 4.0
    save_drafter(first, tmp_path / "second")
    del first.config.extra["prefix_decay"]
    both = drafters_by_role(f"{tmp_path / 'first'},{tmp_path / 'second'}")
    assert both == {"block": str(tmp_path / "first"), "variable_prefix": str(tmp_path / "second")}
    with pytest.raises(UserError, match="did you mean .*first"):
        drafters_by_role(str(tmp_path / "firts"))


def test_an_autoregressive_drafter_is_named_as_a_target_is() -> None:
    """`debug`, a registry package or a GGUF file are no folders."""
    for spec in ("debug", "wheel:nobody", "some/where/model.gguf"):
        assert given_drafters(f"autoregressive={spec}") == [("autoregressive", spec)]
    with pytest.raises(UserError, match="no such folder, and no hub id that can be had"):
        given_drafters("debug")


def test_a_method_by_name_from_python(parts: OpenDrafters, tmp_path: Path) -> None:
    from align.models.checkpoints.standalone import save_standalone

    save_standalone(parts.diffusion, tmp_path / "sedd")
    decoder = decode.load("debug", tmp_path / "sedd", method="specdiff:gamma=5:steps=2", dtype="float32")
    assert decoder.name == "diffusion" and decoder.drafter.draft_tokens == 5  # type: ignore[union-attr]
    with pytest.raises(UserError, match="options behind colons: method='specdiff:nodes=0:steps=2'"):
        decode.load("debug", tmp_path / "sedd", method="specdiff", steps=2, tree_nodes=0)
    with pytest.raises(UserError, match="method 'plain:steps=2': unknown option 'steps'"):
        decode.load("debug", method="plain", steps=2)
    with pytest.raises(UserError, match="unknown method 'specdif'"):
        decode.load("debug", method="specdif")
    with pytest.raises(UserError, match="both of the kind diffusion"):
        drafters_by_role(f"{tmp_path / 'sedd'},{tmp_path / 'sedd'}")
    for role in ("block", "variable_prefix"):
        with pytest.raises(UserError, match=f"--drafter {role}=.*that is a drafter of the kind diffusion"):
            drafters_by_role(f"{role}={tmp_path / 'sedd'}")


def test_the_target_that_a_drafter_was_made_for(parts: OpenDrafters, tmp_path: Path) -> None:
    """Its own, unless another is named; a folder that is gone since is said with the option that names another."""
    from align.models.checkpoints.block import save_drafter

    own, parts.block.config.target = parts.block.config.target, "runs/finetuned"
    save_drafter(parts.block, tmp_path)
    parts.block.config.target = own
    assert target_for("org/model", str(tmp_path)) == "org/model"
    with pytest.raises(UserError, match="no folder runs/finetuned here.*was made for it: --target names"):
        target_for(None, str(tmp_path))
    assert target_for(None, "nowhere") == "HuggingFaceTB/SmolLM2-135M-Instruct"
