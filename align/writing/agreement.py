"""Checks that the target wrote a text: the share of greedy tokens that the target itself finds most
probable. A server may serve another model under the right name, and data may come from one without
the weights at hand."""

from collections.abc import Sequence

import torch

from specalign.common.errors import UserError
from specalign.lm.model import Target

PROBES = (
    "Explain how rainbows form.", "Write a short poem about the sea.", "What is 17 times 23?",
    "def fibonacci(n):", "List three uses of a paper clip.", "Translate to French: good morning",
    "Who wrote Hamlet?", "Give me advice on sleeping well.",
)  # fmt: skip
"""The prompts that a server is tried with."""
PROBE_TOKENS = 16
_TOLERANCE = 0.25  # nats below the most probable token that a server with another dtype may choose
_LEAST_SHARE = 0.9  # quantised servers reach more, other models less


def check_answers(
    target: Target, prompts: Sequence[list[int]], answers: Sequence[list[int]], who: str
) -> float:
    """The share of the greedy answers' tokens within the tolerance of the target's largest logit; 1
    without tokens. Raises UserError: they are another model's; `who` wrote them."""
    near = 0
    total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        tokens_1L = torch.tensor([[*prompt, *answer]], device=target.device)
        logits_BLV = target.forward(tokens_1L).logits_BLV
        assert logits_BLV is not None
        logits_NV = logits_BLV[0, len(prompt) - 1 : -1]
        chosen_N = logits_NV.gather(-1, tokens_1L[0, len(prompt) :, None])[:, 0]
        near += int((logits_NV.amax(-1) - chosen_N <= _TOLERANCE).sum())
        total += len(answer)
    share = near / total if total else 1.0
    if share < _LEAST_SHARE:
        raise UserError(
            f"{who} does not match target.name={target.spec!r}: only {share:.0%} of its greedy "
            f"tokens agree ({_LEAST_SHARE:.0%} required)"
        )
    return share
