"""What drafters share."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from decode.drafters.base import DraftSession, check_range, common_prefix_length


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0)],
)
def test_the_prefix_that_two_texts_share(one: list[int], other: list[int], length: int) -> None:
    assert common_prefix_length(one, other) == common_prefix_length(other, one) == length


def test_ranges() -> None:
    check_range("gamma", None, 1)
    check_range("gamma", 1, 1)
    check_range("gamma", 10**9, 1, None)
    with pytest.raises(UserError, match="gamma=0: must be at least 1"):
        check_range("gamma", 0, 1, None)
    with pytest.raises(UserError, match="gamma=9: must be 1 to 8"):
        check_range("gamma", 9, 1, 8)


def test_a_session_needs_no_more_than_propose() -> None:
    class Silent(DraftSession):
        def propose(self, k: int) -> None:
            return None

    session = Silent()
    session.close()
    assert (session.taps, session.rewinds, session.propose(3)) == ((), False, None)
    with pytest.raises(TypeError, match="abstract"):
        DraftSession()  # type: ignore[abstract]
