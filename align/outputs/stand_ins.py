"""The target without most of its layers: stand-ins return hidden states that a server computed.

The target's own forward runs around them, so embedding, last norm and head are those of any
architecture. Layers whose keys and values a drafter shares stay, and run on the states before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specalign.common.batch import Batch
from specalign.common.text import short
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, target_features

CLOSE = 1e-3
"""The largest relative distance of features between the whole target and the one without its
layers."""


def layers_asked(target: Target, config: BlockConfig | None) -> tuple[int, ...]:
    """The layers whose outputs are needed, ascending: tapped ones, those before a layer that shares
    its keys and values, and the last one."""
    last = target.num_layers - 1
    if config is None:
        return (last,)
    back = 1 if config.context == "shared_kv" else 0
    return tuple(sorted({last, *(i - back for i in config.target_layer_ids if i >= back)}))


class _StandIn(nn.Module):
    """Replaces a layer. state: the server's output of it; before: the server's input of it, if the
    layer `runs`."""

    def __init__(self, layer: nn.Module, runs: bool, form: Any) -> None:
        super().__init__()
        self.layer, self.runs, self.form = layer, runs, form
        self.state: Tensor | None = None
        self.before: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # attributes that the decoder reads

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.before is not None:
            if inputs:
                inputs = (self.before, *inputs[1:])
            else:
                named = {**named, "hidden_states": self.before}
        output = self.layer(*inputs, **named) if self.runs else None
        if self.runs and self.state is None:
            return output
        state = (
            self.state
            if self.state is not None
            else inputs[0]
            if inputs
            else named["hidden_states"]
        )
        return state if self.form is None else (state, *self.form)


def own_states(target: Target, text_1L: Tensor, layers: Sequence[int]) -> Tensor:
    """The target's own outputs of these layers, (1, tokens, layers, D).

    Raises:
        NotImplementedError: its layers do not return one state each.
    """
    if target.anatomy.repeats:
        raise NotImplementedError("its layers run several times")
    taps = target.forward(text_1L, taps=layers, logits=False).taps_BLFD
    if taps is None or taps.shape != (*text_1L.shape, len(layers), target.hidden_size):
        raise NotImplementedError("its layers return more than one state")
    return taps


class StandIns:
    """Replace the target's layers by stand-ins, irreversibly; layers that do not run are freed.

    Args:
        config: of the drafter, as in `target_features`. layers: from `layers_asked`.
        text_1L: a short text, over which the target's own states must give its own features.

    Raises:
        NotImplementedError: they do not.
    """

    @torch.no_grad()
    def __init__(
        self, target: Target, config: BlockConfig | None, layers: Sequence[int], text_1L: Tensor
    ) -> None:
        self.target, self.config, self.layers = target, config, layers
        places = torch.arange(text_1L.shape[1], device=target.device)[None]
        alone = Batch(
            text_1L, places, torch.zeros_like(text_1L), torch.ones_like(text_1L, dtype=torch.bool)
        )
        target.unfuse()
        before, states = target_features(target, alone, config), own_states(target, text_1L, layers)
        forms = self._forms(text_1L)
        runs = (
            set(config.target_layer_ids)
            if config is not None and config.context == "shared_kv"
            else set()
        )
        target.hash  # noqa: B018 (of the whole weights, while they exist)
        for i, layer in enumerate(target.layers):
            target.layers[i] = _StandIn(layer, i in runs, forms.get(i))
        try:
            after = self.features(alone, states[0].transpose(0, 1))
            apart = max(
                float(distance(a, b)) for a, b in zip(after.tensors, before.tensors, strict=True)
            )
        except (RuntimeError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise NotImplementedError(f"{type(error).__name__}: {short(error)}") from None
        if not apart < CLOSE:
            raise NotImplementedError(f"its features come out {apart:.1%} away")
        for i, layer in enumerate(target.layers):
            if i not in runs:
                layer.layer.to("meta")

    def _forms(self, text_1L: Tensor) -> dict[int, Any]:
        """By layer the rest of the tuple that it returns, as Nones; None if it returns only the
        state."""
        found: dict[int, Any] = {}

        def note(number: int) -> Any:
            def keep(module: nn.Module, given: Any, output: Any) -> None:
                found[number] = (None,) * (len(output) - 1) if isinstance(output, tuple) else None

            return keep

        hooks = [layer.register_forward_hook(note(i)) for i, layer in enumerate(self.target.layers)]
        self.target.forward(text_1L, logits=False)
        for hook in hooks:
            hook.remove()
        return found

    def features(self, alone: Batch, states: Tensor) -> TargetFeatures:
        """Of one document, given the states (layers, tokens, D)."""
        stood: list[Any] = list(self.target.layers)
        by_layer = dict(zip(self.layers, states[:, None], strict=True))
        for i, layer in enumerate(stood):
            layer.state, layer.before = by_layer.get(i), by_layer.get(i - 1)
        return target_features(self.target, alone, self.config)


def distance(found: Tensor, own: Tensor) -> Tensor:
    """Distance from the target's own, relative to its norm."""
    own = own.double()
    return (found.double() - own).norm() / own.norm().clamp_min(torch.finfo(torch.float32).tiny)
