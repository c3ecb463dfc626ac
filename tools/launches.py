"""Counts what a GPU would do, without one: kernel launches, host syncs and blocking uploads.

Run the code on the pretended device of `tests/elsewhere.py`, in a separate process:

    with elsewhere.Elsewhere(), OperatorCounter() as counter:
        step()
    print(counter)
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
_FUSED = {F.scaled_dot_product_attention, F.rms_norm, torch.rms_norm}
"""One kernel on a GPU, several operators of a pretended device."""
_FREE = "_unsafe_view empty empty_like empty_strided new_empty new_empty_strided set_ resize_"
_READS = "_local_scalar_dense equal is_nonzero bincount nonzero masked_select repeat_interleave"
_READS += " _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive"
_INDEXED = "index index_put index_put_ _index_put_impl_"


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run on devices of one type while it is entered.

    launches: operators that are neither views nor transfers. syncs: those for which the host waits:
    reading a scalar, copying to the CPU, a shape that depends on values. uploads: copies from the
    CPU; `asynchronous`: those with `non_blocking`, which do not block if the memory is pinned.
    operators: launches by name. places: syncs and uploads by the project's line that caused them.
    """

    def __init__(self, device: str = "elsewhere") -> None:
        super().__init__()
        self.device = device
        self._fused = _FusedOperators(self)
        self.inside_fused = False
        self.launches = self.syncs = self.uploads = self.asynchronous = 0
        self.operators: Counter[str] = Counter()
        self.places: Counter[str] = Counter()

    def __str__(self) -> str:
        sums = f"{self.launches} launches, {self.syncs} syncs, {self.uploads} uploads"
        lines = [f"{count:6} {place}" for place, count in self.places.most_common()]
        return "\n".join([f"{sums}, {self.asynchronous} asynchronous", *lines])

    def __enter__(self) -> OperatorCounter:
        self._fused.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fused.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs=None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            pair = (args[0], out) if name == "_to_copy" else (args[1], args[0])
            self._count_copy(*pair, kwargs.get("non_blocking") or args[2:] == (True,))
        elif any(map(self._is_there, tree_leaves((args, kwargs, out)))):
            if not function.is_view and name not in (*_FREE.split(), "_local_scalar_dense"):
                self.count_launch(name)
            if name in _READS.split():
                self._note("syncs", name)
            if name in _INDEXED.split():
                self._check_indices(name, args)
        return out

    def _check_indices(self, name: str, args: Any) -> None:
        """Masks become places, whose number the host has to know, unless they are filled with one
        number; places of the CPU are copied."""
        indices = [x for x in args[1] if x is not None]
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        is_fill = name != "index" and args[2].numel() == 1 and len(masks) == len(indices)
        if masks and not is_fill:
            self._note("syncs", name)
        if not all(map(self._is_there, indices)):
            self._note("uploads", name)

    def count_launch(self, name: str) -> None:
        """Count an operator, unless it is a part of a fused one."""
        if not self.inside_fused:
            self.launches += 1
            self.operators[name] += 1

    def _is_there(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.device.type == self.device

    def _count_copy(self, source: Tensor, copy: Tensor, non_blocking: bool) -> None:
        read, written = self._is_there(source), self._is_there(copy)
        if read and written:
            self.count_launch("copy")
        elif read or written:
            kind = "syncs" if read else "uploads"
            self._note("asynchronous" if non_blocking else kind, "copy")

    def _note(self, kind: str, name: str) -> None:
        """Count a sync or upload, and the line of the project that is executed."""
        setattr(self, kind, getattr(self, kind) + 1)
        frame = sys._getframe()
        tops = tuple(str(ROOT / top) for top in ("align", "decode", "specalign"))
        while frame.f_back and not frame.f_code.co_filename.startswith(tops):
            frame = frame.f_back
        path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        self.places[f"{kind}: {name} at {path}:{frame.f_lineno}"] += 1


class _FusedOperators(TorchFunctionMode):
    def __init__(self, counter: OperatorCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs=None) -> Any:
        if function not in _FUSED or self.counter.inside_fused:
            return function(*args, **(kwargs or {}))
        self.counter.count_launch(function.__name__)
        self.counter.inside_fused = True
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.counter.inside_fused = False
