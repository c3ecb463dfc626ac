"""Every system by name: which trained drafters it is made of, its options, the verifier that goes with it.

The options are the keyword arguments of the functions below, which is where their names, defaults and kinds come from;
decode/methods/spec.py reads and builds them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from align.common.errors import UserError, nearest

if TYPE_CHECKING:
    from align.models.block import BlockDrafter
    from align.models.standalone import DiffusionDrafter
    from align.target.model import Target
    from decode.drafters.base import Drafter

ROLES = ("block", "variable_prefix", "diffusion", "autoregressive")
"""What a trained drafter may be in a system: a block drafter, D²SD's second one, a standalone diffusion drafter, a causal
language model."""


@dataclass
class Parts:
    """The target, and the trained drafters at hand, by role."""

    target: Target
    drafters: dict[str, Any] = field(default_factory=dict)

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


# ---- the systems; gamma is the number of tokens drafted ahead ----


def _compiled(parts: Parts) -> None:
    """plain decoding through torch.compile"""


def _lookup(parts: Parts, gamma: int = 8, longest: int = 3) -> Drafter:
    """prompt lookup: copies what followed the text's ending before"""
    from decode.drafters.lookup import LookupDrafter

    return LookupDrafter(gamma, longest)


def _retrieval(
    parts: Parts, gamma: int = 8, shortest: int = 2, nodes: int = 0, corpus: str | None = None
) -> Drafter:
    """what most often followed the longest ending that occurred before, in the text or in a corpus file"""
    from decode.drafters.corpus import read_corpus
    from decode.drafters.retrieval import RetrievalDrafter
    from decode.drafters.suffix_automaton import Datastore

    store = None if corpus is None else Datastore(read_corpus(corpus, parts.target))
    return RetrievalDrafter(gamma, shortest, nodes, store)


def _block(parts: Parts, gamma: int | None = None, confidence: float = 0.0) -> Drafter:
    """the block drafter, a chain, which its confidence head may stop early"""
    from decode.drafters.block import BlockProposer

    return BlockProposer(parts.block, gamma, 0, confidence=confidence)


def _block_tree(parts: Parts, gamma: int | None = None, nodes: int = 5) -> Drafter:
    """the block drafter, a tree of its likeliest paths"""
    from decode.drafters.block import BlockProposer

    return BlockProposer(parts.block, gamma, nodes)


def _specdiff(
    parts: Parts,
    gamma: int | None = None,
    steps: int = 1,
    order: str = "left_to_right",
    hot_start: bool = False,
    nodes: int = 0,
) -> Drafter:
    """SpecDiff: masks after the text, unmasked in some steps"""
    from decode.drafters.diffusion import DiffusionProposer

    return DiffusionProposer(parts.diffusion, gamma, steps, order, hot_start, nodes)


def _specdiff2(
    parts: Parts,
    gamma: int | None = None,
    candidates: int = 8,
    draft_temperature: float | None = None,
    keep_q: bool = False,
) -> Drafter:
    """SpecDiff-2: several drafts of one step, the target's p picks one"""
    from decode.drafters.specdiff2 import SpecDiff2Drafter

    return SpecDiff2Drafter(parts.diffusion, gamma, candidates, draft_temperature, keep_q)


def _diffuspec(
    parts: Parts,
    gamma: int | None = None,
    path_search: bool = True,
    adaptive_length: bool = True,
    corpus: str | None = None,
) -> Drafter:
    """DiffuSpec: a path through one step's candidates that an n-gram model finds plausible, as long as it pays"""
    from decode.drafters.corpus import read_corpus
    from decode.drafters.diffuspec import DiffuSpecDrafter

    texts = () if corpus is None else read_corpus(corpus, parts.target)
    return DiffuSpecDrafter(
        parts.diffusion, gamma, path_search=path_search, adaptive_length=adaptive_length, corpus=texts
    )


def _d2sd(parts: Parts, gamma: int | None = None, boundaries: int = 4, keep_q: bool = True) -> Drafter:
    """D²SD: a second block drafter behind the first's likeliest mistakes, one tree"""
    from decode.drafters.d2sd import D2SDDrafter

    return D2SDDrafter(parts.block, parts.variable_prefix, boundaries, gamma, keep_q)


def _tolerator(parts: Parts, gamma: int | None = None, steps: int = 1, rounds: int = 2) -> Drafter:
    """Tolerator: drafts filled in, masked again in part and refined"""
    from decode.drafters.tolerator import ToleratorDrafter

    return ToleratorDrafter(parts.diffusion, gamma, steps, rounds)


def _specdec(parts: Parts, gamma: int | None = None) -> Drafter:
    """SpecDec's relaxed verification over a diffusion draft: LOSSY"""
    from decode.drafters.diffusion import DiffusionProposer

    return DiffusionProposer(parts.diffusion, gamma)


def _autoregressive(parts: Parts, gamma: int = 4) -> Drafter:
    """standard speculative decoding with a smaller causal language model"""
    from decode.drafters.autoregressive import AutoregressiveDrafter

    return AutoregressiveDrafter(parts.autoregressive, gamma)


