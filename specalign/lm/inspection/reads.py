"""Weights that a model reads without calling their layer: these keep the dtype that the model gave
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from specalign.kernels.linear import is_linear


@contextmanager
def watch_reads(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yields the linear layers and embeddings whose weight is read outside of their own call,
    within the context: Mamba multiplies by its `dt_proj`, indexers cast to the dtype of their
    `weights_proj`."""
    found: set[nn.Module] = set()
    watched = [m for m in model.modules() if is_linear(m) or isinstance(m, nn.Embedding)]
    own = [type(m) for m in watched]
    watching = {kind: _watching(kind, found) for kind in set(own)}
    try:
        for module, kind in zip(watched, own, strict=True):
            module.__class__ = watching[kind]
        yield found
    finally:
        for module, kind in zip(watched, own, strict=True):
            module.__class__ = kind


def _watching(kind: Any, found: set[nn.Module]) -> Any:
    """A subclass whose members join `found` when their weight is read while they do not run."""
    running: list[nn.Module] = []

    class Watched(kind):
        # not `forward`, which hooks of accelerate replace
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            running.append(self)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                running.pop()

        def __getattr__(self, name: str) -> Any:
            if name == "weight" and not any(module is self for module in running):
                found.add(self)
            return super().__getattr__(name)

    return Watched
