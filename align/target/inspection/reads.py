"""Which layers' weights a model reads past them: such a weight keeps the type that the model gave it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from align.kernels.linear import is_linear


@contextmanager
def reads_past(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yields the linear layers and embeddings whose weight other code than their own forward reads, within it: Mamba multiplies with
    that of its step's projection, an indexer rounds what it gives a projection to its weight's type."""
    found: set[nn.Module] = set()
    watched = [m for m in model.modules() if is_linear(m) or isinstance(m, nn.Embedding)]
    kinds = {kind: _watching(kind, found) for kind in {type(m) for m in watched}}
    own = [type(m) for m in watched]
    try:
        for module, kind in zip(watched, own, strict=True):
            module.__class__ = kinds[kind]
        yield found
    finally:
        for module, kind in zip(watched, own, strict=True):
            module.__class__ = kind


def _watching(kind: Any, found: set[nn.Module]) -> Any:
    """The same class, of which every member whose weight is read while it does not run joins `found`."""
    running: list[nn.Module] = []

    class Watched(kind):
        # not `forward`: accelerate's hooks replace that of a module
        def __call__(self, *given: Any, **named: Any) -> Any:
            running.append(self)
            try:
                return super().__call__(*given, **named)
            finally:
                running.pop()

        def __getattr__(self, name: str) -> Any:
            if name == "weight" and not any(module is self for module in running):
                found.add(self)
            return super().__getattr__(name)

    return Watched
