"""Every system as it is built: greedy output is plain decoding's, sampled output has the target's
distribution; what can't be built."""

from pathlib import Path

import pytest
import torch

from decode import Decoder, Sampling
from decode.systems.construction import build
from decode.systems.opening import OpenDrafters, open_drafters
from decode.systems.parsing import read_method
from decode.systems.registry import SYSTEMS
from specalign.common.errors import UserError
from specalign.folder.chat import Chat
from specalign.folder.training_record import save_record
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import PROMPT, VARIED, block_network
from tests.exact_distribution import exact_law
from tests.fakes import frequencies, plausible
from tests.target_models import tiny_target

METHODS = [
    *SYSTEMS,
    "specdiff:draft_tokens=5:steps=3",
    "specdiff2:candidates=3:keep_q=true:verifier=traversal",
    "hierarchical:inner=lookup",
    "duo:controller=fixed",
    "specdiff:draft_tokens=5:copying=true",
    "d2sd:copying=true",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_is_plain_decodings(parts: OpenDrafters, name: str) -> None:
    decoder = build(read_method(name), parts)
    if decoder.verifier in ("traversal", "lossy_top_beta"):  # the drafts are under test
        decoder.verifier = "auto"
    for sampling in (Sampling(), VARIED):
        expected = Decoder(parts.target).generate(PROMPT, max_new_tokens=25, sampling=sampling)
        found = decoder.generate(PROMPT, max_new_tokens=25, sampling=sampling)
        assert found.tokens == expected.tokens


@pytest.mark.parametrize("name", SYSTEMS)
def test_torchs_default_type_has_no_say(shallow_parts: OpenDrafters, name: str) -> None:
    """transformers sets it for the whole process while a checkpoint is loaded, which another thread may do at any moment."""
    # its draft length follows measured times by default
    decoder = build(read_method("duo:controller=fixed" if name == "duo" else name), shallow_parts)

    def outputs() -> list[list[int]]:
        settings = (Sampling(repetition_penalty=1.4), Sampling(0.8, 0.9, 20, seed=4))
        return [decoder.generate(PROMPT, 6, sampling=sampling).tokens for sampling in settings]

    wanted = outputs()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert outputs() == wanted
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["double", "duo", "specdiff2:copying=true"])
def test_sampled_output_has_the_targets_joint_law(shallow_parts: OpenDrafters, name: str) -> None:
    """Of systems that tests/decode/verification/test_end_to_end.py does not enumerate."""
    runs, sampling = 300, Sampling(1.0, top_k=2)
    decoder = build(read_method(name), shallow_parts, 2)
    found = frequencies(decoder, sampling, runs, PROMPT, 4)
    assert plausible(found, exact_law(shallow_parts.target, PROMPT, 4, sampling), runs)


def test_errors_name_the_method(parts: OpenDrafters, target: Target) -> None:
    text = "specdiff2:candidates=200:draft_tokens=8"
    with pytest.raises(UserError, match=f"method '{text}': candidates=200: at most"):
        build(read_method(text), parts)
    with pytest.raises(UserError, match="needs a drafter of kind diffusion"):
        build(read_method("tolerator"), OpenDrafters(target))


def test_draft_tokens(parts: OpenDrafters) -> None:
    """More than the drafter drafts are refused in a method, where a sweep would show one point under several
    names; the command's option is an upper limit."""
    for text in ("block:draft_tokens=5", "block_tree:draft_tokens=5", "d2sd:draft_tokens=9"):
        with pytest.raises(UserError, match="this drafter drafts at most 4 tokens"):
            build(read_method(text), parts)
    limited = [("block", 9, 4), ("d2sd", 9, 4), ("lookup:draft_tokens=3", 9, 3)]
    free = [("block:draft_tokens=none", None, 4), ("specdiff:draft_tokens=9", None, 9)]
    for text, limit, tokens in (*limited, *free, ("combined:draft_tokens=2", None, 2)):
        drafter = build(read_method(text), parts, limit).drafter
        assert drafter is not None and drafter.draft_tokens == tokens, text


def test_targets_whose_drafts_may_not_branch() -> None:
    by_place = load_target("debug-gptneo", dtype="float32", device="cpu")
    parts = OpenDrafters(by_place, {"diffusion": object(), "block": object()})
    for text in ("specdiff2", "block_tree", "retrieval:tree_nodes=4"):
        with pytest.raises(UserError, match="can't attend along branches, so drafts can't branch"):
            build(read_method(text), parts)
    assert build(read_method("retrieval"), parts).generate(PROMPT, max_new_tokens=4).tokens
    with pytest.raises(UserError, match="has recurrent states, so drafts can't branch"):
        build(read_method("block_tree"), OpenDrafters(tiny_target("mamba2"), {"block": object()}))


def test_other_training_chat_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target("debug", dtype="float32", device="cpu")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    target.tokenizer.chat_template = template
    save_drafter(block_network(target, "shared_kv", whole=True), tmp_path)
    save_record(tmp_path, Chat({}, "Be brief."))
    methods = [read_method("block"), read_method("block_tree")]
    open_drafters(methods, {"block": str(tmp_path)}, target)
    said = capsys.readouterr().err
    assert said.count("note: drafter") == 1 and "(--system 'Be brief.')" in said
    target.chat = Chat({}, "Be brief.")
    open_drafters(methods, {"block": str(tmp_path)}, target)
    assert not capsys.readouterr().err
