"""The drop-in: `model.generate(**inputs, custom_generate=decode.custom_generate, drafter=…)` on a transformers model.

transformers prepares the request and hands over what it made: logits processors and warpers, stopping criteria, streamer. All of them
are applied to every row that is verified, so that the output is what `generate` gives without drafts: greedily token for token, else
in distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.common.hub import local_path
from align.common.text import say
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
from align.target.interface import install
from align.target.model import Target
from align.target.proof import prove_target
from align.target.source import ModelSource
from decode.drafters.base import Drafter
from decode.engine.decoder import Decoder
from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.methods.generate_call import asked_of, check_call, masks_of
from decode.methods.generate_output import output_of
from decode.methods.load import load
from decode.methods.spec import read_method
from decode.speculation.sampling import Sampling
from decode.speculation.verifiers import find

_KEPT = "_specalign"
"""The attribute of a model under which what was opened for it is kept, as long as the model lives."""


class _Opened:
    """A model as a target, with its decoders. weights: which ones it was opened with. Copies of a model open their own."""

    def __init__(self, model: Any) -> None:
        name = getattr(model, "name_or_path", "") or type(model).__name__
        if away := next((name for name, p in model.named_parameters() if p.is_meta), ""):
            raise UserError(
                f"{away}: lies outside of the model until a call reads it (offloading); load the model whole, without a device_map that offloads"
            )
        self.target = prove_target(model, _NoTokenizer(), ModelSource(name), fast=False)
        self.decoders: dict[Any, Decoder] = {}
        self.weights = _weights(model)

    def decoder(self, drafter: Any, method: str | None) -> Decoder:
        """Opened once."""
        if not (
            drafter is None
            or isinstance(drafter, str | Path | BlockDrafter | DiffusionDrafter)
            or hasattr(drafter, "law")
        ):
            raise UserError(
                f"drafter={type(drafter).__name__}: give a folder or hub id, 'lookup', or a drafter of this project"
            )
        key: tuple[Any, ...] = (str(drafter) if isinstance(drafter, str | Path) else id(drafter), method)
        weights = local_path(drafter) / "model.safetensors" if isinstance(drafter, str | Path) else None
        if weights is not None and weights.is_file():  # trained again into the same folder
            key = (*key, weights.stat().st_mtime_ns, weights.stat().st_ino)
        if key not in self.decoders:
            if method is not None and read_method(method).system.target is not None:
                raise UserError(
                    f"method={method}: decodes with a copy of the model, loaded anew; take it with decode.load, or leave it out"
                )
            made = self.decoders[key] = load(self.target, drafter, method=method)
            if made.verifier != "auto" and find(made.verifier).lossy:
                say(
                    f"note: method={method}: {made.verifier} does not keep the model's distribution: texts differ from plain generate's, "
                    "greedy ones too",
                    error=True,
                )
        return self.decoders[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _weights(model: Any) -> list[tuple[int, int]]:
    """Changes with every change of a weight; within torch.inference_mode those are not counted."""
    return [(p.data_ptr(), -1 if p.is_inference() else p._version) for p in model.parameters()]


class _NoTokenizer:
    """Tokens are all that comes in and goes out."""

    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": []}

    def decode(self, tokens: Any, **options: Any) -> str:
        return ""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: str | Path | Drafter | None = None,
    method: str | None = None,
    **model_kwargs: Any,
) -> Any:
    """What `generate` calls in place of its own loop.

    Args:
        drafter: None (plain decoding); else as `decode.load` takes it: a folder or hub id, `auto`, `lookup`, or one already
            loaded.
        method: a system by name, as `decode.load` takes it.

    Returns:
        What `generate` returns: tokens (B, n), or with `return_dict_in_generate` sequences, scores and logits as asked for.

    Raises:
        UserError: what drafts can't honour, as in `check_call`; a drafter that does not fit.
    """
    config, asked = generation_config, asked_of(model, inspect.currentframe())
    with _ONE, _no_offsets(model):
        check_call(model, asked, config, logits_processor, model_kwargs, input_ids)
    masks, streamer, count = masks_of(input_ids, model_kwargs), asked.get("streamer"), len(input_ids)
    length = stopping_criteria.max_length or config.max_length  # a criterion of one's own may be longer
    drafting = _drafting(config)
    with _ONE, _no_offsets(model), _ours(model) as ours:
        target = ours.target
        _check_length(target, length, masks)
        decoder = ours.decoder(drafter, method)
        verifier = decoder.verifier_for(drafting)
        scored = bool(config.return_dict_in_generate and config.output_scores)
        engines = [
            ProcessedEngine(
                target,
                row[mask].tolist(),
                length - len(row),
                replace(drafting, seed=drafting.fixed_seed + number),
                decoder.drafter,
                verifier,
                processors=_of_row(logits_processor, number, count),
                criteria=_of_row(stopping_criteria, number, count),
                shown=row.tolist(),
                keep=scored or bool(config.return_dict_in_generate and config.output_logits),
                scored=scored,
                put=None if streamer is None else lambda tokens: streamer.put(torch.tensor(tokens)),
            )
            for number, (row, mask) in enumerate(zip(input_ids, masks, strict=True))
        ]
        if not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
            for engine in engines:  # `generate` pads behind a token that ends a text, behind nothing else
                engine.together = engines
        run_together(engines, count)  # side by side, so that time is shared (max_time)
        if streamer is not None:
            streamer.end()
    longest = max(engine.end for engine in engines)
    new = [engine.out.tokens[:longest] for engine in engines]
    return output_of(config, input_ids, new, [engine.kept or ([], []) for engine in engines])


def _check_length(target: Target, length: int, masks_BL: Tensor) -> None:
    """Raises UserError where texts of so many tokens do not fit, or padding would count in `generate`."""
    if length > target.context_limit:
        raise UserError(
            f"max_length={length}: the context of {target.spec!r} holds {target.context_limit} tokens; lower max_new_tokens"
        )
    if target.switch is not None and length > target.switch and not bool(masks_BL.all()):
        raise UserError(
            f"attention_mask: the rotary tables of {target.spec!r} change at {target.switch} tokens, and generate counts those of the "
            "longest text, padding too; give one text at a time, without padding, or lower max_new_tokens"
        )


def _drafting(config: Any) -> Sampling:
    """How q is drawn: as p is processed where the settings say so. It moves acceptance, never the output's distribution."""
    if not config.do_sample:
        return Sampling()
    seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed repeats a text
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_p = 1.0 if config.top_p is None else float(config.top_p)
    return Sampling(max(temperature, 1e-3), min(max(top_p, 1e-6), 1.0), int(config.top_k or 0), seed=seed)


