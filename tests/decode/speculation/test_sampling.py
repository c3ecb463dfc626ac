import itertools
import math
from dataclasses import replace

import pytest
import torch

from decode.speculation.sampling import (
    ProcessorState,
    apply_penalties,
    best,
    couple,
    draw,
    draw_at,
    make_generator,
    position_noise,
    probs,
    token_numbers,
    uniform,
)
from decode.speculation.settings import Sampling
from decode.verification.batches import settings


def logits(rows: int, V: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def reference(
    row: list[float], sampling: Sampling, seen: set[int], written: set[int], barred: set[int]
) -> list[float]:
    """The processors one token at a time, in plain Python."""
    penalty = sampling.repetition_penalty
    row = [(x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(row)]
    row = [x - sampling.presence_penalty * (i in written) for i, x in enumerate(row)]
    row = [-math.inf if i in barred else x for i, x in enumerate(row)]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if sampling.temperature == 0:
        return [float(i == order[0]) for i in range(len(row))]
    row = [x / sampling.temperature for x in row]
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = {i: math.exp(row[i] - row[order[0]]) for i in kept}
    if sampling.top_p < 1:
        total, mass, few = sum(weights.values()), 0.0, []
        for i in kept:
            few.append(i)
            mass += weights[i] / total
            if mass >= sampling.top_p:
                break
        kept = few
    kept = [i for i in kept if weights[i] >= sampling.min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(row))]


SEEN, WRITTEN, BARRED = (
    [{0, 5, 7, *range(20, 36)}, {39}, {1}],
    [{5}, set(), {1, 2, 3}],
    [set(), {4, 6, 11}, {0, *range(8, 20)}],
)


def marks(sets: list[set[int]]) -> torch.Tensor:
    return torch.tensor([[i in s for i in range(400)] for s in sets])


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_probs_follow_the_definition(seed: int, fixed: bool) -> None:
    rows_RV = logits(3, 400, seed)
    for number, one in enumerate(settings(seed, [])):
        sampling = replace(one, temperature=one.temperature * (number % 5 > 0))
        barred = BARRED if number % 2 else [set[int]()] * 3
        before = ProcessorState(marks(SEEN), marks(WRITTEN), marks(barred) if number % 2 else None)
        found = probs(rows_RV, sampling, before, fixed=fixed)
        assert found.dtype == torch.float32
        for i, got in enumerate(found):
            expected = reference(rows_RV[i].tolist(), sampling, SEEN[i], WRITTEN[i], barred[i])
            torch.testing.assert_close(got, torch.tensor(expected), atol=2e-6, rtol=1e-4)
            rows = slice(i, i + 1)
            alone = probs(rows_RV[rows], sampling, before.rows(rows), fixed=fixed)
            torch.testing.assert_close(found[rows], alone)


def test_states_of_several_requests_are_joined() -> None:
    """A mask of one dimension is every row's; none is a mask without tokens."""
    one, row, rows = marks([{1}])[0], marks([{4}]), marks([{2}, {3}, set()])
    states = [(one, None), (row, row), (rows, rows), (None, one)]
    joined = ProcessorState.joined([ProcessorState(*pair) for pair in states], [4, 1, 3, 2])
    none = torch.zeros(4, 400, dtype=torch.bool)
    assert joined.seen is not None and joined.written is not None and joined.barred is None
    assert torch.equal(joined.seen, torch.cat((one.expand(4, -1), row, rows, none[:2])))
    assert torch.equal(joined.written, torch.cat((none, row, rows, one.expand(2, -1))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_numbers_are_fp32_and_fp64_stays(dtype: torch.dtype) -> None:
    own = torch.float64 if dtype == torch.float64 else torch.float32
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.5, top_k=3, min_p=0.1)):
        assert probs(logits(2, 40).to(dtype), sampling).dtype == own
    assert apply_penalties(logits(2, 40).to(dtype), Sampling()).dtype == own


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3},
        {"min_p": 0.3}, {"top_p": 0.6, "min_p": 0.05}, {"repetition_penalty": 0.8, "top_k": 3},
    ],
)  # fmt: skip
def test_the_order_is_that_of_transformers(settings: dict[str, float]) -> None:
    """Its own processors, chained as its `generate` chains them."""
    from transformers import generation as g

    text = torch.tensor([[3, 8, 3, 17, 30]])
    chain = g.LogitsProcessorList()
    made = {
        "repetition_penalty": g.RepetitionPenaltyLogitsProcessor, "temperature": g.TemperatureLogitsWarper,
        "top_k": g.TopKLogitsWarper, "top_p": g.TopPLogitsWarper, "min_p": g.MinPLogitsWarper,
    }  # fmt: skip
    for name, kind in made.items():
        if name in settings:
            chain.append(kind(settings[name]))
    sampling = Sampling(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    for row in logits(20, 40):
        expected = chain(text, row[None].clone())[0].softmax(-1)
        seen = torch.zeros(40, dtype=torch.bool).index_fill(0, text[0], True)
        found = probs(row, sampling, ProcessorState(seen))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("size", [4096, 4100, 4736, 49152])
def test_the_best_of_many_is_torchs_argmax(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    # the lowest id of many equal ones
    ties = torch.randint(0, 4, (3, 5, size), generator=generator).float()
    barred = torch.full((2, size), -math.inf)
    barred[1, 300:302] = 1.0
    broken = torch.randn(2, size, generator=generator)
    broken[0, 77] = math.nan
    for logits in (ties, ties.double(), ties[0, 0], barred, broken):
        assert torch.equal(best(logits, Sampling()), logits.argmax(-1))


def test_ties_go_to_the_lowest_id() -> None:
    row = torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0])
    assert best(row, Sampling()) == 1
    assert probs(row, Sampling()).tolist() == [0, 1, 0, 0, 0]
    assert probs(row, Sampling(1.0, top_k=2)).tolist() == [0, 0.5, 0.5, 0, 0]
    assert probs(row, Sampling(1.0, top_k=1)).tolist() == [0, 1, 0, 0, 0]
    assert probs(row, Sampling(1.0, top_p=0.4)).tolist() == [0, 0.5, 0.5, 0, 0]
    assert probs(row, Sampling(1.0, min_p=1.0)).nonzero()[:, 0].tolist() == [1, 2, 3]
    below = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0])
    assert probs(below, Sampling(1.0, top_k=2)).nonzero()[:, 0].tolist() == [0, 1]
    assert probs(below, Sampling(1.0, top_k=3)).nonzero()[:, 0].tolist() == [0, 1, 2]
    assert probs(torch.zeros(9), Sampling(1.0, top_p=0.2)).tolist() == [0.5, 0.5] + [0.0] * 7
    # none is left out
    assert probs(torch.zeros(4), Sampling(1.0, top_p=0.9)).tolist() == [0.25] * 4


