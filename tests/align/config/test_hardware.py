"""What a recipe asks of the machine, and which process is which, however they were started."""

import subprocess
import sys
from typing import Any

import pytest

from align.config import hardware
from align.config.hardware import check_devices, devices
from align.config.parser import load_recipe
from specalign.common.errors import UserError


def recipe(*words: str) -> Any:
    return load_recipe(["recipe=debug_block", *words])


def test_missing_hardware_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match="torch sees no GPU"):
        check_devices(recipe("target.device=cuda"))
    monkeypatch.setattr(hardware, "gpu_count", lambda: 1)
    with pytest.raises(UserError, match="launch.devices=2: torch sees 1"):
        check_devices(recipe("target.device=cuda", "launch.devices=2"))
    assert devices(recipe("target.device=cuda:1")) == [1]


ALIKE = """
from align.config.hardware import use_deterministic_products
use_deterministic_products()
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
torch.manual_seed(0)
x, w, q, k = torch.randn(5, 576), torch.randn(1536, 576), torch.randn(8, 3, 3, 64), torch.randn(8, 3, 333, 64)
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    found.append((linear(x, w), scaled_dot_product_attention(q, k, k)))
assert all(map(torch.equal, *found))
"""


@pytest.mark.slow
def test_products_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows, and attention of three rows over a length that no vector divides, are two that MKL splits."""
    monkeypatch.delenv("MKL_CBWR", raising=False)
    subprocess.run([sys.executable, "-c", ALIKE], check=True)
