"""Methods from their written form: values out of range, verifiers, what may not branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.folder.chat import Chat
from align.folder.trained_chat import save_chat
from align.models.checkpoints.block import save_drafter
from align.target.loading import load_target
from align.target.model import Target
from decode import Sampling
from decode.systems.construction import build, open_parts, verifier_of
from decode.systems.parsing import read_method, swept
from decode.systems.proposers import OpenDrafters
from decode.wrappers.adaptive import AdaptiveDrafter
from tests.builders import PROMPT, block_network
from tests.target_models import tiny_target


def test_values_out_of_range_name_the_method(parts: OpenDrafters) -> None:
    with pytest.raises(UserError, match="method 'specdiff2:candidates=0': candidates=0: must be 1 to"):
        build(read_method("specdiff2:candidates=0"), parts)
    with pytest.raises(UserError, match="needs a drafter of the kind diffusion: --drafter diffusion=FOLDER"):
        build(read_method("tolerator"), OpenDrafters(parts.target))


def test_more_tokens_than_a_drafter_drafts_are_refused(parts: OpenDrafters) -> None:
    """A sweep would show the same point under several names."""
    for text in ("block:gamma=5", "block_tree:gamma=3/5", "d2sd:gamma=9"):
        with pytest.raises(UserError, match="this drafter drafts at most 4 tokens"):
            build(read_method(text), parts)
    for name in ("block", "d2sd"):
        assert build(read_method(name), parts, 9).drafter.draft_tokens == 4  # --draft-tokens: at most
    assert build(read_method("specdiff:gamma=9"), parts).drafter.draft_tokens == 9


def test_what_says_nothing_is_refused_or_left_out(parts: OpenDrafters) -> None:
    with pytest.raises(UserError, match="gamma=1 leaves the inner drafter nothing"):
        build(read_method("hierarchical:gamma=1"), parts)
    with pytest.raises(UserError, match="unknown option 'controller'"):
        read_method("compiled:controller=cost")
    points = swept([read_method("specdiff")], ["gamma=2,4", "steps=1,2,8"])
    assert [m.name.removeprefix("specdiff:") for m in points] == [
        "gamma=2:steps=1", "gamma=2:steps=2", "gamma=4:steps=1", "gamma=4:steps=2", "gamma=4:steps=8",
    ]  # fmt: skip
    fixed, own = (build(read_method(f"duo{how}"), parts).drafter for how in (":controller=fixed", ""))
    assert not isinstance(fixed, AdaptiveDrafter) and isinstance(own, AdaptiveDrafter)
    adaptive = build(read_method("diffuspec:gamma=8"), parts).drafter
    assert (adaptive.shortest, adaptive.longest) == (5, 8)  # it does adapt  # type: ignore[union-attr]


def test_drafts_that_keep_their_q_are_verified_by_it(parts: OpenDrafters) -> None:
    assert verifier_of(read_method("specdiff2")) == "self_selection"
    assert verifier_of(read_method("specdiff2:candidates=2/4")) == "self_selection"
    assert verifier_of(read_method("specdiff2:keep_q=true:verifier=k_seq")) == "k_seq"
    decoder = build(read_method("specdiff2:keep_q=true"), parts)
    assert decoder.verifier_for(Sampling(1.0)) == "traversal" and decoder.verifier_for(Sampling()) == "greedy"


def test_numbers_out_of_range_are_refused_by_every_system(parts: OpenDrafters) -> None:
    for text in (
        "lookup:gamma=0",
        "lookup:gamma=-3",
        "lookup:longest=0",
        "retrieval:gamma=0",
        "retrieval:nodes=2000",
    ):
        with pytest.raises(UserError, match="must be"):
            build(read_method(text), parts)
    block = build(read_method("block:gamma=none"), parts).drafter
    assert block is not None and block.draft_tokens == parts.block.config.block_size


def test_where_drafts_may_not_branch(target: Target) -> None:
    by_place = load_target("debug-gptneo", dtype="float32", device="cpu")
    assert by_place.chains_only
    parts = OpenDrafters(by_place, {"diffusion": object(), "block": object()})
    for text in ("specdiff2", "block_tree", "specdiff:nodes=0/5", "retrieval:nodes=4"):
        with pytest.raises(UserError, match="windows its attention by place, so drafts may not branch"):
            build(read_method(text), parts)
    assert build(read_method("retrieval"), parts).generate(PROMPT, max_new_tokens=4).tokens
    recurrent = OpenDrafters(tiny_target("mamba2"), {"block": object()})
    with pytest.raises(UserError, match="has recurrent states, so drafts may not branch"):
        build(read_method("block_tree"), recurrent)


def test_a_drafter_that_was_trained_with_other_prompts_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target("debug", dtype="float32", device="cpu")
    target.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    save_drafter(block_network(target, "shared_kv", whole=True), tmp_path)
    save_chat(tmp_path, Chat({}, "Be brief."))
    methods = [read_method("block"), read_method("block_tree")]
    open_parts(methods, {"block": str(tmp_path)}, target)
    said = capsys.readouterr().err
    assert said.count("note: drafter") == 1 and "(--system 'Be brief.')" in said
    target.chat = Chat({}, "Be brief.")
    open_parts(methods, {"block": str(tmp_path)}, target)
    assert not capsys.readouterr().err
