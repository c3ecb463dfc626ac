"""The n-gram model: sums, the formula, counts that grow, a base that stays."""

from __future__ import annotations

import math

import pytest
import torch

from align.common.errors import UserError
from decode.drafters.diffuspec_search import NgramModel

V = 6
TEXT = torch.randint(4, (50,), generator=torch.Generator().manual_seed(0)).tolist()  # 4 and 5 are never seen


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("strength", [0.1, 1.0, 5.0])
def test_every_context_has_a_distribution(order: int, strength: float) -> None:
    base = NgramModel(V, order, strength)
    base.read([TEXT[:20], TEXT[30:]])
    model = base.continued()
    for end in range(0, 40, 4):
        for context in ([], [0], [3, 1], TEXT[:end], [5, 5, 5], [2, 5]):
            log_p = model.log_probs(context, range(V))
            assert math.fsum(map(math.exp, log_p)) == pytest.approx(1, abs=1e-12)
        model.extend(TEXT[end : end + 4])


def test_against_the_formula() -> None:
    model = NgramModel(V, 3, 0.5)
    model.extend(TEXT)

    def count(*ngram: int) -> int:
        n = len(ngram)
        return sum(tuple(TEXT[i : i + n]) == ngram for i in range(len(TEXT) - n + 1))

    for a, b, c in [(0, 1, 2), (3, 3, 1), (2, 5, 0), (5, 0, 3), (1, 2, 4)]:
        p = (count(c) + 0.5 / V) / (len(TEXT) + 0.5)
        # the text's last token was followed by nothing
        for context in ((b,), (a, b)):
            followed = sum(count(*context, x) for x in range(V))
            p = (count(*context, c) + 0.5 * p) / (followed + 0.5)
        assert model.log_probs([9, a, b], [c]) == [pytest.approx(math.log(p))]


def test_counting_as_the_text_grows_is_counting_at_once() -> None:
    once, growing = NgramModel(V), NgramModel(V)
    once.extend(TEXT)
    for token in TEXT:
        growing.extend([token])
    assert once.counts == growing.counts and once.followed == growing.followed


def test_texts_are_apart_and_a_base_stays_as_it_is() -> None:
    base = NgramModel(V)
    base.read([[0, 1], [2, 3]])
    assert (1, 2) not in base.counts and base.counts[2, 3] == 1
    before = (dict(base.counts), dict(base.followed))
    model = base.continued()
    model.extend([0, 1, 2])
    assert (dict(base.counts), dict(base.followed)) == before
    both = NgramModel(V)
    both.read([[0, 1], [2, 3], [0, 1, 2]])
    for context in ([], [0], [1], [0, 1]):
        assert model.log_probs(context, range(V)) == pytest.approx(both.log_probs(context, range(V)))


def test_wrong_numbers() -> None:
    with pytest.raises(UserError, match="order=0"):
        NgramModel(V, 0)
    with pytest.raises(UserError, match="strength=0"):
        NgramModel(V, 3, 0)
