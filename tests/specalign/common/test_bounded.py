"""Bounds on foreign code: each ends in one line, and leaves the process as it was."""

from __future__ import annotations

import resource
import signal

import pytest

from specalign.common.bounded import bounded
from specalign.common.errors import UserError


def test_the_bounds_hold_and_are_taken_back() -> None:
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError, match=r"x takes longer than 0\.05 seconds"), bounded("x", 0.05):
        while True:
            pass
    with pytest.raises(UserError, match=r"x takes more than 1 GiB"), bounded("x"):
        b"a" * (1 << 36)
    with bounded("x"):
        pass
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
