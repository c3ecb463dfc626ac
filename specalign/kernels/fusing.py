"""Element-wise passes over large tensors as few kernels: torch.compile, on a GPU and where Triton
is there; elsewhere as they stand.

A loss over (rows, vocabulary) is bound by memory: each pass that is not made is time. On a CPU the
rows are cut so that they stay in its cache instead (align/losses/divergences.py), and every bit
stays what it was.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def fused_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, compiled at its first call on a GPU if possible; else it warns."""
    compiled: Callable[..., Any] | None = None

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Any:
        nonlocal compiled
        if not first.is_cuda or find_spec("triton") is None:
            return function(first, *others)
        try:
            compiled = compiled or torch.compile(function, dynamic=True)
            return compiled(first, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of Dynamo, Inductor, Triton or the compiler that it calls
            compiled = function
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(f"not fused on this GPU, and therefore slower: {why[:160]}", stacklevel=2)
            return function(first, *others)

    return run
