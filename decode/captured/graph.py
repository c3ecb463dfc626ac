"""A function over fixed memory, run again and again: eagerly, as a replayed trace, or as a CUDA
graph; compiled by Inductor, as a whole on a CPU, layer by layer in a CUDA graph.

The function takes and returns nothing: it reads and writes tensors that keep their addresses. It
must not look at values on the host; `forbid_waiting` raises where it does.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specalign.lm.masks import sparse_masks

Function = Callable[[], None]
Backend = Literal["eager", "traced", "compiled", "cuda"]
WARM_UPS = 3
"""Before a capture: torch's advice for libraries that allocate at their first calls."""

aten = torch.ops.aten
_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
"""Operators whose result, or whose shape, the host has to wait for."""


class WaitsForDevice(RuntimeError):
    """An operator of a round makes the host wait, or moves memory between host and device."""


class forbid_waiting(TorchDispatchMode):  # noqa: N801 (a context manager)
    """Context manager in which operators raise `WaitsForDevice` if the host would wait for them, or
    if they copy from another device than `device`. read: the tensors that they read and that were
    there before, by id."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device.type
        self.read: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        boolean = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
        if boolean and any(t is not None and t.dtype == torch.bool for t in args[1]):
            raise WaitsForDevice(f"boolean mask as an index at {_caller()}")
        if func in _WAITING:
            raise WaitsForDevice(f"{func} at {_caller()}")
        out = func(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) not in self._made:
                self.read[id(value)] = value
        self._made.update(id(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
        copies = func in (aten._to_copy.default, aten.copy_.default)
        if copies and any(t.device.type != self.device for t in tensors):
            raise WaitsForDevice(f"copy between devices at {_caller()}")
        return out


def _caller() -> str:
    """The innermost line of code outside of torch."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
    frame = next(f for f in reversed(frames) if f.filename != __file__)
    return f"{Path(frame.filename).name}:{frame.lineno}"


class Graph(Protocol):
    """A captured function."""

    def replay(self) -> None: ...


class EagerGraph:
    """The function itself."""

    def __init__(self, function: Function) -> None:
        self.replay = torch.no_grad()(function)


class TracedGraph:
    """The operators of one call, recorded by make_fx. Code that leaves torch, such as a C kernel,
    is not seen."""

    def __init__(self, function: Function) -> None:
        def run(unused: torch.Tensor) -> torch.Tensor:
            function()
            return unused

        unused = torch.zeros(1)
        with torch.no_grad():
            self.module: Callable[[torch.Tensor], torch.Tensor] = make_fx(run)(unused)
        self._unused = unused

    @torch.no_grad()
    def replay(self) -> None:
        self.module(self._unused)


class CompiledGraph(TracedGraph):
    """The trace as one graph that Inductor compiles: few kernels, after a minute."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self.module = torch.compile(self.module, fullgraph=True, dynamic=False)


class CudaGraph:
    """A CUDA graph. All of them share the memory of their intermediate results: what lasts is
    copied into memory of the state. kept: the tensors that the function reads, such as cached
    constants, because a graph knows only their addresses."""

    _pool: Any = None

    @torch.no_grad()
    def __init__(self, function: Function, kept: list[torch.Tensor]) -> None:
        self._kept = kept
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool):
            function()

    def replay(self) -> None:
        self._graph.replay()


_ON_CPU: dict[Backend, Callable[[Function], Graph]] = {
    "eager": EagerGraph,
    "traced": TracedGraph,
    "compiled": CompiledGraph,
}


@contextmanager
def compiled_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which these layers run compiled, for one shape, and so not in prefills;
    the target's attend through flex_attention."""
    config, shapes = torch._dynamo.config, 64  # of batches, trees and buckets
    most = max(config.accumulated_recompile_limit, shapes * len(layers))
    config.recompile_limit = config.accumulated_recompile_limit = most
    for layer in layers:
        layer.compile(dynamic=False)
    try:
        with sparse_masks() if layers else nullcontext():
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def capture(
    function: Function, backend: Backend, device: torch.device, layers: Sequence[nn.Module] = ()
) -> Graph:
    """The function as a graph. It is called several times. Raises WaitsForDevice where it looks at
    values on the host. layers: those that `compiled` compiles in a CUDA graph."""
    with torch.no_grad():
        function()  # constants are uploaded at the first call
        # under a dispatch mode, dynamo would give up compiled layers for good
        with torch.compiler.set_stance("force_eager"), forbid_waiting(device) as guard:
            function()
    try:
        if device.type == "cuda" and backend in ("cuda", "compiled"):
            with compiled_layers(layers if backend == "compiled" else ()):
                return CudaGraph(function, [*guard.read.values()])
        return _ON_CPU[backend](function)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        # an upload that no dispatch mode sees, such as torch.tensor on the device
        raise WaitsForDevice(str(error).splitlines()[0]) from None
