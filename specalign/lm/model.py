"""The target: a frozen causal language model p, its forward passes, and all that drafters read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specalign.common.errors import UserError
from specalign.common.provenance import memory_bytes
from specalign.lm.cache import KVCache, SharedCache
from specalign.lm.frozen import FrozenModel
from specalign.lm.masks import BatchLayout, Layout, use_layout
from specalign.lm.recurrent import States, replaying


@dataclass
class TargetOutput:
    """One forward: logits (fp32, or None), normalised last hidden state, tapped layer outputs."""

    logits_BLV: Tensor | None
    hidden_BLD: Tensor
    taps_BLFD: Tensor | None

    def at(self, places: Sequence[int]) -> TargetOutput:
        """The hidden states and taps of these positions, without logits."""
        index = torch.tensor(places, device=self.hidden_BLD.device)
        taps = None if self.taps_BLFD is None else self.taps_BLFD[:, index]
        return TargetOutput(None, self.hidden_BLD[:, index], taps)


class Target(FrozenModel):
    """A frozen causal language model p. `load_target` also proves that p is the model's own."""

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of `capacity` positions. Raises MemoryError if it is too large."""
        shapes = self.anatomy.shapes
        attending = [shape for shape in shapes if shape is not None]
        numbers = sum(shape.numbers for shape in attending)
        if self.fused is not None and batch == 1:  # the keys once more (kernels.layers.Memory)
            numbers += sum(shape.heads * shape.key for shape in attending)
        size = batch * capacity * numbers * self.dtype.itemsize
        if self.device.type == "cpu" and size > (memory_bytes() or size):
            raise MemoryError(
                f"a cache of {batch} rows of {capacity} tokens takes {size / 2**30:,.0f} GiB"
            )
        return KVCache(
            shapes, batch, capacity, self.dtype, self.device, self.anatomy.other_layers()
        )

    def compile_layers(self, **options: Any) -> None:
        """Compile the layers: at the first forward pass each takes seconds, later ones are fewer
        and larger kernels. `options`: of torch.compile."""
        # layers that write to a cache compile separately, once for each kind of batch
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 4 * len(self.layers))
        for layer in self.layers:
            layer.compile(**options)

    @torch.no_grad()
    def forward(
        self,
        tokens_BL: Tensor,
        *,
        cache: KVCache | None = None,
        positions_BL: Tensor | None = None,
        mask: Tensor | None = None,
        see_LL: Tensor | None = None,
        taps: Sequence[int] = (),
        logits: bool = True,
    ) -> TargetOutput:
        """Run the model over L tokens after those in the cache; writes their keys and values,
        advances its length.

        Args:
            cache: from `new_cache`; None = no past and nothing kept.
            positions_BL: the tokens' positions; default: continued from the cache's length.
            mask: bool (B or 1, 1, L, S), True = attend, S = cache length + L; default: causal.
                Layers with a window apply it to the mask, by position.
            see_LL: instead of a mask, bool (L, L): which of the L tokens each one sees, itself
                included; all see the cache. A tree: its ancestors. The default position is then the
                depth.
            taps: layers whose outputs are wanted; that of layer i is `hidden_states[i + 1]`.
            logits: False skips the head.

        Raises ValueError if the cache has no room, UserError for branches of a target with
        recurrent states.
        """
        if cache is None or cache.recurrence is None:
            states = self._states(tokens_BL, cache, positions_BL, mask, see_LL, taps)
        elif see_LL is not None and not torch.equal(see_LL, torch.ones_like(see_LL).tril()):
            raise UserError(
                f"target {self.spec!r} has recurrent states: drafts can't branch (use tree_nodes=0)"
            )
        elif cache.slots is not None:
            states = self._states(tokens_BL, cache, positions_BL, mask, None, taps)
        else:

            def run(tokens: Tensor) -> States:
                return self._states(tokens, cache, None, mask, None, taps)

            states = replaying(run, cache, tokens_BL, self.stepwise)
        return TargetOutput(self.head(states[0]) if logits else None, *states)

    def _next_positions(self, past: int, length: int, see_LL: Tensor | None) -> Tensor:
        if see_LL is None:
            return torch.arange(past, past + length, device=self.device)[None]
        return (past - 1 + see_LL.sum(1))[None]

    def _states(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None,
        positions_BL: Tensor | None,
        mask: Tensor | None,
        see_LL: Tensor | None,
        taps: Sequence[int],
    ) -> States:
        length = tokens_BL.shape[1]
        past = cache.length if cache is not None else 0
        slots = None if cache is None else cache.slots
        if cache is not None and slots is None:
            cache.check_room(length)
        if positions_BL is None:
            positions_BL = self._next_positions(past, length, see_LL)
        layout = Layout(positions_BL, past, self.groups, self.dtype, see_LL, mask, slots)
        states = self._run(tokens_BL, layout, positions_BL, cache, taps)
        if cache is not None and slots is None:
            cache.advance(length)
        return states

    def _run(
        self,
        tokens_BL: Tensor,
        layout: Layout | BatchLayout,
        positions_BL: Tensor,
        cache: KVCache | SharedCache | None,
        taps: Sequence[int],
    ) -> States:
        fused = self.fused
        if cache is not None and fused is not None and fused.takes(tokens_BL, layout, cache):
            return fused(tokens_BL, layout, positions_BL, cache, taps)
        found: dict[int, Tensor] = {}
        with self.lock, use_layout(layout), ExitStack() as hooks:
            for i in taps:
                hook = self.layers[i].register_forward_hook(_tap(found, i))
                hooks.callback(hook.remove)
            output = self.body(**self.anatomy.arguments(tokens_BL, positions_BL, cache))
        taps_BLFD = torch.stack([found[i] for i in taps], dim=2).to(self.dtype) if taps else None
        # Mamba's residuals are always fp32
        return output.last_hidden_state.to(self.dtype), taps_BLFD

    @torch.no_grad()
    def forward_batch(
        self,
        tokens: Sequence[Tensor],
        caches: Sequence[KVCache],
        see: Sequence[Tensor | None],
        taps: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """`forward` with logits for several requests at once, each after its own past: (1, L)
        tokens, a one-row cache and `see_LL` of each → its output. The weights are read once for all
        of them; nothing is padded. Targets with their own attention or recurrent states run them
        one by one."""
        if not self.together:
            requests = zip(tokens, caches, see, strict=True)
            return [self.forward(t, cache=c, see_LL=s, taps=taps) for t, c, s in requests]
        widths = [t.shape[1] for t in tokens]
        layouts = []
        for cache, see_LL, width in zip(caches, see, widths, strict=True):
            cache.check_room(width)
            positions_1L = self._next_positions(cache.length, width, see_LL)
            layouts.append(Layout(positions_1L, cache.length, self.groups, self.dtype, see_LL))
        hidden_BLD, taps_BLFD = self._run(
            torch.cat(list(tokens), dim=1),
            BatchLayout(layouts),
            torch.cat([layout.positions_BL for layout in layouts], dim=1),
            SharedCache(caches, widths),
            taps,
        )
        for cache, width in zip(caches, widths, strict=True):
            cache.advance(width)
        logits, hidden = (x.split(widths, dim=1) for x in (self.head(hidden_BLD), hidden_BLD))
        tapped = [None] * len(widths) if taps_BLFD is None else taps_BLFD.split(widths, dim=1)
        return [TargetOutput(z, h, t) for z, h, t in zip(logits, hidden, tapped, strict=True)]


def _tap(found: dict[int, Tensor], layer: int) -> Callable[..., None]:
    """A hook that keeps a layer's output."""

    def keep(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        found[layer] = output[0] if isinstance(output, tuple) else output

    return keep