def test_top_p_ranks_as_many_candidates_as_it_needs() -> None:
    """Flat rows over a large vocabulary: the first few hundred candidates do not hold the mass."""
    rows_RV = logits(4, 9000) * torch.tensor([[5.0], [0.0], [1.0], [0.01]])
    for row, found in zip(rows_RV, probs(rows_RV, Sampling(1.0, top_p=0.90003)), strict=True):
        full = row.double().softmax(-1)
        order = full.argsort(descending=True, stable=True)
        count = int((full[order].cumsum(0) < 0.90003).sum()) + 1
        assert set(found.nonzero()[:, 0].tolist()) == set(order[:count].tolist())


def test_the_input_is_left_alone() -> None:
    rows_RV = logits(2, 400)
    given = rows_RV.clone()
    state = ProcessorState(marks([{1, 4}, {2}]), marks([{4}, {2, 3}]), marks([{9}, {0}]))
    settings = [Sampling(), Sampling(repetition_penalty=2.0, presence_penalty=0.5)]
    settings += [Sampling(0.5, 0.5, 5, 2.0), Sampling(1.0), Sampling(0.8, min_p=0.1)]
    for sampling, before in itertools.product(settings, (state, ProcessorState())):
        expected = probs(rows_RV, sampling, before)
        best(rows_RV, sampling, before)
        apply_penalties(rows_RV, sampling, before)
        assert torch.equal(given, rows_RV)
        assert torch.equal(probs(given.clone(), sampling, before, overwrite=True), expected)


def test_draws_are_the_inverse_of_the_running_sum() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert draw_at(weights.expand(5, 5), u).tolist() == [1, 1, 3, 3, 3]
    grid = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    row = torch.rand(6, generator=torch.Generator().manual_seed(1))
    faint, late = torch.tensor([1.0, 2**-25]), torch.tensor(1 - 2**-30, dtype=torch.float64)
    assert draw_at(faint, late) == 1 and draw_at(torch.zeros(3), late) == 2
    counts = torch.bincount(draw_at(row.expand(8000, 6), grid), minlength=6)
    torch.testing.assert_close(counts / 8000, row / row.sum(), atol=3e-4, rtol=0)


def test_draws_need_no_normalisation_and_repeat_with_the_seed() -> None:
    weights = torch.rand(4, 100) * 1e-20
    first = draw(weights, torch.Generator().manual_seed(5))
    assert torch.equal(first, draw(weights * 1e10, torch.Generator().manual_seed(5)))
    assert torch.equal(first, draw_at(weights, uniform(4, torch.Generator().manual_seed(5))))
    assert first.shape == (4,) and first.dtype == torch.int64
    assert draw(weights[0], torch.Generator().manual_seed(5)).shape == ()
    u = uniform(1000, torch.Generator().manual_seed(0))
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1


def test_all_of_a_seed_counts() -> None:
    """torch's own generator looks at the lower 32 bits; what those alone seed stays as it was."""
    alike = [0, 2**32, 2**33, 2**62]
    own = [token_numbers(seed, 4, torch.device("cpu")) for seed in alike]
    drawn = [uniform(4, make_generator(seed)) for seed in alike]
    assert len({tuple(x.tolist()) for x in own + drawn}) == 8  # none serves a draft as well
    noise = [position_noise(seed, 3, 4, torch.device("cpu")) for seed in alike]
    assert len({tuple(row.tolist()) for row in noise}) == 4
    for seed in (0, 5, 2**32 - 1):
        torchs = uniform(4, torch.Generator().manual_seed(seed))
        assert torch.equal(uniform(4, make_generator(seed)), torchs)


def test_coupled_draws_take_the_gumbel_noise_of_their_positions() -> None:
    def noise(position: int, size: int = 20_000) -> torch.Tensor:
        return position_noise(3, position, size, torch.device("cpu"))

    first = noise(7)
    assert first.dtype == torch.float64 and torch.equal(first, noise(7))
    assert not torch.equal(first, noise(8))
    assert float(first.mean()) == pytest.approx(0.5772, abs=0.03)  # Euler's γ, and π²/6
    assert float(first.var()) == pytest.approx(1.6449, abs=0.08)
    p_RV = logits(4, 5).softmax(-1)
    expected = (p_RV.double().log() + torch.stack([noise(i, 5) for i in (9, 4, 7, 8)])).argmax(1)
    assert torch.equal(couple(p_RV, lambda i: noise(i, 5), [9, 4, 7, 8]), expected)
