"""Two drafters side by side: what both say stands once, and the output stays the target's."""

from __future__ import annotations

import torch

from decode.engine.decoder import Decoder
from decode.proposers.base import Request
from decode.proposers.merged import MergedDrafter
from decode.speculation.proposal import Proposal
from decode.speculation.tree import path_to
from tests.fakes import LETTERS, ScriptedDrafter, TableTarget


def saying(*tokens: int) -> ScriptedDrafter:
    def propose(request: Request, k: int) -> Proposal | None:
        return Proposal(torch.tensor(tokens[:k]), "point") if tokens[:k] else None

    return ScriptedDrafter("point", propose)


def test_chains_are_merged_where_they_begin_alike() -> None:
    drafted = list[Proposal]()
    beside = MergedDrafter(saying(1, 2, 0), saying(1, 0))
    start = beside.start

    def noted(request: Request) -> object:
        session = start(request)
        drafted.append(session.propose(3))  # type: ignore[arg-type]
        return session

    beside.start = noted  # type: ignore[assignment, method-assign]
    Decoder(TableTarget(3), beside).generate(LETTERS, max_new_tokens=3)  # type: ignore[arg-type]
    tokens, parents = drafted[0].tokens_K.tolist(), drafted[0].parents
    assert parents is not None and len(tokens) == 4
    paths = {
        tuple(tokens[i] for i in path_to(parents, leaf + 1))
        for leaf in range(4)
        if leaf not in parents
    }
    assert paths == {(1, 2, 0), (1, 0)}
