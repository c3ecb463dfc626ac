from types import SimpleNamespace

import torch

from decode.proposers.lookup import LookupDrafter, LookupSession


def session(tokens: list[int], longest: int = 3) -> LookupSession:
    request = SimpleNamespace(tokens=tokens, target=SimpleNamespace(device=torch.device("cpu")))
    return LookupDrafter(4, longest).start(request)  # type: ignore[arg-type]


def copied(tokens: list[int], k: int = 4) -> list[int] | None:
    proposal = session(tokens).propose(k)
    return None if proposal is None else proposal.tokens_K.tolist()


def test_copies_what_followed_the_ending() -> None:
    assert copied([1, 2, 3, 7, 8, 9, 6, 1, 2, 3]) == [7, 8, 9, 6]
    assert copied([1, 2, 3, 7, 8, 9, 6, 1, 2, 3], 2) == [7, 8]


def test_the_longest_ending_wins_then_the_latest() -> None:
    assert copied([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], 1) == [50]
    assert copied([2, 3, 50, 2, 3, 60, 9, 2, 3], 1) == [60]


def test_nothing_to_copy() -> None:
    assert copied([1, 2, 3]) is None
    assert copied([1]) is None


def test_a_cycle_is_continued() -> None:
    assert copied([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert copied([4, 4], 3) == [4, 4, 4]


def test_the_index_grows_with_the_text() -> None:
    tokens = [1, 2, 3]
    growing = session(tokens)
    assert growing.propose(4) is None
    for new in ([9, 1], [2], [3, 9, 9, 1, 2, 3]):
        tokens.extend(new)
        found, fresh = growing.propose(4), session(list(tokens)).propose(4)
        assert found is not None and fresh is not None
        assert found.law == "point" and torch.equal(found.tokens_K, fresh.tokens_K)
