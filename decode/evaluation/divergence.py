"""Is a difference between two greedy outputs a rounding tie or a bug?

Plain decoding runs the target over one token at a time, verification over several, which adds the
same numbers in another order. Where two tokens are almost equally probable, either may win. So both
outputs are replayed up to the first difference, each in the widths that it had, by code of this
file and not the engine's. With z the logits of plain decoding, z' those of verification and Δ = z'
− z,

    token b beats a in z' although z_a ≥ z_b   ⇒   z_a − z_b ≤ Δ_b − Δ_a ≤ 2·max_v |Δ_v|.

A difference is a rounding tie when three things hold. The gap obeys this bound. The bound is no
larger than the dtype's rounding can explain: a wrong mask or position makes Δ larger. And the
replays give both tokens again; this is asked on a CPU alone, where they do so bit for bit.

A router of experts may tie too, and another expert makes Δ larger than any rounding. So where the
bound is too large, and the model has experts, verification is replayed once more with the experts
that plain decoding's tokens went to. Then the bound has to be small enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from decode.engine.output import Tree
from decode.engine.request import PREFILL_CHUNK
from decode.evaluation.records import Divergence
from decode.proposers.base import common_prefix_length
from decode.speculation.tree import ancestors
from decode.verification.reference import dtype_limit
from specalign.lm.model import Target

TIE, BUG = "rounding tie", "BUG"

_CHOSEN = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
"""What the experts of transformers' models are called with, besides their states: (rows, experts a
token)."""


def explain_divergence(
    target: Target,
    prompt: list[int],
    plain: list[int],
    other: list[int],
    drafted: list[int],
    accepted: list[int],
    trees: Sequence[Tree | None] = (),
    score: Callable[[Tensor, int], Tensor] | None = None,
    others: Target | None = None,
    batched: bool = False,
) -> Divergence | None:
    """The first difference between plain decoding's output and another one, and whether it is a tie
    or a bug; None when they are equal.

    Args:
        drafted, accepted, trees: of each call of the other method.
        score: (logits (V,), index of the token) → the values of which the token was the argmax;
            default: the logits.
        others: the target as the other method runs it, where that differs (on another device, for
            instance).
        batched: the outputs were decoded together with others, so that a replay alone need not
            give both tokens again; their gap is still bounded by the dtype's rounding.
    """
    if plain == other:
        return None
    index = common_prefix_length(plain, other)
    a = plain[index] if index < len(plain) else None
    b = other[index] if index < len(other) else None
    if a is None or b is None:  # one output ended and the other did not: no logits explain that
        return Divergence(index, a, b, BUG)
    calls = (drafted, accepted, trees)
    one_by_one = ([0] * index, [0] * index)
    second = others or target
    z_V = replay(target, prompt, plain, index, *one_by_one)
    other_V = replay(second, prompt, other, index, *calls)
    limit = dtype_limit(target.dtype, z_V)
    if score is not None:
        z_V, other_V = score(z_V, index), score(other_V, index)
    gap = float(z_V[a] - z_V[b])
    bound = 2 * float((other_V - z_V).abs().max())
    reproduced = int(z_V.argmax()) == a and int(other_V.argmax()) == b
    possible = abs(gap) <= bound and (reproduced or target.device.type != "cpu")
    explained = possible and bound <= limit
    explained |= batched and abs(gap) <= limit
    choices = TokenChoices(target.model) if second is target else None
    if possible and not explained and choices is not None and choices.modules:
        with choices.hooked():
            replay(target, prompt, plain, index, *one_by_one, choices=choices)
            choices.again = True
            same_V = replay(target, prompt, other, index, *calls, choices=choices)
        same_V = same_V if score is None else score(same_V, index)
        explained = 2 * float((same_V - z_V).abs().max()) <= limit
    top2 = sorted(z_V.topk(2).indices.tolist()) == sorted([a, b])
    return Divergence(index, a, b, TIE if explained else BUG, gap, bound, top2, reproduced)


@torch.no_grad()
def replay(
    target: Target,
    prompt: list[int],
    output: list[int],
    index: int,
    drafted: list[int],
    accepted: list[int],
    trees: Sequence[Tree | None] = (),
    choices: TokenChoices | None = None,
) -> Tensor:
    """Logits (V,) from which token `index` of the output was chosen: the target runs in the widths
    of the given calls, and over their trees. Any token takes the place of rejected drafts, to which
    no token attends, so that the width, and with it the order of the sums, is the same."""
    shapes = [*trees, *[None] * (len(drafted) - len(trees))]
    widths = [w if t is None else len(t.parents) for w, t in zip(drafted, shapes, strict=True)]
    cache = target.new_cache(1, len(prompt) + len(output) + max(widths, default=0) + 1)

    def forward(tokens: list[int], places: Sequence[int | None], **options: Any) -> Any:
        if choices is not None:
            choices.cache, choices.first, choices.places = cache, cache.length, places
        tokens_BL = torch.tensor([tokens], device=target.device)
        return target.forward(tokens_BL, cache=cache, **options)

    for begin in range(0, len(prompt), PREFILL_CHUNK):
        chunk = prompt[begin : begin + PREFILL_CHUNK]
        out = forward(chunk, range(begin, begin + len(chunk)), logits=False)
    if index == 0:
        return target.head(out.hidden_BLD[:, -1:])[0, 0]
    start = 1  # tokens of the output before this are in the prompt of the call
    for width, kept, tree in zip(widths, accepted, shapes, strict=True):
        rows = [0, *(range(1, kept + 1) if tree is None else (i + 1 for i in tree.path[:kept]))]
        before = cache.length
        tokens = [prompt[0]] * (width + 1)
        places: list[int | None] = [None] * (width + 1)
        for place, row in enumerate(rows, before):
            places[row] = place
        for row, token in zip(rows, output[start - 1 :], strict=False):
            tokens[row] = token
        see_LL = None if tree is None else ancestors(tree.parents).to(target.device)
        logits_BLV = forward(tokens, places, see_LL=see_LL).logits_BLV
        if start <= index <= start + kept:
            return logits_BLV[0, rows[index - start]].clone()
        cache.keep(before, rows)
        start += kept + 1
    raise ValueError(f"token {index} lies after the last call")


class TokenChoices:
    """To which experts each token of a text went, by layer and place: noted while the text is
    replayed, and given again while it is replayed in other widths. Of the next call `replay` sets
    the cache, its length, and the place of each row in the text; None = of a rejected draft."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[tuple[nn.Module, tuple[str, str]]] = []
        for module in model.modules():
            taken = inspect.signature(module.forward).parameters
            self.modules += [(module, names) for names in _CHOSEN if {*names} <= {*taken}]
        self.noted: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.again = False
        self.cache: Any = None
        self.first = 0
        self.places: Sequence[int | None] = ()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context manager in which the routers' choices are recorded or, with `again`, replaced by
        those recorded at the same place."""
        hooks = [
            module.register_forward_pre_hook(partial(self._route, layer, names), with_kwargs=True)
            for layer, (module, names) in enumerate(self.modules)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _route(
        self, layer: int, names: tuple[str, str], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
        chosen, weights = (given.arguments[name].flatten(0, -2).clone() for name in names)
        # a recurrent state starts from before the last rollback: accepted tokens run once more, in
        # front or in a call before
        for row, at in enumerate(range(self.cache.length, self.cache.length + len(chosen))):
            place = at if at < self.first else self.places[at - self.first]
            if place is None:
                continue
            if not self.again:
                self.noted[layer, place] = chosen[row].clone(), weights[row].clone()
            elif (layer, place) in self.noted:
                chosen[row], weights[row] = self.noted[layer, place]
        for name, found in zip(names, (chosen, weights), strict=True):
            given.arguments[name] = found.view(given.arguments[name].shape)
        return given.args, given.kwargs
