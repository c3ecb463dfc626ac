"""Rows are processed with the text before them, the drafts on their path included, and an output ends where a criterion says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling
from specalign.common.errors import UserError
from specalign.lm.model import Target
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
    ended = engine(
        target, criteria=lambda t, s: t.shape[1] == len(PROMPT) + 4, put=seen.extend, keep=True
    )
    whole = engine(target)
    run_together([ended])
    run_together([whole])
    assert ended.out.finish == "stop" and ended.out.tokens == whole.out.tokens[:3] == seen
    assert whole.out.finish == "length" and len(whole.out.tokens) == 8
    assert ended.kept is not None and [int(p.argmax()) for p in ended.kept[1]] == seen


def test_requests_together_are_written_until_all_have_met_a_criterion(target: Target) -> None:
    seen: list[int] = []

    def scored(text: torch.Tensor, scores: Any) -> bool:
        seen.append(len(scores))
        assert [int(row.argmax()) for row in scores] == text[0, len(PROMPT) + 1 :].tolist()
        return len(scores) == 5

    one, other, whole = engine(target, criteria=lambda t, s: True), engine(target), engine(target)
    other.criteria, other.scored, other.kept = scored, True, ([], [])
    one.together = other.together = [one, other]
    run_together([one, other], 2)
    run_together([whole])
    assert (one.end, other.end) == (1, 5) and seen == [1, 2, 3, 4, 5]
    assert other.out.tokens == whole.out.tokens[:5] and one.out.tokens[:5] == whole.out.tokens[:5]


def test_a_row_without_probabilities_matters_where_it_is_reached(target: Target) -> None:
    words: dict[str, Any] = {"criteria": lambda t, s: t.shape[1] == len(PROMPT) + 3}
    for drafting in (Sampling(), Sampling(temperature=1.0)):
        one = engine(
            target,
            processors=lambda t, s: s * torch.nan if t.shape[1] > len(PROMPT) + 2 else s,
            **words,
        )
        one.law = drafting
        run_together([one])
        assert one.out.finish == "stop" and len(one.out.tokens) == 2
    late = engine(
        target, processors=lambda t, s: s * torch.nan if t.shape[1] > len(PROMPT) + 2 else s
    )
    late.law = Sampling(temperature=1.0)
    with pytest.raises(UserError, match="^logits_processor: token 3 has no probabilities"):
        run_together([late])
