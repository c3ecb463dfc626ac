"""The counter of launches, syncs and uploads, in a separate process, because its device is global."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.processes import run_module


@pytest.mark.slow
def test_operators_are_counted_as_on_a_gpu() -> None:
    run_module("tests.test_launches")


def check() -> None:
    from tests.elsewhere import DEVICE, Elsewhere
    from tools.launches import OperatorCounter

    with Elsewhere():
        x = torch.arange(12.0, device=DEVICE).view(3, 4)
        mask, weight, places = x > 3, torch.ones(4, device=DEVICE), torch.ones(2).long()
        cases: list[tuple[Callable[[], object], tuple[int, int, int, int]]] = [
            (lambda: x.t()[1].unsqueeze(0).detach(), (0, 0, 0, 0)),  # views
            (lambda: x.t().reshape(2, 6), (1, 0, 0, 0)),
            (lambda: torch.cat([x, x]) + 1, (2, 0, 0, 0)),
            (lambda: F.rms_norm(x, (4,), weight), (1, 0, 0, 0)),  # one kernel each
            (lambda: F.scaled_dot_product_attention(*[x[None, None]] * 3), (1, 0, 0, 0)),
            (lambda: x[0, 0].item(), (0, 1, 0, 0)),
            (lambda: bool(mask.any()), (1, 1, 0, 0)),
            (x.tolist, (0, 1, 0, 0)),
            (x.cpu, (0, 1, 0, 0)),
            (lambda: x.to("cpu", non_blocking=True), (0, 0, 0, 1)),
            (lambda: x[mask], (1, 1, 0, 0)),
            (lambda: x.__setitem__(mask, 0.0), (2, 0, 0, 0)),  # a fill: the host need not know
            (mask.nonzero, (1, 1, 0, 0)),
            (x.unique, (1, 1, 0, 0)),
            (lambda: torch.tensor([1, 2], device=DEVICE), (0, 0, 1, 0)),
            (lambda: torch.ones(3).to(DEVICE), (0, 0, 1, 0)),
            (lambda: torch.ones(3).to(DEVICE, non_blocking=True), (0, 0, 0, 1)),
            (lambda: x[[0, 1]], (1, 0, 1, 0)),
            (lambda: x[places], (1, 0, 1, 0)),
            (lambda: x + torch.tensor(1.0), (1, 0, 0, 0)),  # a number goes with the launch
            (lambda: torch.ones(3) + 1, (0, 0, 0, 0)),  # on the CPU
        ]
        for number, (run, wanted) in enumerate(cases):
            with OperatorCounter() as counter:
                run()
            found = (counter.launches, counter.syncs, counter.uploads, counter.asynchronous)
            assert found == wanted, (number, found, wanted, str(counter))


if __name__ == "__main__":
    check()
