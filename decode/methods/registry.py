"""Every system by name: the trained drafters that it needs, its options and its verifier.

A function of decode/methods/makers.py makes its drafter and has its options; decode/methods/spec.py reads a system with options,
decode/methods/build.py makes the decoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decode.method_names import PLAIN
from decode.methods import makers

if TYPE_CHECKING:
    from align.models.block import BlockDrafter
    from align.models.standalone import DiffusionDrafter
    from align.target.model import Target
    from decode.drafters.base import Drafter

ROLES = ("block", "variable_prefix", "diffusion", "autoregressive")
"""The kinds of trained drafters: a block drafter, D²SD's second one, a standalone diffusion drafter, a causal language model."""
ANY = "any"
"""In place of a role: the first drafter given, whatever its kind."""
COMMON = ("verifier", "controller", "copying")
"""Options of every system that drafts: its verifier, the controller of the draft length, and whether repeated text is copied."""


@dataclass
class Parts:
    """The target and the open drafters, by role. `ANY` is among them where it is not the first one."""

    target: Target
    drafters: dict[str, Any] = field(default_factory=dict)

    @property
    def any(self) -> Any:
        return self.drafters[ANY if ANY in self.drafters else next(iter(self.drafters))]

    @property
    def block(self) -> BlockDrafter:
        return self.drafters["block"]

    @property
    def variable_prefix(self) -> BlockDrafter:
        return self.drafters["variable_prefix"]

    @property
    def diffusion(self) -> DiffusionDrafter:
        return self.drafters["diffusion"]

    @property
    def autoregressive(self) -> Target:
        return self.drafters["autoregressive"]


Make = Callable[..., "Drafter | None"]


def _trees(options: Mapping[str, Any]) -> bool:
    return bool(options["nodes"] > 0)


@dataclass(frozen=True)
class System:
    """A way to decode, by name.

    Args:
        make: (`Parts`, options) → its drafter; None: it drafts nothing.
        needs: roles of trained drafters, or `ANY`. also_needs: options, with defaults filled in → further roles.
        verifier, controller, copying: defaults of these options.
        drafts: whether it drafts.
        switches: its sessions read their options for every draft, so it may have variants (decode/wrappers/adaptive.py).
        in_all: whether `all` includes it.
        grid: values that tuning tries, `key=v1,v2` (decode/benchmark/tuning.py).
        branches: options, with defaults filled in → whether its drafts may branch.
        target: changes the target before it decodes.
    """

    name: str
    make: Make
    needs: tuple[str, ...] = ()
    verifier: str = "auto"
    controller: str = "fixed"
    copying: bool = False
    drafts: bool = True
    switches: bool = False
    in_all: bool = True
    grid: tuple[str, ...] = ()
    also_needs: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda options: ()
    branches: Callable[[Mapping[str, Any]], bool] = lambda options: False
    target: Callable[[Target], Target] | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return {k: v for k, v in inspect.signature(self.make).parameters.items() if k != "parts"}

    @property
    def keys(self) -> set[str]:
        """The names of all its options."""
        return {*self.options, *(COMMON if self.drafts else ())}

    def filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """These options, and the defaults of the others."""
        return {key: option.default for key, option in self.options.items()} | dict(given)

    @property
    def says(self) -> str:
        return inspect.getdoc(self.make) or ""


_BLOCK, _DIFFUSION, _CAUSAL = ("block",), ("diffusion",), ("autoregressive",)
_UP_TO_16 = ("gamma=2,4,8,16",)

SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        System(PLAIN, makers.plain, drafts=False, in_all=False),
        System("drafter", makers.drafter, (ANY,), in_all=False),
        System("combined", makers.drafter, (ANY,), copying=True, in_all=False),
        System("compiled", makers.compiled, drafts=False, target=makers.through_compile),
        System("lookup", makers.lookup, grid=_UP_TO_16),
        System("retrieval", makers.retrieval, switches=True, grid=_UP_TO_16, branches=_trees),
        System("autoregressive", makers.autoregressive, _CAUSAL, grid=("gamma=1,2,4,8",)),
        System("block", makers.block, _BLOCK, switches=True, grid=_UP_TO_16),
        System(
            "block_tree", makers.block_tree, _BLOCK, switches=True, grid=("nodes=3,5,8,16",), branches=_trees
        ),
        System(
            "specdiff",
            makers.specdiff,
            _DIFFUSION,
            switches=True,
            grid=("gamma=2,4,8", "steps=1,2", "nodes=0,5"),
            branches=_trees,
        ),
        System(
            "specdiff2",
            makers.specdiff2,
            _DIFFUSION,
            "self_selection",
            switches=True,
            grid=("gamma=2,4,8", "candidates=2,4,8"),
            branches=lambda o: o["candidates"] > 1,
        ),
        System("diffuspec", makers.diffuspec, _DIFFUSION, grid=_UP_TO_16),
        System(
            "d2sd",
            makers.d2sd,
            ("block", "variable_prefix"),
            switches=True,
            grid=("boundaries=1,2,4",),
            branches=lambda o: True,
        ),
        System(
            "hierarchical",
            makers.hierarchical,
            _CAUSAL,
            grid=("gamma=2,4,8",),
            also_needs=lambda o: _DIFFUSION if o["inner"] == "diffusion" else (),
        ),
        System("double", makers.double, _CAUSAL, grid=("gamma=1,2,4",), branches=lambda o: True),
        System("duo", makers.duo, _CAUSAL, controller="cost", grid=("gamma=2,4,8",)),
        System("tolerator", makers.tolerator, _DIFFUSION, switches=True, grid=("gamma=2,4,8", "rounds=1,2")),
        System("specdec_lossy", makers.specdec, _DIFFUSION, "lossy_top_beta", grid=("gamma=2,4,8",)),
    )
}
