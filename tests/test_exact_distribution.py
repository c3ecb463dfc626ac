"""The exact distribution by enumeration, and the statistics of the test."""

from collections import Counter

import pytest

from tests.exact_distribution import chi_square, chi_square_tail


def test_the_statistics() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-5)
    assert chi_square_tail(29.588, 10) == pytest.approx(0.001, abs=1e-5)
    found, law = Counter({(0,): 60, (1,): 38, (2,): 2}), {(0,): 0.6, (1,): 0.37, (2,): 0.03}
    assert chi_square(found, law, 100) == (0.0, 1)  # the rare one is counted with the next
