"""The sums over sampled tokens: right means and variances, bounds that hold, and the right places."""

from __future__ import annotations

import math

import pytest
import torch

from align.target.model import Target
from decode.engine.output import Generation, Tree
from decode.losslessness import conditionals
from decode.losslessness.conditionals import Sum, Tally
from decode.losslessness.law import law, scores
from decode.speculation.sampling import Sampling
from decode.wrappers.recorded import First

PROMPT = [5, 6, 7]


def output(
    tokens: list[int], rounds: list[tuple[int, int]], trees: list[Tree | None] | None = None
) -> Generation:
    return Generation(
        tokens,
        "",
        len(PROMPT),
        "length",
        drafted=[d for d, _ in rounds],
        accepted=[a for _, a in rounds],
        trees=trees or [None] * len(rounds),
    )


def test_the_bound_holds_against_the_exact_tail() -> None:
    """Of a binomial, whose tail is known."""
    for chance in (0.01, 0.2, 0.5):
        for found in range(0, 61, 3):
            s = Sum()
            x = torch.zeros(60, dtype=torch.float64)
            x[:found] = 1.0
            s.add(x, torch.full_like(x, chance), torch.full_like(x, chance * (1 - chance)))
            far = abs(found - 60 * chance) - 1e-9
            exact = sum(
                math.comb(60, n) * chance**n * (1 - chance) ** (60 - n)
                for n in range(61)
                if abs(n - 60 * chance) >= far
            )
            assert s.p_value >= exact - 1e-12
    assert s.least(1e-4) > 5 * (0.25 / 60) ** 0.5 and Sum().p_value == 1.0 and Sum().least(1e-3) == math.inf


def test_the_moments_are_those_of_p() -> None:
    """Every statistic at every token of a small vocabulary: the mean of what is found is the mean that is said."""
    torch.manual_seed(0)
    p_LV = torch.rand(4, 6, dtype=torch.float64).softmax(1)
    tokens = [2, 5, 2, 0]
    firsts = [First(1, [3, 4], None), First(3, [], torch.rand(6).softmax(0)), First(9, [1], None)]
    for place in range(1, 4):
        sums: dict[str, list[float]] = {}
        for token in range(6):
            text = torch.tensor([*tokens[:place], token, *tokens[place + 1 :]])
            of = conditionals._statistics(p_LV, text, [1])
            weight = float(p_LV[place, token])
            for name, (found_L, mean_L, variance_L) in of.items():
                at = place - (4 - len(found_L))
                got = sums.setdefault(name, [0.0, 0.0, float(mean_L[at]), float(variance_L[at])])
                got[0] += weight * float(found_L[at])
                got[1] += weight * float(found_L[at] - mean_L[at]) ** 2
            if place != 2:
                drafts = conditionals._of_drafts(p_LV, text, firsts)
                assert drafts is not None and len(drafts[0]) == 2
                got = sums.setdefault("draft", [0.0, 0.0, *(float(x[place // 2]) for x in drafts[1:])])
                got[0] += weight * float(drafts[0][place // 2])
                got[1] += weight * float(drafts[0][place // 2] - drafts[1][place // 2]) ** 2
        for name, (mean, variance, said, spread) in sums.items():
            assert mean == pytest.approx(said, abs=1e-12), name
            assert variance == pytest.approx(spread, abs=1e-12), name
    assert conditionals._of_drafts(p_LV, torch.tensor(tokens), []) is None


def test_the_places_after_whole_drafts() -> None:
    after = conditionals._after_whole
    # prefill, then 2 of 2 and a token, 1 of 2 and a token, nothing drafted, 2 of 2 whose next token no longer fits
    assert list(after(output(list(range(9)), [(2, 2), (2, 1), (0, 0), (2, 2)]))) == [3]
    fork = (-1, -1, 1)
    trees = [Tree(fork, [1, 2]), Tree(fork, [1]), Tree(fork, [0]), Tree(fork, [])]
    rounds = [(2, 2), (2, 1), (2, 1), (2, 0)]
    assert list(after(output(list(range(9)), rounds, trees))) == [3, 7]
    cut = [Tree(fork, [1, 2])]  # the text ended with the first of two accepted tokens
    assert list(after(output([0, 1], [(2, 1)], cut))) == []


def test_the_logits_are_those_of_plain_forwards(target: Target) -> None:
    texts = [[9, 5, 9, 11, 3], [8, 2]]
    found = conditionals.logits_of(target, PROMPT, [output(t, []) for t in texts])
    for tokens, logits_LV in zip(texts, found, strict=True):
        whole = target.forward(torch.tensor([[*PROMPT, *tokens[:-1]]])).logits_BLV
        assert whole is not None
        expected = whole[0, len(PROMPT) - 1 :].double()
        assert torch.allclose(logits_LV, expected, atol=1e-4)


def test_an_impossible_token_is_counted_and_a_tie_is_not(target: Target) -> None:
    sampling = Sampling(1.0, top_k=2)
    logits_LV = torch.zeros(3, target.vocab_size, dtype=torch.float64)
    logits_LV[:, :3] = torch.tensor([5.0, 4.0, 4.0 - 1e-5], dtype=torch.float64)
    z_LV = scores(logits_LV, PROMPT, [1, 2, 9], sampling, target.eos_ids)
    outside = conditionals.outside(z_LV, law(z_LV, sampling), torch.tensor([1, 2, 9]))
    assert outside == 1  # token 2 is as good as token 1; token 9 is not
    tally = Tally()
    tally.impossible = 1
    assert not tally.passed(1e-3)


@pytest.mark.slow
def test_texts_drawn_from_p_pass_and_others_do_not(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(1.0)
    for share, right in ((1.0, True), (2.0, False)):
        tally = Tally()
        texts = []
        for _ in range(12):
            tokens: list[int] = []
            for _ in range(16):
                logits = target.forward(torch.tensor([[*PROMPT, *tokens]])).logits_BLV
                assert logits is not None
                p_V = (logits[0, -1].double() * share).softmax(0)
                tokens.append(int(torch.multinomial(p_V, 1, generator=generator)))
            texts.append(output(tokens, []))
        tally.add(target, PROMPT, texts, [[] for _ in texts], sampling, "T=1")
        assert tally.tokens("all") == 192 and tally.tokens("whole") == 0
        assert tally.passed(1e-3) is right
