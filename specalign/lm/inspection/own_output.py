"""The logits that a model computes by itself over a few tokens, with its own cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from specalign.kernels.linear import is_linear
from specalign.lm.inspection.anatomy import cache_name, eos_ids, find_body
from specalign.lm.logits import over_the_head

_TEXT = (
    "One model, run in two ways, says the same: first whole, then piece by piece through a cache."
)
LENGTH, CUT = 14, 9
"""Tokens of the proof; those before the drafts."""


@dataclass(frozen=True)
class OwnOutput:
    """The model's own output. head_input_LD: the decoder's last states. never_V: tokens that the
    model never writes.
    read_past: layers whose weights are read without calling them, without the head.
    """

    tokens_1L: Tensor
    logits_LV: Tensor
    head_input_LD: Tensor
    never_V: Tensor | None
    read_past: frozenset[nn.Module]

    @property
    def written_LV(self) -> Tensor:
        """The logits of the tokens that it writes."""
        return self.logits_LV if self.never_V is None else self.logits_LV[:, ~self.never_V]


@torch.no_grad()
def own_output(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> OwnOutput:
    """The first tokens in one call, the others through the cache; with recurrent states one by one,
    as they are made. Raises NotImplementedError if it has several heads, or one that reads states
    of another width."""
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise NotImplementedError("it has no single head over a vocabulary")
    tokens_1L = _proof_tokens(model, tokenizer)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
    rest = tokens_1L[:, CUT:]
    parts = [tokens_1L[:, :CUT], *(rest.split(1, dim=1) if recurrent else [rest])]
    read: list[Tensor] = []
    states: list[Tensor] = []
    hooks = [
        head.register_forward_pre_hook(lambda _, args: read.append(args[0])),
        find_body(model).register_forward_hook(
            lambda *call: states.append(call[-1].last_hidden_state)
        ),
    ]
    logits: list[Tensor] = []
    name, past = cache_name(model), 0
    try:
        with _watch_reads(model) as read_past:
            for part in parts:
                given = {name: cache, **positions(model, part, past)}
                logits.append(model(input_ids=part, use_cache=True, **given).logits[0])
                past += part.shape[1]
    finally:
        for hook in hooks:
            hook.remove()
    logits_LV, never_V = over_the_head(torch.cat(logits), len(head.weight))
    if read[0].shape[-1] != states[0].shape[-1]:
        widths = f"of width {read[0].shape[-1]}, its layers output {states[0].shape[-1]}"
        raise NotImplementedError(f"its head expects states {widths}")
    if [x.shape for x in states] == [x.shape for x in read]:  # else scaled before (MiniCPM3)
        read = [x.to(y.dtype) for x, y in zip(states, read, strict=True)]
    hidden_LD = torch.cat([x[0] if x.dim() == 3 else x for x in read])
    return OwnOutput(tokens_1L, logits_LV, hidden_LD, never_V, frozenset(read_past - {head}))


@contextmanager
def _watch_reads(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yields the linear layers and embeddings whose weight is read outside of their own call; these
    keep their dtype: Mamba multiplies by its `dt_proj`, indexers cast to that of `weights_proj`."""
    found: set[nn.Module] = set()
    running: list[nn.Module] = []

    def watch(kind: type) -> type:
        class Watched(kind):
            # not `forward`, which hooks of accelerate replace
            def __call__(self, *args: object, **kwargs: object) -> object:
                running.append(self)
                try:
                    return super().__call__(*args, **kwargs)
                finally:
                    running.pop()

            def __getattr__(self, name: str) -> object:
                if name == "weight" and not any(module is self for module in running):
                    found.add(self)
                return super().__getattr__(name)

        return Watched

    watched = [m for m in model.modules() if is_linear(m) or isinstance(m, nn.Embedding)]
    own = [type(module) for module in watched]
    classes = {kind: watch(kind) for kind in set(own)}
    try:
        for module, kind in zip(watched, own, strict=True):
            module.__class__ = classes[kind]
        yield found
    finally:
        for module, kind in zip(watched, own, strict=True):
            module.__class__ = kind


def placeholder_ids(model: PreTrainedModel) -> list[int]:
    """The tokens that stand for images and audio in a model's texts."""
    size = model.get_output_embeddings().weight.shape[0]
    media = ("image", "video", "audio")
    names = (f"{what}_token_{key}" for what in media for key in ("id", "index"))
    found = {getattr(model.config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and 0 <= token < size)


def positions(model: PreTrainedModel, tokens_1L: Tensor, past: int) -> dict[str, Tensor]:
    """The positions that `generate` passes; without them Bamba begins each call at 0."""
    wraps = model.config.get_text_config(decoder=True) is not model.config
    if wraps or "position_ids" not in signature(model.forward).parameters:
        return {}
    return {"position_ids": past + torch.arange(tokens_1L.shape[1], device=model.device)[None]}


def _proof_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The proof's text, (1, LENGTH), without tokens that end one or stand for an image."""
    size = model.get_output_embeddings().weight.shape[0]
    no_text = {*eos_ids(model.config, model.generation_config, tokenizer), *placeholder_ids(model)}
    of_text = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    ids = [i for i in of_text if i < size and i not in no_text]
    ids = ids or [i for i in range(size) if i not in no_text]
    return torch.tensor([(ids * LENGTH)[:LENGTH]], device=model.device)
