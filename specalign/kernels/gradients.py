"""Functions that keep no gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Found = TypeVar("Found")


def without_gradients(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """As `@torch.no_grad()`, which takes 15 µs within a round of decoding; this one nothing where
    gradients are off already."""

    @wraps(function)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapped
