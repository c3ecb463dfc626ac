"""Rows are processed with the text before them, the drafts on their path included, and an output ends where a criterion says so."""

from __future__ import annotations

from typing import Any

import torch

from align.target.model import Target
from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling
from tests.builders import PROMPT


def engine(target: Target, **changes: Any) -> ProcessedEngine:
    words: dict[str, Any] = {
        "processors": lambda t, s: s,
        "criteria": lambda t, s: False,
        "shown": [0, *PROMPT],
    }
    return ProcessedEngine(target, PROMPT, 8, Sampling(), None, "greedy", **{**words, **changes})


def test_the_text_before_each_row_of_a_tree(target: Target) -> None:
    one = engine(target)
    one.out.tokens = [9]
    proposal = Proposal(torch.tensor([11, 12, 13, 14]), "point", parents=(-1, 0, 0, 1))
    texts = [t[0].tolist()[len(PROMPT) + 1 :] for t in one._texts(proposal)]
    assert texts == [[9], [9, 11], [9, 11, 12], [9, 11, 13], [9, 11, 12, 14]]
    assert one._texts(proposal)[0][0].tolist()[: len(PROMPT) + 1] == [0, *PROMPT]


def test_criteria_and_limit_end_an_output(target: Target) -> None:
    seen: list[int] = []
    ended = engine(target, criteria=lambda t, s: t.shape[1] == len(PROMPT) + 4, put=seen.extend, keep=True)
    whole = engine(target)
    run_together([ended])
    run_together([whole])
    assert ended.out.finish == "stop" and ended.out.tokens == whole.out.tokens[:3] == seen
    assert whole.out.finish == "length" and len(whole.out.tokens) == 8
    assert ended.kept is not None and [int(p.argmax()) for p in ended.kept[1]] == seen
