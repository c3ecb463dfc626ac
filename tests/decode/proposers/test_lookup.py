"""Prompt lookup, alone and in front of a drafter."""

from types import SimpleNamespace

import pytest
import torch

from decode.proposers.lookup import CopyingProposer, LookupProposer, LookupSession
from decode.speculation.history import History
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from tests.fakes import DRAFTERS, ScriptedDrafter


def session(tokens: list[int], longest: int = 3) -> LookupSession:
    request = SimpleNamespace(tokens=tokens, target=SimpleNamespace(device=torch.device("cpu")))
    return LookupProposer(4, longest).start(request)  # type: ignore[arg-type]


def copied(tokens: list[int], k: int = 4) -> list[int] | None:
    proposal = session(tokens).propose(k)
    return None if proposal is None else proposal.tokens_K.tolist()


def test_copies_what_followed_the_ending() -> None:
    assert copied([1, 2, 3, 7, 8, 9, 6, 1, 2, 3]) == [7, 8, 9, 6]
    assert copied([1, 2, 3, 7, 8, 9, 6, 1, 2, 3], 2) == [7, 8]


def test_the_longest_ending_wins_then_the_latest() -> None:
    assert copied([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], 1) == [50]
    assert copied([2, 3, 50, 2, 3, 60, 9, 2, 3], 1) == [60]


def copying(tokens: list[int], temperature: float, kind: str = "independent"):  # type: ignore[no-untyped-def]
    sampling, cpu = Sampling(temperature), torch.device("cpu")
    request = SimpleNamespace(
        tokens=tokens, target=SimpleNamespace(device=cpu, vocab_size=20), sampling=sampling,
        generator=torch.Generator().manual_seed(0), history=History(sampling, tokens, 20, (), cpu),
    )  # fmt: skip
    return CopyingProposer(ScriptedDrafter(*DRAFTERS[kind])).start(request)  # type: ignore[arg-type]


def test_copies_after_a_repeated_ending_and_drafts_otherwise() -> None:
    copy = copying([1, 2, 3, 7, 8, 9, 6, 1, 2, 3], 1.0).propose(8)
    assert copy.tokens_K.tolist() == [7, 8, 9, 6, 1, 2, 3] and copy.law == "independent"
    assert torch.equal(copy.q.dense(20), torch.eye(20)[copy.tokens_K])
    drafted = copying([1, 2, 3, 7, 8, 9, 6, 1, 2, 4], 1.0).propose(8)
    assert len(drafted) == 3 and bool((drafted.q.dense(20).amax(1) < 1).any())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_longer_the_match_the_longer_the_copy(temperature: float) -> None:
    """By two tokens for one, past the longest ending that is looked up too, up to the text before it and to the longest copy."""
    kind = "guessed" if temperature == 0 else "independent"
    for n in range(3, 30):
        same = [100 + i for i in range(n)]
        for before in ([], [7]):
            text = [*before, *same, 1, 2, 3, 8, *same]
            copy = copying(text, temperature, kind).propose(99)
            assert len(copy) == min(7 + 2 * (n - 3), 31)
            assert copy.tokens_K.tolist()[:4] == [1, 2, 3, 8]
            assert len(copying(text, temperature, kind).propose(2)) == 2  # room for no more


def test_a_copy_after_a_shorter_match_joins_the_drafts_tree() -> None:
    """What both propose stands in it once; a chain of drafts stays one."""
    text = [1, 2, 5, 6, 7, 9, 1, 2]
    for parents, tokens, expected in (
        ((-1, -1, 0), [5, 4, 8], ([5, 4, 8, 6, 7, 9, 1], (-1, -1, 0, 0, 3, 4, 5))),
        ((-1, 0, 1), [5, 6, 8], ([5, 6, 8, 7, 9, 1], (-1, 0, 1, 1, 3, 4))),
        ((-1, -1, -1), [3, 4, 8], ([3, 4, 8, 5, 6, 7, 9, 1], (-1, -1, -1, -1, 3, 4, 5, 6))),
        (None, [3, 4, 8], ([3, 4, 8], None)),
    ):
        drafts = Proposal(torch.tensor(tokens), "point", parents=parents)
        drafts_alone = copying([1, 2, 3, 9, 1, 4], 0.0, "guessed")
        drafts_alone.inner.propose = lambda k, drafts=drafts: drafts
        assert drafts_alone.propose(8) is drafts
        own = copying(text, 0.0, "guessed")
        own.inner.propose = lambda k, drafts=drafts: drafts
        found = own.propose(8)
        assert (found.tokens_K.tolist(), found.parents) == expected and found.law == "point"
        own.inner.propose = lambda k: None
        assert own.propose(8) is None
