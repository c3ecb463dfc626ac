"""Whether texts are the target's: how many tokens of greedy answers are those that the target itself holds most probable.

A server may serve another model under the right name, and data may come from a server when the weights were elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from align.common.errors import UserError
from align.rows.conversation import Conversation
from align.target.model import Target
from align.writing.rows import Plan

PROBES = 8
PROBE_TOKENS = 16
NEAR = 0.25
"""Nats below the most probable token within which a server in another type of numbers may choose."""
LEAST = 0.9
"""Share of tokens; a quantised server's answers have more, other models' less."""
_TEXTS = (
    "Explain how rainbows form.", "Write a short poem about the sea.", "What is 17 times 23?", "def fibonacci(n):",
    "List three uses of a paper clip.", "Translate to French: good morning", "Who wrote Hamlet?", "Give me advice on sleeping well.",
)  # fmt: skip


def probes(plan: Plan) -> list[list[int]]:
    """Prompts that a server is tried with, as tokens, the answer to follow."""
    return [plan.reader.tokens(Conversation.from_text(text)) for text in _TEXTS[:PROBES]]


def agreement(target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """The share of the answers' tokens whose logit is at most `NEAR` below the largest; 1 where there is no token."""
    near = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        tokens = torch.tensor([[*prompt, *answer]], device=target.device)
        logits_LV = target.forward(tokens).logits_BLV
        assert logits_LV is not None
        rows = logits_LV[0, len(prompt) - 1 : -1]
        chosen = rows.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        near += int((rows.amax(-1) - chosen <= NEAR).sum())
        total += len(answer)
    return near / total if total else 1.0


def check_answers(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], who: str
) -> float:
    """The agreement of greedy answers with the target.

    Raises:
        UserError: they are another model's; the line begins with `who`.
    """
    share = agreement(target, prompts, answers)
    if share < LEAST:
        raise UserError(
            f"{who} is not target.name={target.spec!r}: the target would choose {share:.0%} of its greedy tokens, "
            f"{LEAST:.0%} are the least (data.server_check=never goes on all the same)"
        )
    return share
