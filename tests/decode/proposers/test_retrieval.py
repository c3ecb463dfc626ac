"""Retrieval in the engine: what is drafted, from where, and that the output keeps the target's law."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decode.proposers.lookup import TokenIndex
from decode.proposers.retrieval import (
    Datastore,
    RetrievalProposer,
    RetrievalSession,
    rank_continuations,
    read_corpus,
)
from decode.speculation.proposal import Proposal
from decode.speculation.tree import path_to
from specalign.common.errors import UserError
from specalign.lm.model import Target


def session(
    tokens: list[int], eos_ids: tuple[int, ...] = (), **options: object
) -> RetrievalSession:
    target = SimpleNamespace(device=torch.device("cpu"), eos_ids=eos_ids)
    request = SimpleNamespace(tokens=tokens, target=target)
    return RetrievalProposer(**options).start(request)  # type: ignore[arg-type]


def drafted(tokens: list[int], k: int = 4, **options: object) -> list[int] | None:
    proposal = session(tokens, **options).propose(k)  # type: ignore[arg-type]
    return None if proposal is None else proposal.tokens_K.tolist()


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    assert proposal.parents is not None
    count = range(1, len(proposal) + 1)
    return {tuple(proposal.tokens_K[path_to(proposal.parents, i)].tolist()) for i in count}


def test_the_most_frequent_continuation_at_each_step() -> None:
    text = [1, 2, 3, 30, 1, 2, 3, 31, 1, 2, 4, 1, 2, 3, 31, 5, 1, 2]
    assert drafted(text, 2) == [3, 31]
    assert drafted([1, 2, 4, 1, 2, 3, 1, 2], 1) == [3]  # once each: the new one


def test_a_draft_ends_with_its_text_and_at_the_end_of_sequence() -> None:
    store = Datastore([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert drafted([1, 2], 6, datastore=store) == [3, 4]
    text = [1, 2, 3, 0, 4, 5, 1, 2]
    assert drafted(text, 6) == [3, 0, 4, 5, 1, 2]
    assert drafted(text, 6, eos_ids=(0,)) == [3, 0]
    tree = session(text, (0,), tree_nodes=6).propose(6)
    assert tree is not None and paths(tree) == {(3,), (3, 0)}


def test_a_tree_of_the_most_frequent_paths() -> None:
    # after [1, 2]: 3 four times (then 5 three times, 6 once), 4 twice (then 5 each time)
    store = Datastore([[1, 2, 3, 5, 7]] * 3 + [[1, 2, 3, 6, 8]] + [[1, 2, 4, 5, 9]] * 2)
    ranked = [(3,), (3, 5), (3, 5, 7), (4,), (4, 5), (4, 5, 9), (3, 6), (3, 6, 8)]
    for nodes in range(1, 9):
        tree = session([1, 2], tree_nodes=nodes, datastore=store).propose(3)
        assert tree is not None and tree.law == "point" and len(tree) == nodes
        assert paths(tree) <= set(ranked)
        if nodes not in (2, 5, 7):  # where the cut runs through equals any of them may be there
            assert paths(tree) == set(ranked[:nodes])
    shallow = session([1, 2], tree_nodes=8, datastore=store).propose(2)
    assert shallow is not None and shallow.depth == 2 and len(shallow) == 5


def test_texts_of_a_corpus(target: Target, tmp_path: Path) -> None:
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo")
    rows.write_text('{"text": "one"}\n{"text": " "}\n{"text": "two"}\n')
    assert read_corpus(str(plain), target) == [target.text_tokens("one\ntwo")]
    assert read_corpus(str(rows), target) == [target.text_tokens(t) for t in ("one", "two")]
    for text, says in (('{"txt": "one"}', "row 1: needs a string"), ('{"text": " "}', "no text")):
        rows.write_text(text + "\n")
        with pytest.raises(UserError, match=says):
            read_corpus(str(rows), target)


@pytest.mark.parametrize(("alphabet", "seed"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_matches_and_counts_against_a_search_through_the_tokens(alphabet: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(alphabet, (length,), generator=generator).tolist()

    texts = [text(20), text(9), text(1)]
    for source, own in ((Datastore(texts), texts), (TokenIndex(texts[0]), texts[:1])):
        for length in range(1, 20):
            context = text(length) if length % 2 else texts[0][:length]
            for n in range(length, 0, -1):
                ending = context[length - n :]
                ends = ((t, e) for t in own for e in range(n, len(t)))
                after = Counter(t[e] for t, e in ends if t[e - n : e] == ending)
                if after:
                    break
            places, found = source.match(np.array(context))
            assert found == (n if after else 0)
            shares = {t: math.exp(s) for s, t in rank_continuations(source, places)}
            assert shares == pytest.approx({t: c / after.total() for t, c in after.items()})
