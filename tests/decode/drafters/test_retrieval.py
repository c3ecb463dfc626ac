"""Retrieval in the engine: what is drafted, from where, and that the output keeps the target's law."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode import Decoder, Sampling
from decode.drafters.corpus import read_corpus
from decode.drafters.retrieval import RetrievalDrafter, RetrievalSession
from decode.drafters.suffix_automaton import Datastore
from decode.speculation.proposal import Proposal
from decode.speculation.tree import path_to
from tests.fakes import LENGTH, SETTINGS, TableTarget, frequencies, plausible
from tests.fakes import LETTERS as PROMPT


def session(tokens: list[int], eos_ids: tuple[int, ...] = (), **options: object) -> RetrievalSession:
    target = SimpleNamespace(device=torch.device("cpu"), eos_ids=eos_ids)
    request = SimpleNamespace(tokens=tokens, target=target)
    return RetrievalDrafter(**options).start(request)  # type: ignore[arg-type]


def drafted(tokens: list[int], k: int = 4, **options: object) -> list[int] | None:
    proposal = session(tokens, **options).propose(k)  # type: ignore[arg-type]
    return None if proposal is None else proposal.tokens_K.tolist()


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    assert proposal.parents is not None
    count = range(1, len(proposal) + 1)
    return {tuple(proposal.tokens_K[path_to(proposal.parents, i)].tolist()) for i in count}


def test_the_longest_ending_wins() -> None:
    assert drafted([1, 2, 3, 50, 9, 3, 60, 3, 60, 1, 2, 3], 1) == [50]
    assert drafted([1, 2, 3, 7, 8, 9, 6, 1, 2, 3]) == [7, 8, 9, 6]


def test_the_most_frequent_continuation_at_each_step() -> None:
    text = [1, 2, 3, 30, 1, 2, 3, 31, 1, 2, 4, 1, 2, 3, 31, 5, 1, 2]
    assert drafted(text, 2) == [3, 31]
    assert drafted([1, 2, 4, 1, 2, 3, 1, 2], 1) == [3]  # once each: the new one


def test_a_cycle_is_continued() -> None:
    assert drafted([1, 2, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert drafted([4, 4, 4], 3) == [4, 4, 4]


def test_where_a_text_ends_nothing_shorter_goes_on() -> None:
    """After 1 2 3 9 nothing stands; after 9 alone 7 does."""
    store = Datastore([[1, 2, 3, 9], [9, 7, 5]])
    for shortest, expected in ((1, [3, 9, 7, 5]), (2, [3, 9])):
        assert drafted([4, 1, 2], 4, shortest=shortest, datastore=store) == expected


@pytest.mark.parametrize("shortest", [1, 2, 3, 4])
def test_nothing_below_the_shortest_match(shortest: int) -> None:
    for n in (1, 2, 3):
        text = [11, 12, 13][-n:] + [14, 15, 16, 17, 18] + [11, 12, 13][-n:]
        assert (drafted(text, 2, shortest=shortest) == [14, 15]) == (n >= shortest)
        store = Datastore([[11, 12, 13][-n:] + [24, 25]])
        found = drafted([9, *[11, 12, 13][-n:]], 2, shortest=shortest, datastore=store)
        assert (found == [24, 25]) == (n >= shortest)
    assert drafted([1], shortest=shortest) is None
    # of one state with [1, 2] but matched by its last token alone
    assert drafted([7, 2], 1, shortest=shortest, datastore=Datastore([[1, 2, 3]])) == (
        [3] if shortest == 1 else None
    )


def test_the_longer_match_drafts_and_on_a_tie_the_text_itself() -> None:
    text = [1, 2, 3, 40, 41, 9, 2, 3]
    for other, expected in (([2, 3, 50, 51], [40, 41]), ([9, 2, 3, 50, 51], [50, 51])):
        assert drafted(text, 2, datastore=Datastore([other])) == expected
    assert drafted(text, 2, datastore=Datastore([[7, 7]])) == [40, 41]


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


@pytest.mark.parametrize("nodes", [0, 5])
def test_the_index_grows_with_the_text(nodes: int) -> None:
    store = Datastore([[3, 9, 9, 9], [1, 2, 9, 8]])
    tokens = [1, 2, 3]
    growing = session(tokens, tree_nodes=nodes, datastore=store)
    for new in ([9, 1], [2], [3, 9, 9, 1, 2, 3], [3, 9, 9, 9]):
        tokens.extend(new)
        found = growing.propose(4)
        fresh = session(list(tokens), tree_nodes=nodes, datastore=store).propose(4)
        assert (found is None) == (fresh is None)
        if found is not None and fresh is not None:
            assert found.law == "point" and found.parents == fresh.parents
            assert torch.equal(found.tokens_K, fresh.tokens_K)


@pytest.mark.parametrize("nodes", [0, 6])
def test_greedy_output_is_plain_decodings(target: Target, nodes: int) -> None:
    prompts = [[4, 90, 17, 203, 90, 17], [20, 21, 22] * 4, [7]]
    written = [Decoder(target).generate(p, max_new_tokens=24).tokens for p in prompts]
    store = Datastore([written[0], [*written[1][:9], 5, 5], [100, 101]])
    accepted = 0
    for prompt, sampling, length in (
        *((p, Sampling(), n) for p in prompts for n in (1, 3, 24)),
        (prompts[0], Sampling(repetition_penalty=1.4), 20),
        (prompts[1], Sampling(banned=(written[1][0],), min_new_tokens=9), 20),
    ):
        drafter = RetrievalDrafter(shortest=1, tree_nodes=nodes, datastore=store)
        expected = Decoder(target).generate(prompt, max_new_tokens=length, sampling=sampling)
        out = Decoder(target, drafter).generate(prompt, max_new_tokens=length, sampling=sampling)
        assert out.tokens == expected.tokens and out.finish == expected.finish
        accepted += sum(out.accepted)
    assert accepted > 20


def test_greedy_output_up_to_the_end_of_sequence() -> None:
    for seed in range(20):
        table = TableTarget(4, seed=seed)
        table.eos_ids = (2,)
        drafters = (None, RetrievalDrafter(shortest=1), RetrievalDrafter(shortest=1, tree_nodes=5))
        outs = [
            Decoder(table, d).generate([0, 1, 3], max_new_tokens=30)  # type: ignore[arg-type]
            for d in drafters
        ]
        assert outs[0].tokens == outs[1].tokens == outs[2].tokens
        assert outs[0].finish == outs[1].finish == outs[2].finish


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "setting"), [(0, "penalty"), (5, "plain")])
def test_joint_frequencies(nodes: int, setting: str) -> None:
    table, store = TableTarget(3), Datastore([[0, 2, 1, 1, 0], [2, 2, 0, 1]])
    drafter = RetrievalDrafter(3, shortest=1, tree_nodes=nodes, datastore=store)
    found = frequencies(Decoder(table, drafter), SETTINGS[setting], 400)  # type: ignore[arg-type]
    assert plausible(found, table.law(PROMPT, LENGTH, SETTINGS[setting]), 400)


def test_a_tree_counts_what_may_be_drafted() -> None:
    assert RetrievalDrafter(8, tree_nodes=20).draft_nodes == 20 and RetrievalDrafter(8).draft_nodes == 8
    for name, options in (("draft_tokens=0", {"draft_tokens": 0}), ("shortest=0", {"shortest": 0})):
        with pytest.raises(UserError, match=name):
            RetrievalDrafter(**options)
    with pytest.raises(UserError, match="tree_nodes=-1"):
        RetrievalDrafter(tree_nodes=-1)


def test_reading_a_corpus(target: Target, tmp_path: Path) -> None:
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one line\n\n  two lines\n")
    assert read_corpus(plain, target) == [target.text_tokens("one line\n\n  two lines\n")]
    rows.write_text("".join(json.dumps({"text": x, "id": 1}) + "\n" for x in ("first", " ", "second\n")))
    assert read_corpus(str(rows), target) == [target.text_tokens("first"), target.text_tokens("second\n")]
    for content, says in (
        ('{"txt": "x"}\n', r"b.jsonl, row 1: no key 'text' \(did you mean 'txt'\?\)"),
        ('{"text": "x"}\n{"text": 3}\n', "b.jsonl, row 2: needs a string under the key 'text'"),
        ('{"text": ""}\n', "b.jsonl holds no text"),
        ('{"text": "\\ud800"}\n', "not valid Unicode"),
        ("{\n", "line 1: not JSON"),
    ):
        rows.write_text(content)
        with pytest.raises(UserError, match=says):
            read_corpus(rows, target)
    plain.write_text(" \n")
    with pytest.raises(UserError, match="holds no text"):
        read_corpus(plain, target)
    with pytest.raises(UserError, match="no such file"):
        read_corpus(tmp_path / "c.txt", target)
