"""`model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True)`: the same output, in fewer calls of the model.

The drafter proposes tokens, one call of the model checks them all, and those that the model writes itself are kept. Each token is
chosen from the model's own logits after `generate`'s own processors, by the same draw from the same random numbers: greedy and
sampled outputs are those of plain `generate` (in half precision up to ties).
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.hub import cached_file

from decode.portable.drafter import Context, Drafter

_PREPARED = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
"""What `generate` makes by itself for a text of tokens."""

Rows = tuple[list[Tensor], list[Tensor]]
"""The logits of each token of a text, raw and processed."""


def generate(
    model: Any,
    inputs: Tensor | None = None,
    drafter: str | None = None,
    accepted: list[int] | None = None,
    streamer: Any = None,
    assistant_model: Any = None,
    **settings: Any,
) -> Any:
    """What transformers calls in place of `generate`, with the same arguments.

    Args:
        drafter: folder or hub id of the drafter; None = the one given as `custom_generate`.
        accepted: gets the number of accepted drafts of each call.

    Raises:
        ValueError: beams, inputs other than tokens, a model that can't take tokens back.
    """
    if assistant_model is not None:
        raise ValueError("assistant_model: this drafter takes its place; leave it out")
    network = _drafter(model, drafter or _asked_for(inspect.currentframe()))
    loop = partial(decode, drafter=network, accepted=[] if accepted is None else accepted, streamer=streamer)
    return model.generate(inputs, streamer=streamer, custom_generate=loop, **settings)


def _asked_for(frame: FrameType | None) -> str:
    """`custom_generate` as it was given to `generate`, our caller, which does not hand it on."""
    caller = None if frame is None else frame.f_back
    name = None if caller is None else caller.f_locals.get("custom_generate")
    if not isinstance(name, str):
        raise ValueError("drafter: name the drafter's folder or hub id")
    return name


def _drafter(model: Any, name: str) -> Drafter:
    """Opened once for a model."""
    opened = model.__dict__.setdefault("_drafters", {})
    if name not in opened:
        # in a folder that is here a missing one is nothing to ask the hub for
        local = Path(name.partition("/")[0]).is_dir()
        try:
            paths = [
                cached_file(name, file, local_files_only=local)
                for file in ("config.json", "model.safetensors")
            ]
        except OSError as error:
            what = "no such folder with" if local else "neither a folder nor a hub id that can be had, with"
            raise ValueError(f"drafter={name!r}: {what} config.json and model.safetensors") from error
        opened[name] = Drafter(Path(str(paths[0])).parent, model)
    return opened[name]


@torch.no_grad()
def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: Drafter,
    accepted: list[int],
    streamer: Any,
    **model_kwargs: Any,
) -> Any:
    """The loop that `generate` calls in place of its own; the texts of a batch are written one after the other."""
    _check(model, generation_config, model_kwargs, input_ids, streamer)
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    texts = [
        _Text(model, drafter, input_ids[i : i + 1], mask[i].bool(), generation_config, accepted, streamer)
        for i in range(len(input_ids))
    ]
    for i, text in enumerate(texts):
        text.write(of_row(logits_processor, i, len(texts)), of_row(stopping_criteria, i, len(texts)))
    if streamer is not None:
        streamer.end()
    return output_of(
        generation_config, input_ids, [text.new for text in texts], [text.rows for text in texts]
    )


def output_of(config: Any, input_ids: Tensor, new: list[list[int]], rows: list[Rows]) -> Any:
    """What `generate` returns for these new tokens of each text, and the logits of each of them where they were kept."""
    longest = max(map(len, new))
    prepared = getattr(config, "_pad_token_tensor", None)  # the end of text where there is none
    pad = 0 if prepared is None else int(prepared)
    padded = [tokens + [pad] * (longest - len(tokens)) for tokens in new]
    written = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat((input_ids, written), dim=1)
    if not config.return_dict_in_generate:
        return sequences
    logits, scores = (_steps([of_text[which] for of_text in rows], longest) for which in (0, 1))
    made: Any = GenerateDecoderOnlyOutput  # its fields are said to be narrower than they are
    return made(
        sequences=sequences,
        logits=logits if config.output_logits else None,
        scores=scores if config.output_scores else None,
    )


class _Text:
    """One text of a batch. new: what was written; rows: the logits of each token, raw and processed."""

    def __init__(
        self,
        model: Any,
        drafter: Drafter,
        shown_1L: Tensor,
        mask_L: Tensor,
        config: Any,
        accepted: list[int],
        streamer: Any,
    ) -> None:
        self.model, self.drafter, self.config, self.accepted, self.streamer = (
            model,
            drafter,
            config,
            accepted,
            streamer,
        )
        self.shown, self.prompt = shown_1L, shown_1L[:, mask_L]
        self.new: list[int] = []
        self.rows: Rows = ([], [])
        self.kept = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        self.cache, self.context = DynamicCache(), list[tuple[Tensor, Tensor]]()
        self.takes = frozenset(inspect.signature(model.forward).parameters)

    def write(self, processors: Any, criteria: Any) -> None:
        block, drafts, text = self.prompt, list[int](), self.shown
        while True:
            out = self._call(block, len(drafts) + 1)
            rows = out.logits[0, -len(drafts) - 1 :].float()
            first, ended = len(self.new), False
            for place in range(len(drafts) + 1):
                token = self._choose(processors(text, rows[place : place + 1].clone()), rows[place])
                text = torch.cat((text, token), dim=1)
                ended = bool(torch.as_tensor(criteria(text, None)).all())
                if ended or place == len(drafts) or int(token) != drafts[place]:
                    break
            right = len(self.new) - first - 1  # of the drafts; the last token is the model's own
            if first:  # the first call reads the prompt and checks nothing
                self.accepted.append(right)
            if self.streamer is not None:
                self.streamer.put(torch.tensor(self.new[first:]))
            if ended:
                return
            if right < len(drafts):
                self.cache.crop(right - len(drafts))
            before = self._read(out.hidden_states, block.shape[1] - len(drafts) + right)
            most = self.config.max_length - text.shape[1] - 1
            drafts = self.drafter.drafts(self.new[-1], before, self._context()) if most > 0 else []
            drafts = drafts[:most]
            block = torch.tensor([[self.new[-1], *drafts]], device=text.device)

    def _call(self, block_1R: Tensor, rows: int) -> Any:
        """The model over the block and what its cache holds; logits of the last rows alone where it can leave out the others."""
        more: dict[str, Any] = {"logits_to_keep": rows} if "logits_to_keep" in self.takes else {}
        more["cache" if "cache" in self.takes else "past_key_values"] = self.cache
        return self.model(input_ids=block_1R, use_cache=True, output_hidden_states=True, **more)

    def _choose(self, scores_1V: Tensor, raw_V: Tensor) -> Tensor:
        """The next token, (1, 1), as `generate` chooses it."""
        if self.config.do_sample:
            token = torch.multinomial(scores_1V.softmax(dim=-1), num_samples=1)
        else:
            token = scores_1V.argmax(dim=-1, keepdim=True)
        self.new.append(int(token))
        if self.kept:
            self.rows[0].append(raw_V)
            self.rows[1].append(scores_1V[0])
        return token

    def _read(self, states: tuple[Tensor, ...], kept: int) -> Tensor:
        """Take in the `kept` positions of a call that are committed now. Returns the last one's hidden state, (1, D)."""
        if self.drafter.taps:
            start = self.context[0][0].shape[2] if self.context else 0
            new = self.drafter.context_of(tuple(state[:, :kept] for state in states), start)
            old = self.context or [(k[:, :, :0], v[:, :, :0]) for k, v in new]
            self.context = [
                (torch.cat((k, more_k), dim=2), torch.cat((v, more_v), dim=2))
                for (k, v), (more_k, more_v) in zip(old, new, strict=True)
            ]
        return states[-1][:, kept - 1]

    def _context(self) -> Context:
        if self.drafter.taps:
            return self.context
        layers: list[Any] = [self.cache.layers[i] for i in self.drafter.layers]
        return [(layer.keys, layer.values) for layer in layers]


