"""The parts of a captured round: masks, places, buckets, results, and what the engine refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.captured import acceptance, causal, copying, engine, rows
from decode.captured.drafting import Draft, Drafting, Unsupported
from decode.captured.engine import CapturedEngine
from decode.captured.round import _commit, _mask, read_result
from decode.captured.state import RowState, Shape
from decode.engine.decoder import Decoder
from decode.engine.output import RoundResult
from decode.proposers.lookup import SHORTEST, LookupProposer
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import find
from specalign.lm.model import Target
from tests.captured_drafters import DRAFTERS, make


@pytest.mark.parametrize("verifier", sorted(acceptance.BY_RULE))
def test_a_draft_that_does_not_count_is_not_accepted(verifier: str) -> None:
    p_1MV = torch.eye(4)[[1, 2, 3, 0]][None]
    tokens_1N, above_1N = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]])
    q_1NV, steps_1N = torch.full((1, 3, 4), 0.25), torch.tensor([[1, 0, 0]])
    draft = Draft(
        tokens_1N, above_1N, torch.tensor([[1, 0, 0]]), q_1NV, None, (-1, 0, 1), steps_BN=steps_1N
    )
    rule = find(verifier).rule
    assert rule is not None
    assert rule(p_1MV, draft.as_drafts()).stop_BM.tolist() == [[0, 1, 0, 0]]


def test_positions_of_a_rounds_entries(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "context_limit", 7)
    state = RowState(target, Sampling(), Shape(1, 16, 8, 3))
    state.counter("length")[0] = 5
    positions_14, _ = state.place(torch.tensor([[0, 1, 2, 1]]), 10, tree=True)
    assert positions_14.tolist() == [[5, 6, 6, 6]]
    assert state.cache.slots is not None and state.cache.slots.positions_BS is not None
    assert state.cache.slots.positions_BS.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 6, 9]]


def test_a_bucket_holds_the_drafts_too(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make(target, "lookup")
    used = CapturedEngine(target, proposer)
    Decoder(target, proposer, engine=used).generate([4, 90, 17], 16)
    [opened] = used._rows.values()
    opened._graphs.clear()
    monkeypatch.setattr(rows, "BUCKETS", (20, 32))
    assert 0 < opened.run(14).seconds < 60
    opened.run(15)
    opened.run(40)  # longer than any bucket
    assert [*opened._graphs] == [(20, False), (32, False)]
    assert opened.run(15, skip=True).nodes == 0


def test_results_are_read_as_they_are_written() -> None:
    new, path = [7, 8, 0, 0, 0], [0, 3, 0, 0, 0]
    drafts, above, depths = [5, 9, 7, 6], [0, 0, 0, 3], [1, 0, 1, 2]  # 9 does not count
    wanted = RoundResult([7, 8], 1, 2, [1], [5, 7, 6], (-1, -1, 1))
    assert read_result([2, 1, *new, *path, *drafts, *above, *depths], 4) == wanted
    assert read_result([1, 0, 7, 0], 0) == RoundResult([7], 0, 0, [], [], ())


def test_rows_stop_at_the_end_of_their_outputs(target: Target) -> None:
    state = RowState(target, Sampling(), Shape(3, 16, 8, 0))
    for row, limit in enumerate((2, 8, 8)):
        state.start_row(row, [5, 6], limit)
    none_B0, see_B11 = torch.zeros(3, 0, dtype=torch.int64), torch.ones(3, 1, 1, dtype=torch.bool)
    root_B = torch.zeros(3, dtype=torch.int64)
    path = acceptance.Path(root_B, torch.tensor([9, 7, 9]), root_B)  # 7 ends the text
    draft = Draft(none_B0, none_B0, none_B0)
    _commit(state, draft, root_B[:, None] + 6, see_B11, path, root_B[:, None])
    assert state.counter("active").tolist() == [0, 0, 1]
    assert state.result_BX[:, :3].tolist() == [[1, 0, 9], [1, 0, 7], [1, 0, 9]]
    state.stop_row(2)
    assert not state.counter("active").any()


def test_a_node_sees_the_text_its_ancestors_and_itself() -> None:
    tokens_13 = torch.tensor([[5, 6, 7]])
    draft = Draft(tokens_13, torch.tensor([[0, 1, 0]]), torch.tensor([[1, 2, 1]]))
    behind_18 = torch.arange(-2, 6)[None]
    mask = _mask(draft.see_BMM(), behind_18, chains=False)[0, 0]
    assert ["".join("01"[x] for x in row) for row in mask.tolist()] == [
        "11100000", "11110000", "11111000", "11100100"
    ]  # fmt: skip


def test_a_prefix_holds_the_text_and_its_drafts(target: Target) -> None:
    state = RowState(target, Sampling(repetition_penalty=1.2), Shape(1, 16, 8, 2))
    assert state.seen_BV is not None
    state.seen_BV[0, 5] = True
    held_132 = torch.tensor([[[False, False], [True, False], [True, True]]])
    seen_1MV = state.before(held_132, torch.tensor([[9, 7]]), torch.zeros(1, 3).long())[0]
    assert seen_1MV is not None
    assert [row.nonzero()[:, 0].tolist() for row in seen_1MV[0]] == [[5], [5, 9], [5, 7, 9]]


@pytest.mark.parametrize(("least", "barred"), [(6, [True, True, False]), (0, [False] * 3)])
def test_an_end_is_barred_by_its_place(target: Target, least: int, barred: list[bool]) -> None:
    state = RowState(target, Sampling(banned=(3,), min_new_tokens=least), Shape(1, 16, 8, 2))
    state.counter("written")[0] = 4
    found_1MV = state._barred(torch.tensor([[0, 1, 2]]))
    assert found_1MV is not None
    assert found_1MV[0, :, 7].tolist() == barred
    assert found_1MV.sum() == 2 * sum(barred)


def test_a_causal_drafter_reads_in_chunks_as_much_as_its_context_holds(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = engine.make_drafting(make(target, "autoregressive"), Sampling(), "block")
    assert isinstance(drafting, causal.CausalChain)
    drafting.allocate(RowState(target, Sampling(), Shape(1, 16, 8, drafting.nodes)))
    model, read = drafting.model, list[int]()
    monkeypatch.setattr(causal, "READ_AT_ONCE", 4)
    monkeypatch.setattr(model, "forward", lambda part, **_: read.append(part.shape[1]))
    drafting.start(0, [5] * 11)
    assert read == [4, 4, 2]
    drafting.check(model.context_limit - drafting.nodes)
    with pytest.raises(Unsupported, match=f"context of {model.context_limit} tokens"):
        drafting.check(model.context_limit - drafting.nodes + 1)


class FixedDrafts(Drafting):
    """Two chains of 3, 5 and 9 with q of their own; those of the third request do not count."""

    nodes = 3

    def draft(self, state: RowState, end: int) -> Draft:
        tokens_BN = torch.tensor([[3, 5, 9]] * 2 + [[8, 5, 9]] + [[3, 5, 9]])
        depth_BN = torch.tensor([[1, 2, 1]] * 2 + [[0, 0, 0]] + [[1, 2, 1]])
        q_BNV = (torch.arange(3.0) + 2)[:, None].expand(4, 3, state.target.vocab_size)
        drawn_B = torch.tensor([3, 3, 0, 3])
        return Draft(tokens_BN, torch.tensor([[0, 1, 0]] * 4), depth_BN, q_BNV, drawn_B)


def texts_to_copy(target: Target, nodes: int, limits: list[int]) -> RowState:
    """The endings occurred with 2 tokens, 1 and 2; the third's would be longer around the text's ends."""
    state = RowState(target, Sampling(), Shape(4, 16, 8, nodes))
    texts = [[7, 1, 2, 3, 9, 1, 2], [5, 6, 5], [5, 6, 8, 5, 6], [4, 9, 7]]
    for row, (text, limit) in enumerate(zip(texts, limits, strict=True)):
        state.start_row(row, text, limit)
    state.text_BS[2, -1] = 8
    return state


def test_verification_knows_the_steps_of_denoising(target: Target) -> None:
    proposer: Any = make(target, "ddit 2 confidence")
    proposer.draft_tokens = 5
    drafting = engine.make_drafting(proposer, Sampling(1.0), "hybrid")
    state = RowState(target, Sampling(1.0), Shape(1, 32, 16, 5))
    drafting.allocate(state)
    drafting.start(0, [5, 6, 7])
    state.start_row(0, [5, 6, 7], 16)
    with torch.no_grad():
        steps_BN = drafting.draft(state, 32).as_drafts().steps_BN
    assert steps_BN is not None and sorted(steps_BN[0].tolist()) == [0, 0, 0, 1, 1]


def test_drawn_trees_know_the_markov_bias(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make(target, "shared_kv 8 6 without_replacement")
    drafting: Any = engine.make_drafting(proposer, Sampling(1.0), "recursive")
    state = RowState(target, Sampling(1.0), Shape(1, 32, 16, 6))
    drafting.allocate(state)
    state.start_row(0, [5, 6, 7], 16)
    with torch.no_grad():
        logits_BKV, _ = drafting._logits(state, 32)
        biased = drafting.draft(state, 32)
        monkeypatch.setattr(drafting, "_logits", lambda *_: (logits_BKV, None))
        assert (biased.q_BNV != drafting.draft(state, 32).q_BNV).any(2).all()


def test_lookup_has_its_own_lengths(target: Target) -> None:
    drafting = engine.make_drafting(LookupProposer(5, 4, 2), Sampling(), "block")
    assert isinstance(drafting, copying.CopiedBranch)
    assert (drafting.nodes, drafting.longest, drafting.shortest) == (5, 4, 2)


def test_copies_begin_after_the_longest_ending(target: Target) -> None:
    state = texts_to_copy(target, 4, [8] * 4)
    copies_B4, agreed_B = copying.find_copy(state, 4, 3)
    assert copies_B4[:3].tolist() == [[3, 9, 1, 2], [6, 5, 6, 5], [8, 5, 6, 8]]
    assert agreed_B.tolist() == [2, 1, 2, 0]


def test_a_copied_branch_continues_below_equal_drafts(target: Target) -> None:
    drafting = copying.CopiedBranch(FixedDrafts(), 4, 2, 3)
    tokens_BN, above_BN, depth_BN, *_ = drafting.draft(texts_to_copy(target, 7, [8, 8, 4, 8]), 16)
    assert tokens_BN[0].tolist() == [3, 5, 9, 3, 9, 1, 2]
    assert above_BN[[0, 2]].tolist() == [[0, 1, 0, 0, 1, 5, 6], [0, 1, 0, 0, 4, 5, 6]]
    assert depth_BN.tolist() == [
        [1, 2, 1, 0, 2, 3, 4], [1, 2, 1, 0, 0, 0, 0], [0, 0, 0, 1, 2, 0, 0], [1, 2, 1, 0, 0, 0, 0]
    ]  # fmt: skip


def test_a_copied_chain_replaces_the_drawn_one(target: Target) -> None:
    drafting = copying.CopiedChain(FixedDrafts(), 4)
    assert (drafting.nodes, drafting.shortest, drafting.copy_tokens) == (4, SHORTEST, 4)
    drafting.shortest = 2
    draft = drafting.draft(texts_to_copy(target, 4, [4] * 4), 16)
    assert draft.tokens_BN[:2].tolist() == [[3, 9, 1, 2], [3, 5, 9, 0]]
    assert draft.depth_BN.tolist() == [[1, 2, 0, 0], [1, 2, 1, 0], [1, 2, 0, 0], [1, 2, 1, 0]]
    assert draft.q_BNV is not None and draft.drawn_B is not None
    assert draft.q_BNV[0].argmax(1).tolist() == [3, 9, 1, 2] and draft.q_BNV[0].sum() == 4
    assert draft.q_BNV[1, :, 0].tolist() == draft.q_BNV[1, :, -1].tolist() == [2, 3, 4, 0]
    assert draft.drawn_B.tolist() == [3, 3, 0, 3] and draft.forest == (-1, 0, 1, 2)


@pytest.mark.parametrize(("length", "skipped"), [(1, 0), (12, 0), (1, 7), (12, 7)])
@pytest.mark.parametrize(
    "name",
    ["autoregressive", "copy autoregressive", "ddit 2 confidence", "masked_lm 2 left_to_right"],
)
def test_drafters_read_all_that_rounds_commit(
    target: Target, name: str, length: int, skipped: int
) -> None:
    """At most: all drafts and a token, and one for each of the `skipped` rounds without drafts. The
    copied ones are not the drafter's own."""
    drafting = engine.make_drafting(make(target, name), Sampling(1.0), "block")
    text, found = [4 + i * 37 % 220 for i in range(length + 1)], []
    for fresh in (False, True):
        state = RowState(target, Sampling(1.0), Shape(2, 40, 32, drafting.nodes))
        state.u_BT[:] = torch.linspace(0.1, 0.9, state.u_BT.shape[1])
        with torch.no_grad():
            drafting.allocate(state)
            drafting.start(1, text)
            state.start_row(1, text, 32)
            if not fresh:
                [draft] = drafting.draft(state, 40).tokens_BN[1:].tolist()
                text += [99 + i * 53 % 88 for i in range(8)] if "copy" in name else [*draft, 99]
                text += [30 + i * 59 % 91 for i in range(skipped)]
                state.start_row(1, text, 32)
            end = 40 if fresh else len(text) + drafting.nodes
            if skipped and not fresh:
                drafting.catch_up(state, end, skipped)
            found.append(drafting.draft(state, end).q_BNV)
    assert found[0] is not None and found[1] is not None
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_drafters_with_a_cache_of_their_own_catch_up(target: Target) -> None:
    made = {x: engine.make_drafting(make(target, x), Sampling(), "block") for x in DRAFTERS}
    assert [name for name, drafting in made.items() if drafting.catches_up] == [
        "autoregressive", "copy autoregressive", "ddit 1 left_to_right", "ddit 2 confidence",
        "masked_lm 2 left_to_right",
    ]  # fmt: skip


def test_memory_is_a_power_of_two_or_the_whole_context(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [engine._round_up(size) for size in (1, 2, 5, 8, 9)] == [1, 2, 8, 8, 16]
    monkeypatch.setattr(target, "context_limit", 21)
    used = CapturedEngine(target, proposer := make(target, "lookup"))
    Decoder(target, proposer, engine=used).generate([4, 90, 17], 18)
    assert [opened.state.shape for opened in used._rows.values()] == [(1, 27, 32, 5)]


@pytest.mark.parametrize("change", [{"together": False}, {"others": {0: 1}}, {"chains_only": True}])
def test_targets_without_fixed_shapes_are_refused(change: dict[str, Any]) -> None:
    given = {"together": True, "chains_only": False, "others": {}, "shapes": [None], **change}
    target: Any = SimpleNamespace(**given, anatomy=SimpleNamespace(**given))
    with pytest.raises(Unsupported, match="recurrent"):
        engine.check_target(target)
