"""`model.generate(**inputs, custom_generate=decode.custom_generate, drafter=…)` on a transformers
model.

transformers prepares the request and passes its logits processors, stopping criteria and streamer.
They are applied to every verified row, so the output is that of `generate` without drafts: token
for token when greedy, else in distribution.
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

from decode.engine.decoder import Decoder
from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.proposers.base import Drafter
from decode.speculation.sampling import Sampling
from decode.speculation.verifiers import find
from decode.systems.generate_call import arguments_of_generate, check_call, masks_of
from decode.systems.generate_output import output_of
from decode.systems.load import load
from decode.systems.parsing import read_method
from decode.systems.registry import Compiled
from specalign.common.errors import UserError
from specalign.common.hub import local_path
from specalign.common.text import say
from specalign.lm.interface import install
from specalign.lm.model import Target
from specalign.lm.proof import prove_target
from specalign.lm.source import ModelSource
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter

_ATTRIBUTE = "_specalign"
"""Where a model keeps its `OpenModel`."""


class OpenModel:
    """A model as a target, with its decoders. Copies of a model open their own.

    `weights`: the state of the model's weights when it was opened.
    """

    def __init__(self, model: Any) -> None:
        offloaded = next((name for name, weight in model.named_parameters() if weight.is_meta), "")
        if offloaded:
            raise UserError(
                f"{offloaded} is offloaded: load the model without a device_map that offloads"
            )
        name = getattr(model, "name_or_path", "") or type(model).__name__
        self.target = prove_target(model, _NoTokenizer(), ModelSource(name), fast=False)
        self.decoders: dict[tuple[Any, ...], Decoder] = {}
        self.weights = _weights(model)

    def decoder(self, drafter: Any, method: str | None) -> Decoder:
        """The decoder of a drafter, opened once."""
        known = drafter is None or isinstance(drafter, str | Path | BlockDrafter | DiffusionDrafter)
        if not known and not hasattr(drafter, "law"):
            raise UserError(
                f"drafter={type(drafter).__name__}: give a folder or hub id, 'lookup', or a "
                "drafter of this project"
            )
        key: tuple[Any, ...] = (
            str(drafter) if isinstance(drafter, str | Path) else id(drafter),
            method,
        )
        weights = (
            local_path(drafter) / "model.safetensors" if isinstance(drafter, str | Path) else None
        )
        if weights is not None and weights.is_file():  # trained again into the same folder
            key = (*key, weights.stat().st_mtime_ns, weights.stat().st_ino)
        if key not in self.decoders:
            if method is not None and isinstance(read_method(method).system, Compiled):
                raise UserError(
                    f"method={method}: decodes with a reloaded copy of the model; use decode.load"
                )
            made = self.decoders[key] = load(self.target, drafter, method=method)
            if made.verifier != "auto" and find(made.verifier).lossy:
                say(
                    f"note: method={method}: {made.verifier} does not keep the model's "
                    "distribution, not even greedily",
                    error=True,
                )
        return self.decoders[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _weights(model: Any) -> list[tuple[int, int]]:
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
        drafter: None (plain decoding); else as `decode.load` takes it: a folder or hub id, `auto`,
            `lookup`, or one already loaded.
        method: a system by name, as `decode.load` takes it.

    Returns:
        What `generate` returns: tokens (B, n), or with `return_dict_in_generate` sequences, scores
            and logits as asked for.

    Raises:
        UserError: what drafts can't honour, as in `check_call`; a drafter that does not fit.
    """
    config, asked = generation_config, arguments_of_generate(model, inspect.currentframe())
    with _LOCK, _without_rope_deltas(model):
        check_call(model, asked, config, logits_processor, model_kwargs, input_ids)
    masks, streamer, count = (
        masks_of(input_ids, model_kwargs),
        asked.get("streamer"),
        len(input_ids),
    )
    length = (
        stopping_criteria.max_length or config.max_length
    )  # a criterion of one's own may be longer
    drafting = _drafting(config)
    with _LOCK, _without_rope_deltas(model), _as_target(model) as opened:
        target = opened.target
        _check_length(target, length)
        decoder = opened.decoder(drafter, method)
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
            for (
                engine
            ) in engines:  # `generate` pads behind a token that ends a text, behind nothing else
                engine.together = engines
        run_together(engines, count)  # side by side, so that time is shared (max_time)
        if streamer is not None:
            streamer.end()
    longest = max(engine.end for engine in engines)
    new = [engine.out.tokens[:longest] for engine in engines]
    return output_of(config, input_ids, new, [engine.kept or ([], []) for engine in engines])


def _check_length(target: Target, length: int) -> None:
    """Raises UserError where texts of this length do not fit."""
    if length > target.context_limit:
        raise UserError(
            f"max_length={length}: the context of {target.spec!r} holds {target.context_limit} "
            "tokens; lower max_new_tokens"
        )


def _drafting(config: Any) -> Sampling:
    """The settings for q. They affect acceptance, never the output's distribution."""
    if not config.do_sample:
        return Sampling()
    seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed repeats a text
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_p = 1.0 if config.top_p is None else float(config.top_p)
    return Sampling(
        max(temperature, 1e-3), min(max(top_p, 1e-6), 1.0), int(config.top_k or 0), seed=seed
    )


def _of_row(function: Any, number: int, count: int) -> Any:
    """A processor or criterion of a batch, applied to the text at index `number` alone: some depend
    on the index."""
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


_LOCK = RLock()
"""One call at a time: each replaces the attention of its model for its duration."""


@contextmanager
def _without_rope_deltas(model: Any) -> Iterator[None]:
    """Clear the position offsets that `generate` left in a multimodal model, for the duration."""
    kept = [
        (m, m.rope_deltas) for m in model.modules() if getattr(m, "rope_deltas", None) is not None
    ]
    try:
        for module, _ in kept:
            module.rope_deltas = None
        yield
    finally:
        for module, deltas in kept:
            module.rope_deltas = deltas


@contextmanager
def _as_target(model: Any) -> Iterator[OpenModel]:
    """The model as a target for the duration of a call: only its attention is replaced, and put
    back afterwards."""
    before, training = model.config._attn_implementation, model.training
    grads, drawn = (
        {name: p.requires_grad for name, p in model.named_parameters()},
        torch.get_rng_state(),
    )
    try:
        kept = getattr(model, _ATTRIBUTE, None)
        if kept is None or kept.weights != _weights(model):
            model.set_attn_implementation("eager")
            kept = OpenModel(model)
            setattr(model, _ATTRIBUTE, kept)
        model.eval()
        install(model, own=kept.target.attention == "its own, eager")
        yield kept
    finally:
        torch.set_rng_state(drawn)  # opening a drafter draws weights
        model.set_attn_implementation(before)
        model.train(training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(grads[name])
