"""Refining masks the least sure and leaves no mask."""

from __future__ import annotations

from decode import Sampling
from decode.proposers.tolerator import ToleratorDrafter
from specalign.lm.model import Target
from tests.builders import diffusion_drafter as drafter
from tests.builders import session_after_prefill as sessions


def test_refining_masks_the_least_sure_and_leaves_none(target: Target) -> None:
    own = drafter(target, "ddit")
    _, session = sessions(target, ToleratorDrafter(own, 6, 1, 3), Sampling())  # type: ignore[arg-type]
    masks: list[int] = []
    denoise = session.context.denoise

    def counted(block_K):  # type: ignore[no-untyped-def]
        masks.append(int((block_K == own.mask_id).sum()))
        return denoise(block_K)

    session.context.denoise = counted
    proposal = session.propose(6)
    assert masks == [6, 5, 3, 1]  # 6·cos(π/6), 6·cos(π/3), and never fewer than one
    assert not bool((proposal.tokens_K == own.mask_id).any())
