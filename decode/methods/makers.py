"""One function for each system: makes its drafter from the trained drafters that are open.

The keyword arguments are the system's options, with their names, kinds and defaults; gamma is the number of tokens drafted
ahead. The docstring is the system's line in the help. decode/methods/registry.py has the systems by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from align.common.errors import UserError, nearest
from align.common.text import say

if TYPE_CHECKING:
    from align.target.model import Target
    from decode.drafters.base import Drafter
    from decode.methods.registry import Parts


def plain(parts: Parts) -> None:
    """plain decoding: the target alone, a token a call"""


def drafter(
    parts: Parts,
    gamma: int | None = None,
    nodes: int | None = None,
    steps: int = 1,
    order: str = "left_to_right",
    verifier: str = "auto",
) -> Drafter:
    """the first drafter given, whatever its kind"""
    from decode.methods.any_drafter import any_drafter

    return any_drafter(parts.any, parts.target, gamma, nodes, steps, order, verifier)


def compiled(parts: Parts) -> None:
    """plain decoding through torch.compile"""


def lookup(parts: Parts, gamma: int = 8, longest: int = 3) -> Drafter:
    """prompt lookup: copies what followed the text's ending before"""
    from decode.drafters.lookup import LookupDrafter

    return LookupDrafter(gamma, longest)


def retrieval(
    parts: Parts, gamma: int = 8, shortest: int = 2, nodes: int = 0, corpus: str | None = None
) -> Drafter:
    """what most often followed the longest ending that occurred before, in the text or in a corpus file"""
    from decode.drafters.corpus import read_corpus
    from decode.drafters.retrieval import RetrievalDrafter
    from decode.drafters.suffix_automaton import Datastore

    store = None if corpus is None else Datastore(read_corpus(corpus, parts.target))
    return RetrievalDrafter(gamma, shortest, nodes, store)


def block(
    parts: Parts, gamma: int | None = None, confidence: float = 0.0, passes: int | None = None
) -> Drafter:
    """the block drafter, a chain, which its confidence head may stop early"""
    from decode.drafters.block import BlockProposer

    return BlockProposer(parts.block, gamma, 0, confidence=confidence, passes=passes)


def block_tree(parts: Parts, gamma: int | None = None, nodes: int = 5, passes: int | None = None) -> Drafter:
    """the block drafter, a tree of its likeliest paths"""
    from decode.drafters.block import BlockProposer

    return BlockProposer(parts.block, gamma, nodes, passes=passes)


def specdiff(
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


def specdiff2(
    parts: Parts,
    gamma: int | None = None,
    candidates: int = 8,
    draft_temperature: float | None = None,
    keep_q: bool = False,
) -> Drafter:
    """SpecDiff-2: several drafts of one step, the target's p picks one"""
    from decode.drafters.specdiff2 import SpecDiff2Drafter

    return SpecDiff2Drafter(parts.diffusion, gamma, candidates, draft_temperature, keep_q)


def diffuspec(
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


def d2sd(parts: Parts, gamma: int | None = None, boundaries: int = 4, keep_q: bool = True) -> Drafter:
    """D²SD: a second block drafter behind the first's likeliest mistakes, one tree"""
    from decode.drafters.d2sd import D2SDDrafter

    return D2SDDrafter(parts.block, parts.variable_prefix, boundaries, gamma, keep_q)


def tolerator(parts: Parts, gamma: int | None = None, steps: int = 1, rounds: int = 2) -> Drafter:
    """Tolerator: drafts filled in, masked again in part and refined"""
    from decode.drafters.tolerator import ToleratorDrafter

    return ToleratorDrafter(parts.diffusion, gamma, steps, rounds)


def specdec(parts: Parts, gamma: int | None = None) -> Drafter:
    """SpecDec's relaxed verification over a diffusion draft: LOSSY"""
    from decode.drafters.diffusion import DiffusionProposer

    return DiffusionProposer(parts.diffusion, gamma)


def autoregressive(parts: Parts, gamma: int = 4) -> Drafter:
    """standard speculative decoding with a smaller causal language model"""
    from decode.drafters.autoregressive import AutoregressiveDrafter

    return AutoregressiveDrafter(parts.autoregressive, gamma)


def hierarchical(parts: Parts, gamma: int = 4, inner: str = "retrieval") -> Drafter:
    """hierarchical: the smaller model's own drafts are sped up by a cheaper drafter, verified in between"""
    from decode.drafters.hierarchical import HierarchicalDrafter

    if inner not in ("lookup", "retrieval", "diffusion"):
        raise UserError(f"inner={inner!r} is unknown{nearest(inner, ('lookup', 'retrieval', 'diffusion'))}")
    if inner == "diffusion":
        if "diffusion" not in parts.drafters:
            raise UserError("inner=diffusion needs a drafter of that kind: --drafter diffusion=FOLDER")
        cheap = specdiff(parts)
    else:
        cheap = lookup(parts) if inner == "lookup" else retrieval(parts)
    if gamma == 1:
        raise UserError(
            "gamma=1 leaves the inner drafter nothing to draft: at least 2 (or autoregressive:gamma=1)"
        )
    return HierarchicalDrafter(parts.autoregressive, cheap, gamma)


def double(parts: Parts, gamma: int = 4, corpus: str | None = None) -> Drafter:
    """Double: retrieval for drafter and target, the next draft made while the target verifies"""
    from decode.drafters.hierarchical import HierarchicalDrafter
    from decode.wrappers.merged import MergedDrafter
    from decode.wrappers.overlapped import OverlappedDrafter

    inner = HierarchicalDrafter(parts.autoregressive, retrieval(parts, corpus=corpus), gamma + 1)
    return MergedDrafter(OverlappedDrafter(inner), retrieval(parts, gamma, corpus=corpus))


def duo(parts: Parts, gamma: int = 8, device: str | None = None) -> Drafter:
    """DuoDecoding: the smaller model on a device of its own, ahead of the target, as long a draft as pays"""
    from align.target.loading import reload
    from decode.drafters.autoregressive import AutoregressiveDrafter
    from decode.wrappers.overlapped import OverlappedDrafter

    model = parts.autoregressive
    if device is not None and device != str(model.device):
        model = reload(model, device)
    return OverlappedDrafter(AutoregressiveDrafter(model, gamma + 1))


def through_compile(target: Target) -> Target:
    from decode.engine.compiled import compiled

    say("compiled: torch.compile is at work on the target, half a minute or more", error=True)
    return compiled(target)
