"""A device that is none: its tensors lie in the CPU's memory, and an operation that mixes them with the CPU's own fails, as it would on
a GPU. `python -m tests.elsewhere` writes, trains and decodes there with the debug target: what a machine without a GPU can tell of
a tensor that was left behind, or of a generator of another device.

It is a backend of torch in Python, known to the whole process: hence a command.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from specalign.common.text import say

NAME = "elsewhere"
aten = torch.ops.aten
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""Their indices may lie on the CPU."""
_COPYING = {aten._to_copy.default, aten.copy_.default, aten.lift_fresh.default, aten.detach.default}


class Backend(backend_registration._DummyBackendModule):
    """What autocast asks."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
DEVICE = torch.device(NAME, 0)
OnCPU = torch.Generator


class There(torch.Tensor):
    """A tensor of that device around one of the CPU's, `inner`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> There:
        place = (inner.size(), inner.stride(), inner.storage_offset())
        make = torch.Tensor._make_wrapper_subclass
        return make(cls, *place, dtype=inner.dtype, device=DEVICE)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(function, args, kwargs or {})


class GeneratorThere(OnCPU):
    device = DEVICE


class _Kinds(type):
    def __instancecheck__(cls, other: Any) -> bool:
        return isinstance(other, OnCPU)


class Generator(metaclass=_Kinds):
    """In the place of torch.Generator: one of the device that is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return GeneratorThere() if torch.device(device).type == NAME else OnCPU(device)


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on tensors of either device.

    Raises:
        RuntimeError: of both, more than a number, or with the other's generator.
    """
    leaves = tree_leaves((args, kwargs))
    outer = {id(x.inner): x for x in leaves if isinstance(x, There)}
    there = bool(outer)
    if (device := kwargs.get("device")) is not None:
        there = torch.device(device).type == NAME
        kwargs = {**kwargs, "device": "cpu" if there else device, "pin_memory": False}
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory" or value}
    if outer and function not in _COPYING:
        checked = (args[0], args[2:]) if function in _INDEXING else leaves
        strange = [x for x in tree_leaves(checked) if type(x) is torch.Tensor and x.dim()]
        if strange:
            shapes = [tuple(x.shape) for x in strange]
            raise RuntimeError(f"{function}: tensors of the CPU, {shapes}, among those of {DEVICE}")
        generator = kwargs.get("generator")
        if generator is not None and not isinstance(generator, GeneratorThere):
            raise RuntimeError(f"{function}: a generator of the CPU on {DEVICE}")

    def inner(x: Any) -> Any:
        return x.inner if isinstance(x, There) else x

    with _disable_current_modes():
        found = function(*tree_map(inner, args), **tree_map(inner, kwargs))
    if function is aten.copy_.default:
        return args[0]

    def outside(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in outer:
            return outer[id(x)]
        return There(x) if there and not isinstance(x, There) else x

    return tree_map(outside, found)


class Elsewhere(TorchDispatchMode):
    """Within it, tensors can be made on that device."""

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(function, args, kwargs or {})


class Accelerator(CPUAccelerator):
    """What Lightning asks."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do."""


SMALL = (
    "data.path={}/data data.samples=4 data.batch_size=96 data.max_answer_tokens=6 data.length=64 "
    "trainer.logger=[] trainer.max_steps=2 trainer.warmup_steps=1 trainer.validate_every=2 "
    "trainer.validation_rows=1 trainer.anchors=4 trainer.ema=0.9"
)


def check_mixing() -> None:
    """Raises AssertionError if an operation on tensors of both devices is not refused."""
    there = torch.ones(2, device=DEVICE)
    for mix in (lambda: there + torch.ones(2), lambda: there.uniform_(generator=OnCPU())):
        try:
            mix()
        except RuntimeError:
            continue
        raise AssertionError("tensors of two devices were mixed")


def pretend() -> Elsewhere:
    """Make the commands of this process run on that device, within what this returns."""
    torch.Generator = Generator  # type: ignore[assignment, misc]
    trainer = lightning.Trainer

    def there(**options: Any) -> Any:
        strategy = SingleDeviceStrategy(device=DEVICE, accelerator=Accelerator())
        return trainer(**options | {"strategy": strategy, "accelerator": "auto", "devices": 1})

    lightning.Trainer = there  # type: ignore[assignment, misc]
    from specalign.lm import loading

    loading.find_device = lambda name: DEVICE  # type: ignore[attr-defined]
    return Elsewhere()


def main() -> None:
    """Write, train and decode there; drafts change no output."""
    place = pretend()
    from align import train
    from decode import generate

    with place, tempfile.TemporaryDirectory() as folder:
        check_mixing()
        small = SMALL.format(folder).split()
        for recipe in ("debug_block", "debug_taps"):
            train.main([f"recipe={recipe}", f"output={folder}/{recipe}", *small])
        block, taps = (f"{folder}/debug_{kind}/drafter" for kind in ("block", "taps"))
        words = ["--target", "debug", "--max-new-tokens", "5", "Tell a story"]
        for temperature, drafter in (("0", block), ("1", block), ("1", taps), ("1", "none")):
            generate.main(["--temperature", temperature, "--drafter", drafter, *words])


if __name__ == "__main__":
    main()
    say("all of it ran elsewhere", error=True)
