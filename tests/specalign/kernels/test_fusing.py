"""Functions that run fused on a GPU: as they stand on a CPU, and where compiling fails."""

import pytest
import torch

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
    with pytest.warns(
        UserWarning, match="not fused on this GPU, and therefore slower: no compiler$"
    ):
        assert run(OnGPU()) == "as it stands"
    assert run(OnGPU()) == "as it stands" and len(asked) == 1
