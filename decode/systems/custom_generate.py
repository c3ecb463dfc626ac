"""`model.generate(**inputs, custom_generate=decode.custom_generate, drafter=…)` on a transformers
model: the loop that exports carry (decode/portable/generate.py), whose outputs are those of plain
`generate`, with drafts from any system of this project and the model run through its `Target`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from decode.engine.engine import RequestRunner, forward_batch
from decode.portable.checks import check_call
from decode.portable.generate import find_longest, write_texts
from decode.proposers.base import Proposer
from decode.speculation.proposal import NO_DRAFTS
from decode.speculation.sampling import Sampling
from decode.speculation.verification import Outcome
from decode.systems.construction import load
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.masks import install
from specalign.lm.model import Target, TargetOutput
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter

_ATTRIBUTE = "_specalign"
"""Where a model keeps its `OpenModel`."""
_LOCK = RLock()
"""One call at a time: each replaces the attention of its model for its duration."""


class OpenModel:
    """A model as a target, with its drafters; `weights`: their state when it was opened. Copies of
    a model open their own."""

    def __init__(self, model: PreTrainedModel) -> None:
        offloaded = next((name for name, weight in model.named_parameters() if weight.is_meta), "")
        if offloaded:
            hint = "load the model without a device_map that offloads"
            raise UserError(f"{offloaded} is offloaded: {hint}")
        name = getattr(model, "name_or_path", "") or type(model).__name__
        no_tokenizer: Any = _NoTokenizer()
        self.target = prove_target(model, no_tokenizer, ModelSource(name), fast=False)
        self.drafters: dict[tuple[str | int, str | None], Proposer | None] = {}
        self.weights = _weights(model)

    def open_drafter(self, drafter: Any, method: str | None) -> Proposer | None:
        """Opened once. Opening it draws weights, which leaves the caller's random numbers alone."""
        known = drafter is None or isinstance(drafter, str | Path | BlockDrafter | DiffusionDrafter)
        if not known and not hasattr(drafter, "law"):
            given = type(drafter).__name__
            raise UserError(f"drafter={given}: give a folder, a hub id, 'lookup' or a proposer")
        key = (str(drafter) if isinstance(drafter, str | Path) else id(drafter), method)
        if key not in self.drafters:
            drawn = torch.get_rng_state()
            self.drafters[key] = load(self.target, drafter, method=method).drafter
            torch.set_rng_state(drawn)
        return self.drafters[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _weights(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Differs after every change of a weight; changes within torch.inference_mode are not
    counted."""
    return [(p.data_ptr(), -1 if p.is_inference() else p._version) for p in model.parameters()]


class _NoTokenizer:
    """`custom_generate` handles tokens only."""

    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": []}

    def decode(self, tokens: Any, **options: Any) -> str:
        return ""


@torch.no_grad()
def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | Path | Proposer | None = None,
    method: str | None = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop that `generate` runs; returns what `generate` returns. Raises UserError for
    options that are not supported with drafts (see `check_call`), or for a drafter that does not
    fit.

    Args:
        drafter: None (plain decoding), or as in `decode.load`: a folder or hub id, `auto`,
            `lookup`, or a loaded drafter.
        method: a system, as in `decode.load`. It only drafts; `generate` still chooses the tokens.
    """
    given = _find_arguments(model, inspect.currentframe())
    for name in ("assistant_model", "synced_gpus"):
        if given.get(name):
            raise UserError(f"{name}: can't be used with this drafter; leave it out")
    try:
        masks_BL = check_call(model, generation_config, model_kwargs, input_ids)
    except ValueError as error:
        raise UserError(str(error)) from None
    longest = find_longest(stopping_criteria, generation_config)
    with _LOCK, _as_target(model) as opened:
        target = opened.target
        if longest > target.context_limit:
            limit = f"the context of {target.spec!r} is {target.context_limit} tokens"
            raise UserError(f"max_length={longest}: {limit}; lower max_new_tokens")
        proposer = opened.open_drafter(drafter, method)
        texts: list[TargetText] = []
        for row, mask in zip(input_ids, masks_BL, strict=True):
            prompt = row[mask].tolist()
            texts.append(TargetText(target, prompt, longest - len(row), proposer, texts))
        try:
            return write_texts(
                texts, input_ids, longest, logits_processor, stopping_criteria, generation_config,
                given.get("streamer"),
            )  # fmt: skip
        finally:
            for text in texts:
                text.runner.close()


def _find_arguments(model: PreTrainedModel, frame: FrameType | None) -> JsonObject:
    """The arguments of the model's running `generate`, found on the stack below `frame`: it passes
    neither streamer nor assistant on."""
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return {**frame.f_locals.get("kwargs", {}), **frame.f_locals}
        frame = frame.f_back
    raise UserError("custom_generate: call it through model.generate(custom_generate=…)")


class TargetText:
    """A text that a proposer drafts (the `DraftedText` of the loop). rows: logits of the last pass,
    of the token before its drafts and of each draft. path: the drafts that were chosen. batch: the
    texts that share forward passes."""

    def __init__(
        self,
        target: Target,
        prompt: list[int],
        limit: int,
        proposer: Proposer | None,
        batch: list[TargetText],
    ) -> None:
        self.runner = RequestRunner(target, prompt, limit, Sampling(), proposer)
        self.runner.eos = frozenset()
        self.runner.proposal = NO_DRAFTS
        self.batch = batch
        self.rows: Tensor | None = None
        self.output: TargetOutput | None = None
        self.path: list[int] = []
        self.last = 0
        self.used_up = self.ended = False

    def logits(self, room: int) -> Tensor:
        if self.rows is None:
            self.rows = self.runner.prefill().logits_MV.float()
        elif self.used_up and not self.ended:
            _run([text for text in self.batch if text.used_up and not text.ended])
        assert self.rows is not None
        return torch.zeros_like(self.rows[0]) if self.ended else self.rows[self._row()]

    def _row(self) -> int:
        """The row that chooses the next token."""
        return self.path[-1] + 1 if self.path else 0

    def take(self, token: int, ended: bool) -> None:
        if self.ended:
            return
        proposal, parent = self.runner.proposal, self._row() - 1
        nodes = zip(proposal.tokens_K.tolist(), proposal.tree, strict=True)
        chosen = [i for i, (draft, above) in enumerate(nodes) if (draft, above) == (token, parent)]
        self.path += chosen[:1]
        self.last, self.used_up = token, not chosen
        self.ended = ended

    def end(self) -> None:
        self.ended = True

    def commit(self) -> None:
        """Commit the tokens of the last pass."""
        accepted = [int(self.runner.proposal.tokens_K[i]) for i in self.path]
        outcome = Outcome(accepted, self.last, self.path)
        if self.output is None:
            self.runner.commit_prefill(outcome)
        else:
            self.runner.commit_round(self.output, outcome)


def _run(texts: list[TargetText]) -> None:
    """One forward pass over new drafts of these texts."""
    for text in texts:
        text.commit()
    runners = [text.runner for text in texts]
    outputs = forward_batch(runners, [runner.draft() for runner in runners])
    for text, output in zip(texts, outputs, strict=True):
        assert output.logits_BLV is not None
        text.rows, text.output = output.logits_BLV[0].float(), output
        text.path, text.used_up = [], False


@contextmanager
def _as_target(model: Any) -> Iterator[OpenModel]:
    """The model as a target for the duration of a call: its attention is replaced, and put back
    afterwards, as are the position offsets that `generate` left in a multimodal model."""
    before, training = model.config._attn_implementation, model.training
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    offsets = [(m, m.rope_deltas) for m in model.modules() if hasattr(m, "rope_deltas")]
    try:
        for module, _ in offsets:
            module.rope_deltas = None
        kept = getattr(model, _ATTRIBUTE, None)
        if kept is None or kept.weights != _weights(model):
            model.set_attn_implementation("eager")
            kept = OpenModel(model)
            setattr(model, _ATTRIBUTE, kept)
        model.eval()
        install(model, own=kept.target.attention == "its own, eager")
        yield kept
    finally:
        model.set_attn_implementation(before)
        model.train(training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(grads[name])
        for module, deltas in offsets:
            module.rope_deltas = deltas
