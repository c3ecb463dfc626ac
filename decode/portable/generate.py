"""`model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True)`: the same output, in
fewer forward passes.

The drafter proposes tokens, one forward pass of the model checks them all, and those that the model
itself chooses are kept. Each token is chosen from the model's own logits after `generate`'s own
processors, with the same random numbers: greedy and sampled outputs are those of plain `generate`
(in half precision up to ties).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.hub import cached_file

from decode.portable.checks import check_call, check_model
from decode.portable.drafter import Context, Drafter


def generate(
    model: Any,
    inputs: Tensor | None = None,
    drafter: str | None = None,
    accepted: list[int] | None = None,
    streamer: BaseStreamer | None = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Any:
    """What transformers calls in place of `generate`, with the same arguments. Raises ValueError
    for beams, inputs other than tokens, a model whose cache can't be rolled back.

    Args:
        drafter: folder or hub id of the drafter; None = the one given as `custom_generate`.
        accepted: receives the number of accepted drafts of each round.
    """
    if assistant_model is not None:
        raise ValueError("assistant_model: this drafter takes its place; leave it out")
    if settings.get("synced_gpus"):
        raise ValueError("synced_gpus: the number of forward passes differs between processes")
    check_model(model, 0)
    network = _open_drafter(model, drafter or _find_given_name(inspect.currentframe()))
    if tokenizer is not None:
        settings = _add_stop_strings(tokenizer, settings)
    loop = partial(
        decode, drafter=network, accepted=[] if accepted is None else accepted, streamer=streamer
    )
    return model.generate(inputs, streamer=streamer, custom_generate=loop, **settings)


def _find_given_name(frame: FrameType | None) -> str:
    """`custom_generate` as it was given to `generate`, our caller, which does not pass it on."""
    caller = None if frame is None else frame.f_back
    name = None if caller is None else caller.f_locals.get("custom_generate")
    if not isinstance(name, str):
        raise ValueError("drafter: name the drafter's folder or hub id")
    return name


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


def _add_stop_strings(tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """`stop_strings` as a criterion: `generate` passes no tokenizer to a custom loop."""
    given = settings.get("generation_config")
    strings = settings.get("stop_strings") or getattr(given, "stop_strings", None)
    if not strings:
        return settings
    criteria = StoppingCriteriaList(settings.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, strings))
    settings = {**settings, "stop_strings": None, "stopping_criteria": criteria}
    if given is not None:
        settings["generation_config"] = given = copy(given)
        given.stop_strings = None
    return settings


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    accepted: list[int],
    streamer: BaseStreamer | None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop that `generate` runs."""
    mask_BL = check_call(model, generation_config, model_kwargs, input_ids)
    longest = find_longest(stopping_criteria, generation_config)
    check_model(model, longest)
    texts = [
        Text(model, drafter, row[mask][None], accepted)
        for row, mask in zip(input_ids, mask_BL, strict=True)
    ]
    return write_texts(
        texts, input_ids, longest, logits_processor, stopping_criteria, generation_config, streamer
    )


def find_longest(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """The length of the longest text; a user's criterion counts."""
    return criteria.max_length or config.max_length


class DraftedText(Protocol):
    """One text of a batch. Its logits come from forward passes that check its drafts; those of one
    pass last for several steps if the drafts are right."""

    def logits(self, room: int) -> Tensor:
        """Of the next token, raw (V,); zeros after the end. `room`: how many tokens may follow."""

    def take(self, token: int, ended: bool) -> None:
        """The next token, as it was chosen; `ended`: none follows."""

    def end(self) -> None:
        """The batch has ended."""


def write_texts(
    texts: Sequence[DraftedText],
    ids: Tensor,
    longest: int,
    logits_processor: Any,
    stopping_criteria: StoppingCriteriaList,
    config: Any,
    streamer: BaseStreamer | None,
) -> Any:
    """All texts of a batch get one token in every step, as in `generate`'s own loop: processors,
    criteria and random numbers see the same."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    returned = config.return_dict_in_generate
    logits: tuple[Tensor, ...] | None = () if returned and config.output_logits else None
    scores: tuple[Tensor, ...] | None = () if returned and config.output_scores else None
    while bool(alive.any()):
        raw_BV = torch.stack([text.logits(longest - ids.shape[1]) for text in texts])
        scores_BV = logits_processor(ids, raw_BV.clone())
        logits = None if logits is None else (*logits, raw_BV)
        scores = None if scores is None else (*scores, scores_BV)
        if config.do_sample:
            tokens = torch.multinomial(scores_BV.softmax(dim=-1), num_samples=1)[:, 0]
        else:
            tokens = scores_BV.argmax(dim=-1)
        if ends:
            tokens = torch.where(alive, tokens, config._pad_token_tensor)
        ids = torch.cat((ids, tokens[:, None]), dim=1)
        alive = alive & ~stopping_criteria(ids, scores)
        if streamer is not None:
            streamer.put(tokens.cpu())
        for text, token, more in zip(texts, tokens.tolist(), alive.tolist(), strict=True):
            text.take(token, ended=ends and not more)
    for text in texts:
        text.end()
    if streamer is not None:
        streamer.end()
    output: Any = GenerateDecoderOnlyOutput  # its fields are typed too narrowly
    return output(sequences=ids, logits=logits, scores=scores) if returned else ids


class Text:
    """A text that a `Drafter` drafts. rows: logits of the last pass, of the token before its drafts
    and of each draft; taken: how many of them chose a token."""

    def __init__(
        self, model: PreTrainedModel, drafter: Drafter, prompt_1L: Tensor, accepted: list[int]
    ) -> None:
        self.model, self.drafter, self.block, self.accepted = model, drafter, prompt_1L, accepted
        self.cache = _new_cache(model)
        self.parameters = frozenset(inspect.signature(model.forward).parameters)
        self.context: Context = []
        self.drafts: list[int] = []
        self.rows: Tensor | None = None
        self.states: tuple[Tensor, ...] = ()
        self.last = self.taken = 0
        self.checked = self.used_up = self.ended = False

    def logits(self, room: int) -> Tensor:
        if self.rows is None or (self.used_up and not self.ended):
            if self.rows is not None:
                self._draft(room)
            out = self._forward(len(self.drafts) + 1)
            rows_RV = out.logits[0, -len(self.drafts) - 1 :]
            self.rows, self.states = rows_RV.to(self.block.device, torch.float32), out.hidden_states
            self.taken, self.used_up = 0, False
        return torch.zeros_like(self.rows[0]) if self.ended else self.rows[self.taken]

    def take(self, token: int, ended: bool) -> None:
        if self.ended:
            return
        self.used_up = self.drafts[self.taken : self.taken + 1] != [token]
        self.last, self.taken = token, self.taken + 1
        if ended:
            self.end()

    def end(self) -> None:
        if not self.ended:
            self._count_accepted()
        self.ended = True

    def _count_accepted(self) -> None:
        """A round's last token is the model's own. The first pass reads the prompt and checks
        nothing."""
        if self.checked:
            self.accepted.append(self.taken - 1)
        self.checked = True

    def _draft(self, room: int) -> None:
        """Roll the cache back over rejected drafts, and draft after the last token."""
        self._count_accepted()
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
