"""Adaptive lengths and drafters that take turns: the output stays the target's."""

from __future__ import annotations

from typing import Any

import pytest

from decode import Sampling
from decode.proposers.adaptive import SwitchingDrafter, SwitchingSession
from decode.proposers.diffusion import DiffusionDrafts
from decode.systems.construction import OpenDrafters, build
from decode.systems.parsing import read_method, read_sweep, sweep_methods
from specalign.common.errors import UserError
from tests.builders import PROMPT


def test_ways_take_turns_and_draft_as_each_would_alone(parts: OpenDrafters) -> None:
    method = read_method("specdiff:gamma=2/4:steps=1/3:order=confidence")
    assert [way.name for way in method.variants][:2] == [
        "specdiff:gamma=2:steps=1:order=confidence",
        "specdiff:gamma=2:steps=3:order=confidence",
    ]
    decoder = build(method, parts)
    assert isinstance(decoder.drafter, SwitchingDrafter) and decoder.drafter.draft_tokens == 4
    seen: dict[tuple[int, int], set[int]] = {}
    propose = DiffusionDrafts.propose

    def watched(self: DiffusionDrafts, k: int) -> Any:
        proposal = propose(self, k)
        alone = propose(self.proposer.start(self.request), k)  # argmax drafts: nothing is drawn
        assert alone.tokens_K.tolist() == proposal.tokens_K.tolist()
        seen.setdefault((self.proposer.draft_tokens, self.proposer.steps), set()).add(len(proposal))
        return proposal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionDrafts, "propose", watched)
        decoder.generate(PROMPT, max_new_tokens=60)
    assert {ways: max(sizes) for ways, sizes in seen.items()} == {
        (2, 1): 2, (2, 3): 2, (4, 1): 4, (4, 3): 4,
    }  # fmt: skip
    assert sum(decoder.drafter.fastest.tried) > 12


@pytest.mark.parametrize("name", ["specdiff:gamma=2/3:steps=1/2:order=random", "block:gamma=1/3"])
def test_every_way_says_the_law_that_all_keep(parts: OpenDrafters, name: str) -> None:
    """A verifier is chosen once a request, for the widest law of the ways; none may say a narrower one."""
    decoder, said, sampling = build(read_method(name), parts), [], Sampling(1.0, seed=1)
    assert isinstance(decoder.drafter, SwitchingDrafter)
    propose = SwitchingSession.propose

    def watched(self: SwitchingSession, k: int) -> Any:
        proposal = propose(self, k)
        said.append(proposal and (proposal.law, len(proposal)))
        return proposal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwitchingSession, "propose", watched)
        decoder.generate(PROMPT, max_new_tokens=40, sampling=sampling)
    laws = {law for law, _ in filter(None, said)}
    assert (
        laws == {decoder.drafter.law(sampling)}
        and len({size for _, size in filter(None, said)}) > 1
    )


def test_ways_that_cannot_take_turns_are_refused(parts: OpenDrafters) -> None:
    for text, says in (
        (
            "lookup:gamma=2/4",
            r"one variant at a time \(controller=cost chooses the length\); these take several: retrieval, block,",
        ),
        ("specdiff:steps=1/2:controller=cost", "either several variants or a controller"),
        ("specdiff:steps=1/zwei", "steps='zwei': must be a whole number"),
    ):
        with pytest.raises(UserError, match=says):
            build(read_method(text), parts)
    for text in ("block_tree:nodes=-1/5", "specdiff:steps=0/2", "specdiff:gamma=-2/3", "tolerator:gamma=0", "block:gamma=0", "specdiff2:gamma=-1", "block_tree:nodes=5000"):  # fmt: skip
        with pytest.raises(UserError, match=r"=-?\d+: must be a whole number, \d to \d+"):
            build(read_method(text), parts)
    assert [
        m.name for m in sweep_methods([read_method("specdiff:steps=1/2")], read_sweep(["gamma=3"]))
    ] == ["specdiff:steps=1/2:gamma=3"]
    mixed = build(read_method("specdiff:nodes=0/4"), parts)
    assert mixed.generate(PROMPT, max_new_tokens=6).tokens  # argmax drafts either way
    with pytest.raises(UserError, match=r"draw drafts in different ways \(independent, point\)"):
        mixed.generate(PROMPT, max_new_tokens=6, sampling=Sampling(1.0))
    assert read_method(f"retrieval:corpus={__file__}").system.corpus == __file__  # type: ignore[attr-defined]