def _of_row(function: Any, number: int, count: int) -> Any:
    """A function of a batch's texts and their scores as one of its text in the place `number`: some know what stands in which place."""
    if count == 1:
        return function

    def repeated(scores: Any) -> Any:
        if isinstance(scores, Tensor):
            return scores.repeat(count, 1)
        return None if scores is None else tuple(map(repeated, scores))

    def alone(text_1n: Tensor, scores: Any) -> Any:
        found = function(text_1n.repeat(count, 1), repeated(scores))
        return found[number : number + 1] if isinstance(found, Tensor) else found

    return alone


_ONE = RLock()
"""One call at a time: each puts our attention into its model and takes it out."""


@contextmanager
def _no_offsets(model: Any) -> Iterator[None]:
    """Within it, a model of images and text knows no offsets of positions: `generate` leaves in it those of the batch it prepared."""
    kept = [(m, m.rope_deltas) for m in model.modules() if getattr(m, "rope_deltas", None) is not None]
    try:
        for module, _ in kept:
            module.rope_deltas = None
        yield
    finally:
        for module, deltas in kept:
            module.rope_deltas = deltas


@contextmanager
def _ours(model: Any) -> Iterator[_Opened]:
    """The model as a target for the time of a call: our attention goes in and comes out again, and nothing else is changed."""
    before, training = model.config._attn_implementation, model.training
    grads, drawn = {name: p.requires_grad for name, p in model.named_parameters()}, torch.get_rng_state()
    try:
        kept = getattr(model, _KEPT, None)
        if kept is None or kept.weights != _weights(model):
            model.set_attn_implementation("eager")
            kept = _Opened(model)
            setattr(model, _KEPT, kept)
        model.eval()
        install(model, own=kept.target.attention == "its own, eager")
        yield kept
    finally:
        torch.set_rng_state(drawn)  # opening a drafter draws weights
        model.set_attn_implementation(before)
        model.train(training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(grads[name])