def _check(model: Any, config: Any, model_kwargs: dict[str, Any], input_ids: Tensor, streamer: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: drafts are checked against one text; leave num_beams at 1"
        )
    if name := other_way(config):
        raise ValueError(f"{name}: drafts are checked against greedy choices or samples; leave it out")
    if getattr(model, "_is_stateful", False) or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__}: its states can't be taken back, so drafts can't be checked"
        )
    for name in ("output_hidden_states", "output_attentions"):
        if config.return_dict_in_generate and getattr(config, name, None):
            raise ValueError(f"{name}: the states of rejected drafts are among them; leave it out")
    if other := next((k for k, v in model_kwargs.items() if v is not None and k not in _PREPARED), None):
        raise ValueError(f"{other}: only tokens and attention_mask are taken as input")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask: padding stands behind tokens; pad on the left (padding_side='left')"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids: there is no token to continue")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"streamer: {len(input_ids)} texts are written; a streamer takes one")


def other_way(config: Any) -> str:
    """The setting that asks for another choice of tokens than greedy ones or samples from processed logits; empty = none."""
    asked = ("penalty_alpha", "dola_layers", "force_words_ids", "constraints")
    return next((name for name in asked if getattr(config, name, None) not in (None, 0, [])), "")


def of_row(function: Any, number: int, count: int) -> Any:
    """A function of a batch's texts as one of its text in the place `number`: some know what stands in which place."""
    if count == 1:
        return function

    def alone(text: Tensor, scores: Tensor | None) -> Any:
        found = function(text.repeat(count, 1), None if scores is None else scores.repeat(count, 1))
        return found[number : number + 1] if isinstance(found, Tensor) else found

    return alone


def _steps(rows: list[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """By step (B, V); zeros behind a text's end."""
    if not rows[0]:
        return ()
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([r[i] if i < len(r) else nothing for r in rows]) for i in range(longest))
