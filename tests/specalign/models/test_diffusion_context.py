"""A text that grows and goes back, and the noisy block behind it."""

from typing import Any

import pytest
import torch

from specalign.lm.model import Target
from specalign.models.ddit import DDiT
from specalign.models.diffusion_context import DiffusionContext
from tests.builders import DIFFUSION_KINDS as KINDS
from tests.builders import diffusion_drafter as drafter


@pytest.mark.parametrize("kind", KINDS)
def test_committed_tokens_come_with_the_block(target: Target, kind: str, monkeypatch: Any) -> None:
    """One pass a draft, however many tokens were committed before it, and it says what a pass for each of them says."""
    made, text = drafter(target, kind), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    block = torch.full((3,), made.mask_id)
    at_once, one_by_one = DiffusionContext(made, 40), DiffusionContext(made, 40)
    for end in (1, 2, 4, 5, 9):
        for token in text[len(one_by_one.tokens) : end]:
            one_by_one.extend([token])
            expected = one_by_one.denoise(block)
        at_once.extend(text[len(at_once.tokens) : end])
        torch.testing.assert_close(at_once.denoise(block), expected, atol=1e-4, rtol=1e-4)
        for _ in range(2):  # nothing is committed meanwhile
            torch.testing.assert_close(at_once.denoise(block), expected, atol=1e-4, rtol=1e-4)
    passes = list[int]()
    network: Any = made.network
    inner = network.vocab_embed if isinstance(network, DDiT) else network.model.get_decoder()
    inner.register_forward_hook(lambda _, __, out: passes.append(1))
    at_once.extend([16, 17])
    at_once.denoise(block)
    assert len(passes) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [(6, 6, 3), (5, 9), (0, 0)])
def test_contexts_that_went_back_draft(target: Target, kind: str, back: tuple[int, ...]) -> None:
    """However often it goes back, and with nothing new behind it."""
    made, text = drafter(target, kind), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    block = torch.full((3,), made.mask_id)
    context, fresh = DiffusionContext(made, 40), DiffusionContext(made, 40)
    context.extend(text)
    context.denoise(block)
    for count in back:
        context.keep(count)
    fresh.extend(text[: min(back)])
    torch.testing.assert_close(context.denoise(block), fresh.denoise(block), atol=1e-4, rtol=1e-4)
    context.extend([3])
    fresh.extend([3])
    torch.testing.assert_close(context.denoise(block), fresh.denoise(block), atol=1e-4, rtol=1e-4)
