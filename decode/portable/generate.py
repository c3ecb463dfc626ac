"""`model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True)`: the same output, in
fewer forward passes.

The drafter proposes tokens, one forward pass of the model checks them all, and those that the model
itself chooses are kept. Each token is chosen from the model's own logits after `generate`'s own
processors, with the same random numbers: greedy and sampled outputs are those of plain `generate`
(in half precision up to ties).
"""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.hub import cached_file

from decode.portable.drafter import Context, Drafter

_PREPARED = {
    "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep",
    "cache_position", "output_hidden_states", "output_attentions",
}  # fmt: skip
"""Inputs that `generate` adds itself."""
_REFUSED = (
    "penalty_alpha", "dola_layers", "force_words_ids", "constraints", "prompt_lookup_num_tokens",
    "assistant_early_exit", "use_mtp", "output_hidden_states", "output_attentions",
    "output_scores", "output_logits",
)  # fmt: skip
"""Settings for other ways to choose tokens, other drafts, or what drafts would be part of."""


def generate(
    model: Any,
    inputs: Tensor | None = None,
    drafter: str | None = None,
    streamer: BaseStreamer | None = None,
    **settings: Any,
) -> Any:
    """What transformers calls in place of `generate`, with the same arguments; `drafter`: folder or
    hub id of the drafter; None = the one given as `custom_generate`. Raises ValueError for beams,
    several texts, inputs other than tokens, or a model whose cache can't be rolled back."""
    for name in ("assistant_model", "synced_gpus", "stop_strings"):
        if settings.pop(name, None):
            raise ValueError(f"{name}: is not supported with this drafter; leave it out")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{type(model).__name__}: its state can't be rolled back after drafts")
    frame: Any = inspect.currentframe()  # `generate`, our caller, does not pass the name on
    network = _open_drafter(model, drafter or frame.f_back.f_locals["custom_generate"])
    loop = partial(decode, drafter=network, streamer=streamer)
    return model.generate(inputs, streamer=streamer, custom_generate=loop, **settings)


def _open_drafter(model: PreTrainedModel, name: str) -> Drafter:
    """Opened once for a model. Raises OSError for an unavailable hub id."""
    opened = model.__dict__.setdefault("_drafters", {})
    if name not in opened:
        folder = Path(name)
        if not folder.is_dir():
            paths = [cached_file(name, file) for file in ("config.json", "model.safetensors")]
            folder = Path(str(paths[0])).parent
        opened[name] = Drafter(folder, model)
    return opened[name]


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,  # its input is typed too narrowly
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    streamer: BaseStreamer | None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop that `generate` runs. Processors, criteria and random numbers see the same
    as in `generate`'s own loop."""
    ids, config = input_ids, generation_config
    check_call(model, config, model_kwargs, ids)
    longest = stopping_criteria.max_length or config.max_length
    check_rotary(model, longest)
    text, ended = Text(model, drafter, ids), False
    while not ended:
        scores_1V = logits_processor(ids, text.logits(longest - ids.shape[1])[None].clone())
        if config.do_sample:
            token_1 = torch.multinomial(scores_1V.softmax(dim=-1), num_samples=1)[:, 0]
        else:
            token_1 = scores_1V.argmax(dim=-1)
        ids = torch.cat((ids, token_1[:, None]), dim=1)
        if streamer is not None:
            streamer.put(token_1.cpu())
        text.take(int(token_1))
        ended = bool(stopping_criteria(ids, None).all())
    if streamer is not None:
        streamer.end()
    output: Any = GenerateDecoderOnlyOutput  # its fields are typed too narrowly
    return output(sequences=ids) if config.return_dict_in_generate else ids


