"""DiffuSpec: the path search against all paths, and in the engine the path against its parts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from decode import Sampling
from decode.engine.request import RequestRunner
from decode.proposers.diffuspec import (
    Column,
    DiffuSpecProposer,
    DiffuSpecSession,
    NgramModel,
    find_best_path,
    find_candidates,
)
from decode.speculation.sampling import probs
from specalign.lm.model import Target
from specalign.models.diffusion_context import DiffusionContext
from tests.builders import PROMPT, VARIED, prefill
from tests.builders import diffusion_drafter as drafter


def made(
    target: Target, kind: str = "ddit", draft_tokens: int = 6, **options: Any
) -> DiffuSpecProposer:
    return DiffuSpecProposer(drafter(target, kind), draft_tokens, **options)


def begun(target: Target, proposer: DiffuSpecProposer, sampling: Sampling) -> DiffuSpecSession:
    """A request after its first token."""
    verifier = "point_mass" if sampling.temperature else "greedy"
    runner = RequestRunner(target, PROMPT, 40, sampling, proposer, verifier)
    prefill(runner)
    assert isinstance(runner.session, DiffuSpecSession)
    return runner.session


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8, top_k=9), replace(VARIED, temperature=0.7, banned=(3, 40))],
)
def test_the_path_is_searched_in_processed_marginals(target: Target, sampling: Sampling) -> None:
    """Against the parts put together again."""
    corpus = [[4, 90, 17, 55, 56] * 3]
    session = begun(target, made(target, corpus=corpus), sampling)
    tokens, network = session.request.tokens, session.drafter
    context = DiffusionContext(network, 60)
    with torch.no_grad():
        context.extend(tokens)
        logits_KV = context.denoise(torch.full((6,), network.mask_id))
        proposal = session.propose(6)
    before = session.request.history.ahead(0, 6)
    q = probs(logits_KV, replace(sampling, temperature=sampling.temperature or 1.0), before)
    reader = NgramModel(target.vocab_size)
    for text in (*corpus, tokens):
        reader.read(text)
    lattice = find_candidates(q, 0.8, 15, target.eos_ids)

    def read(path: Sequence[int], found: Sequence[int]) -> list[float]:
        return reader.log_probs([*tokens, *path], found)

    path = find_best_path(lattice, read, 0.5, 3, target.eos_ids)
    assert proposal is not None and proposal.law == "point" and proposal.q is None
    assert proposal.tokens_K.tolist() == path and len(set(path) & set(sampling.banned)) == 0


END = 0


def log(*pairs: tuple[int, float]) -> Column:
    return [(token, pytest.approx(math.log(q))) for token, q in pairs]


def test_the_fewest_tokens_that_hold_the_mass() -> None:
    q = torch.tensor(
        [[0.01, 0.05, 0.6, 0.24, 0.1], [0.0, 0.9, 0.1, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]]
    )
    assert find_candidates(q, 0.8, 15, ())[:2] == [log((2, 0.6), (3, 0.24)), log((1, 0.9))]
    assert find_candidates(q, 0.85, 15, ())[0] == log((2, 0.6), (3, 0.24), (4, 0.1))
    for mass in (0.95, 1.0):  # nothing of probability 0
        assert find_candidates(q, mass, 15, ())[1] == log((1, 0.9), (2, 0.1))
    assert [len(c) for c in find_candidates(q, 0.7, 15, ())] == [2, 1, 4]


def reader(seed: int, V: int):  # type: ignore[no-untyped-def]
    """Any left-to-right model: its distribution depends on the two tokens before."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(V + 1, V + 1, V, generator=generator).log_softmax(-1)

    def read(path: tuple[int, ...], tokens: Sequence[int]) -> list[float]:
        a, b = [V, V, *path][-2:]
        return table[a, b, list(tokens)].tolist()

    return read


@pytest.mark.parametrize("ends", [(), (END,), (END, 1)])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_path(seed: int, weight: float, ends: tuple[int, ...]) -> None:
    V, K = 4, 4
    q = (torch.randn(K, V, generator=torch.Generator().manual_seed(seed)) * 2).softmax(-1)
    lattice, read = find_candidates(q, 0.95, V, ends), reader(seed, V)

    def per_token(path: tuple[int, ...]) -> float:
        total = 0.0
        for i, token in enumerate(path):
            total += weight * dict(lattice[i])[token] + (1 - weight) * read(path[:i], [token])[0]
        return total / len(path)

    every = {
        path
        for n in range(1, K + 1)
        for path in product(*([t for t, _ in column] for column in lattice[:n]))
        if not set(path[:-1]) & set(ends) and (n == K or path[-1] in ends)
    }
    found = tuple(find_best_path(lattice, read, weight, V**K, ends))
    assert found in every and per_token(found) == pytest.approx(max(map(per_token, every)))


V = 6
TEXT = torch.randint(4, (50,), generator=torch.Generator().manual_seed(0)).tolist()
"""4 and 5 are never seen."""


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