def _hierarchical(parts: Parts, gamma: int = 4, inner: str = "retrieval") -> Drafter:
    """hierarchical: the smaller model's own drafts are sped up by a cheaper drafter, verified in between"""
    from decode.drafters.hierarchical import HierarchicalDrafter

    if inner not in ("lookup", "retrieval", "diffusion"):
        raise UserError(f"inner={inner!r} is unknown{nearest(inner, ('lookup', 'retrieval', 'diffusion'))}")
    if inner == "diffusion":
        if "diffusion" not in parts.drafters:
            raise UserError("inner=diffusion needs a drafter of that kind: --drafter diffusion=FOLDER")
        cheap = _specdiff(parts)
    else:
        cheap = _lookup(parts) if inner == "lookup" else _retrieval(parts)
    if gamma == 1:
        raise UserError(
            "gamma=1 leaves the inner drafter nothing to draft: at least 2 (or autoregressive:gamma=1)"
        )
    return HierarchicalDrafter(parts.autoregressive, cheap, gamma)


def _double(parts: Parts, gamma: int = 4, corpus: str | None = None) -> Drafter:
    """Double: retrieval for drafter and target, the next draft made while the target verifies"""
    from decode.drafters.hierarchical import HierarchicalDrafter
    from decode.wrappers.merged import MergedDrafter
    from decode.wrappers.overlapped import OverlappedDrafter

    inner = HierarchicalDrafter(parts.autoregressive, _retrieval(parts, corpus=corpus), gamma + 1)
    return MergedDrafter(OverlappedDrafter(inner), _retrieval(parts, gamma, corpus=corpus))


def _duo(parts: Parts, gamma: int = 8, device: str | None = None) -> Drafter:
    """DuoDecoding: the smaller model on a device of its own, ahead of the target, as long a draft as pays"""
    from align.target.loading import reload
    from decode.drafters.autoregressive import AutoregressiveDrafter
    from decode.wrappers.overlapped import OverlappedDrafter

    model = parts.autoregressive
    if device is not None and device != str(model.device):
        model = reload(model, device)
    return OverlappedDrafter(AutoregressiveDrafter(model, gamma + 1))


Make = Callable[..., "Drafter | None"]


@dataclass(frozen=True)
class System:
    """One of them. `needs`: roles; `also_needs`: those that its options ask for; `verifier`: at temperatures above 0, where it is
    not `auto`; `controller`: unless another is named; `branches`: whether its drafts do, under these options (both get all of them); `drafts`:
    anything at all; `switches`: its sessions read their options anew for every draft (decode/wrappers/adaptive.py); `grid`: values
    worth trying, `key=v1,v2` (decode/benchmark/tuning.py); `target`: what becomes of the target before it decodes."""

    name: str
    make: Make
    needs: tuple[str, ...] = ()
    verifier: str = "auto"
    controller: str = "fixed"
    drafts: bool = True
    switches: bool = False
    grid: tuple[str, ...] = ()
    also_needs: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda options: ()
    branches: Callable[[Mapping[str, Any]], bool] = lambda options: False
    target: Callable[[Target], Target] | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return {k: v for k, v in inspect.signature(self.make).parameters.items() if k != "parts"}

    def filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """These options, and the defaults of the others."""
        return {key: option.default for key, option in self.options.items()} | dict(given)

    @property
    def says(self) -> str:
        return inspect.getdoc(self.make) or ""


def _through_compile(target: Target) -> Target:
    from decode.engine.compiled import compiled

    print(
        "compiled: torch.compile is at work on the target, half a minute or more",
        file=sys.stderr,
        flush=True,
    )
    return compiled(target)


SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        System("compiled", _compiled, drafts=False, target=_through_compile),
        System("lookup", _lookup, grid=("gamma=2,4,8,16",)),
        System(
            "retrieval",
            _retrieval,
            switches=True,
            grid=("gamma=2,4,8,16",),
            branches=lambda o: o["nodes"] > 0,
        ),
        System("autoregressive", _autoregressive, ("autoregressive",), grid=("gamma=1,2,4,8",)),
        System("block", _block, ("block",), switches=True, grid=("gamma=2,4,8,16",)),
        System(
            "block_tree",
            _block_tree,
            ("block",),
            switches=True,
            grid=("nodes=3,5,8,16",),
            branches=lambda o: o["nodes"] > 0,
        ),
        System(
            "specdiff",
            _specdiff,
            ("diffusion",),
            switches=True,
            grid=("gamma=2,4,8", "steps=1,2", "nodes=0,5"),
            branches=lambda o: o["nodes"] > 0,
        ),
        System(
            "specdiff2",
            _specdiff2,
            ("diffusion",),
            "self_selection",
            switches=True,
            grid=("gamma=2,4,8", "candidates=2,4,8"),
            branches=lambda o: o["candidates"] > 1,
        ),
        System("diffuspec", _diffuspec, ("diffusion",), grid=("gamma=2,4,8,16",)),
        System(
            "d2sd",
            _d2sd,
            ("block", "variable_prefix"),
            switches=True,
            grid=("boundaries=1,2,4",),
            branches=lambda o: True,
        ),
        System(
            "hierarchical",
            _hierarchical,
            ("autoregressive",),
            grid=("gamma=2,4,8",),
            also_needs=lambda o: ("diffusion",) if o["inner"] == "diffusion" else (),
        ),
        System("double", _double, ("autoregressive",), grid=("gamma=1,2,4",), branches=lambda o: True),
        System("duo", _duo, ("autoregressive",), controller="cost", grid=("gamma=2,4,8",)),
        System("tolerator", _tolerator, ("diffusion",), switches=True, grid=("gamma=2,4,8", "rounds=1,2")),
        System("specdec_lossy", _specdec, ("diffusion",), "lossy_top_beta", grid=("gamma=2,4,8",)),
    )
}