class Text:
    """A text that grows. Its logits come from forward passes that check its drafts; those of one
    pass last for several steps if the drafts are right.

    rows: logits of the last pass, of the token before its drafts and of each draft. taken: how many
    of them chose a token. used_up: the last one chose another token than its draft.
    """

    def __init__(self, model: PreTrainedModel, drafter: Drafter, prompt_1L: Tensor) -> None:
        self.model, self.drafter, self.block = model, drafter, prompt_1L
        self.cache = _new_cache(model)
        self.parameters = frozenset(inspect.signature(model.forward).parameters)
        self.context: Context = []
        self.drafts: list[int] = []
        self.rows: Tensor | None = None
        self.states: tuple[Tensor, ...] = ()
        self.last = self.taken = 0
        self.used_up = False

    def logits(self, room: int) -> Tensor:
        """Of the next token, raw (V,). `room`: how many tokens may follow."""
        if self.rows is None or self.used_up:
            if self.rows is not None:
                self._draft(room)
            out = self._forward(len(self.drafts) + 1)
            rows_RV = out.logits[0, -len(self.drafts) - 1 :]
            self.rows, self.states = rows_RV.to(self.block.device, torch.float32), out.hidden_states
            self.taken = 0
        return self.rows[self.taken]

    def take(self, token: int) -> None:
        """The next token, as it was chosen."""
        self.used_up = self.drafts[self.taken : self.taken + 1] != [token]
        self.last, self.taken = token, self.taken + 1

    def _draft(self, room: int) -> None:
        """Roll the cache back over rejected drafts, and draft after the last token."""
        rejected = len(self.drafts) - self.taken + 1
        if rejected:
            self.cache.crop(-rejected)
        before = self._commit(self.block.shape[1] - rejected)
        context = self.context if self.drafter.taps else self.drafter.read_shared(self.cache.layers)
        drafts = self.drafter.draft(self.last, before, context) if room > 1 else []
        self.drafts = drafts[: room - 1]
        self.block = torch.tensor([[self.last, *self.drafts]], device=self.block.device)

    def _forward(self, rows: int) -> Any:
        """The model over the block; only the last rows' logits if it can leave out the others."""
        name = "cache" if "cache" in self.parameters else "past_key_values"
        more: dict[str, Any] = {name: self.cache}
        if "logits_to_keep" in self.parameters:
            more["logits_to_keep"] = rows
        return self.model(input_ids=self.block, use_cache=True, output_hidden_states=True, **more)

    def _commit(self, kept: int) -> Tensor:
        """Add the `kept` committed positions of a pass to the context. Returns the last one's
        hidden state, (1, D)."""
        if self.drafter.taps:
            start = self.context[0][0].shape[2] if self.context else 0
            new = self.drafter.make_context(tuple(state[:, :kept] for state in self.states), start)
            layers = zip(*((self.context, new) if self.context else (new,)), strict=True)
            self.context = [
                (torch.cat([k for k, _ in parts], dim=2), torch.cat([v for _, v in parts], dim=2))
                for parts in layers
            ]
        return self.states[-1][:, kept - 1]


def _new_cache(model: PreTrainedModel) -> DynamicCache:
    """The model's own kinds of layers, but no windows: drafters read all keys, and any number of
    tokens is taken back."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [
        DynamicLayer() if type(e) is DynamicSlidingWindowLayer else e for e in cache.layers
    ]
    return cache


# ---- calls that drafts can't honour ----


def check_call(
    model: PreTrainedModel, config: GenerationConfig, given: dict[str, Any], input_ids: Tensor
) -> None:
    """Raises ValueError for a setting or an input that drafts can't honour."""
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams={config.num_beams}: drafts need one text; set num_beams=1")
    for name in _REFUSED:
        kept = name.startswith("output_") and not config.return_dict_in_generate  # no effect
        if getattr(config, name, None) not in (None, 0, [], False) and not kept:
            raise ValueError(f"{name}: is not supported with this drafter; leave it out")
    images = "pixel_values" in inspect.signature(model.forward).parameters
    for name, value in given.items():
        if isinstance(value, Tensor):  # types of tokens in a model of images: 0 = text
            types = images and name.endswith("token_type_ids")
            empty = value.numel() == 0 or (types and not bool(value.any()))
        else:
            empty = not (any(value.values()) if isinstance(value, dict) else value)
        if name not in _PREPARED and not empty:
            raise ValueError(f"{name}: only tokens and attention_mask are taken as input")
    cache = given.get("cache", given.get("past_key_values"))
    if cache is not None and ("Quantized" in type(cache).__name__ or cache.get_seq_length() > 0):
        raise ValueError("past_key_values: must be empty and not quantized; leave it out")
    mask, places = given.get("attention_mask"), given.get("position_ids")
    if len(input_ids) != 1 or (mask is not None and not bool(mask.all())):
        raise ValueError("input_ids: takes one text without padding")
    own = torch.arange(input_ids.shape[1], device=input_ids.device)
    if places is not None and not bool((places == own).all()):
        raise ValueError("position_ids: must count from the text's first token; leave them out")


def check_rotary(model: PreTrainedModel, longest: int) -> None:
    """Raises ValueError if the model's rotary tables change below the length `longest`: the cache
    would hold keys under the old ones."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for group in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = group.get("rope_type")
        most = config.max_position_embeddings if kind in ("longrope", "dynamic") else longest
        if kind == "longrope":
            most = group.get("original_max_position_embeddings", most)
        if longest > most:
            why = f"the model's rotary tables change at {most} tokens ({kind})"
            raise ValueError(f"max_length={longest}: {why}; lower max_new_tokens")
