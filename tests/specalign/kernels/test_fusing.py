"""Functions that run fused on a GPU: as they stand on a CPU, and where compiling fails."""

import pytest
import torch

from align.losses import divergence_gradients, divergences
from align.losses.target_places import target_places
from specalign.kernels.fusing import fused_on_gpu


class OnGPU:
    is_cuda = True


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setattr("specalign.kernels.fusing.find_spec", lambda name: object())


def test_a_cpu_compiles_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("compiled"))
    assert fused_on_gpu(lambda x: x + 1)(torch.ones(1)) == 2


def test_what_cannot_be_compiled_runs_as_it_stands(monkeypatch):
    asked = []

    def compiles(function, dynamic):
        asked.append(function)
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(torch, "compile", compiles)
    run = fused_on_gpu(lambda x: "as it stands")
    with pytest.warns(UserWarning, match="not fused on this GPU, and slower: no compiler$"):
        assert run(OnGPU()) == "as it stands"
    assert run(OnGPU()) == "as it stands" and len(asked) == 1


def captured(function):
    """What torch.compile makes of a function before it writes code."""
    return torch.compile(function.__wrapped__, dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("names", [("forward_kl",), divergence_gradients.DIVERGENCES])
def test_losses_and_slopes_are_the_same_captured(monkeypatch, names):
    def once():
        torch.manual_seed(0)
        head = torch.randn(30, 8)
        places = target_places(torch.randn(6, 8), torch.randint(0, 30, (6,)), lambda h: h @ head.T)
        vocab = torch.arange(0, 30, 2)
        hidden, z, basis = (
            torch.randn(n, m, requires_grad=True) for n, m in ((9, 8), (9, 3), (3, 15))
        )
        rows = divergences.DraftRows(hidden, torch.randint(0, 6, (9,)), z, basis)
        found = divergences.row_statistics(rows, places, head[vocab], vocab, (9,), frozenset(names))
        sum(getattr(found, name).sum() for name in names).backward()
        values = [getattr(found, name).detach() for name in (*names, "acceptance", "match")]
        return [*values, hidden.grad, z.grad, basis.grad]

    plain = once()
    for name in ("_log_softmax", "_sums", "_slope"):
        monkeypatch.setattr(
            divergence_gradients, name, captured(getattr(divergence_gradients, name))
        )
    for a, b in zip(plain, once(), strict=True):
        torch.testing.assert_close(a, b)
