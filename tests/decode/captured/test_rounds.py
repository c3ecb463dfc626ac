"""The parts of a captured round: masks, places, buckets, results, and what the engine refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.captured import acceptance, engine, rows
from decode.captured.drafting import Draft, Unsupported
from decode.captured.engine import CapturedEngine
from decode.captured.round import _mask, read_result
from decode.captured.state import RowState, Shape
from decode.engine.decoder import Decoder
from decode.engine.output import RoundResult
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import find
from specalign.lm.model import Target
from tests.captured_drafters import make


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
    opened.run(14)
    opened.run(15)
    assert [end for end, _ in opened._graphs] == [20, 32]
    assert opened.run(15, skip=True).nodes == 0


def test_results_are_read_as_they_are_written() -> None:
    new, path = [7, 8, 0, 0, 0], [0, 3, 0, 0, 0]
    drafts, above, depths = [5, 9, 7, 6], [0, 0, 0, 3], [1, 0, 1, 2]  # 9 does not count
    wanted = RoundResult([7, 8], 1, 2, [1], [5, 7, 6], (-1, -1, 1))
    assert read_result([2, 1, *new, *path, *drafts, *above, *depths], 4) == wanted


def test_a_node_sees_the_text_its_ancestors_and_itself() -> None:
    tokens_13 = torch.tensor([[5, 6, 7]])
    draft = Draft(tokens_13, torch.tensor([[0, 1, 0]]), torch.tensor([[1, 2, 1]]))
    behind_18 = torch.arange(-2, 6)[None]
    mask = _mask(draft.see_BMM(), behind_18, chains=False)[0, 0]
    assert ["".join("01"[x] for x in row) for row in mask.tolist()] == [
        "11100000", "11110000", "11111000", "11100100"
    ]  # fmt: skip


@pytest.mark.parametrize(("least", "barred"), [(6, [True, True, False]), (0, [False] * 3)])
def test_an_end_is_barred_by_its_place(target: Target, least: int, barred: list[bool]) -> None:
    state = RowState(target, Sampling(banned=(3,), min_new_tokens=least), Shape(1, 16, 8, 2))
    state.counter("written")[0] = 4
    found_1MV = state._barred(torch.tensor([[0, 1, 2]]))
    assert found_1MV is not None
    assert found_1MV[0, :, 7].tolist() == barred
    assert found_1MV.sum() == 2 * sum(barred)


@pytest.mark.parametrize("change", [{"together": False}, {"others": {0: 1}}, {"chains_only": True}])
def test_targets_without_fixed_shapes_are_refused(change: dict[str, Any]) -> None:
    given = {"together": True, "chains_only": False, "others": {}, "shapes": [None], **change}
    target: Any = SimpleNamespace(**given, anatomy=SimpleNamespace(**given))
    with pytest.raises(Unsupported, match="recurrent"):
        engine.check_target(target)
