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
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.common.hub import local_path
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
from align.target.interface import install
from align.target.proof import proven
from decode.drafters.base import Drafter
from decode.engine.decoder import Decoder
from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.methods.load import load
from decode.portable.generate import of_row, other_way, output_of
from decode.speculation.sampling import Sampling

_KEPT = "_specalign"
"""The attribute of a model under which what was opened for it is kept, as long as the model lives."""
_IGNORED = {
    "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position",
}  # fmt: skip
"""What `generate` prepares itself for a text of tokens."""


class _Opened:
    """A model as a target, with its decoders. weights: which ones it was opened with. Copies of a model open their own."""

    def __init__(self, model: Any) -> None:
        name = getattr(model, "name_or_path", "") or type(model).__name__
        self.target, self.decoders = proven(model, _NoTokenizer(), name, fast=False), dict[Any, Decoder]()
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
            self.decoders[key] = load(self.target, drafter, method=method)
        return self.decoders[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _weights(model: Any) -> list[tuple[int, int]]:
    """Changes with every change of a weight."""
    return [(p.data_ptr(), p._version) for p in model.parameters()]


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
        drafter: a folder or hub id, `lookup`, None (plain decoding), or one already loaded, as `decode.load` takes it.
        method: a system by name, as `decode.load` takes it.

    Returns:
        What `generate` returns: tokens (B, n), or with `return_dict_in_generate` sequences, scores and logits as asked for.

    Raises:
        UserError: beams, inputs other than tokens, hidden states or attentions asked for, a drafter that does not fit.
    """
    config, streamer = generation_config, _streamer_of(inspect.currentframe())
    _check(config, model_kwargs, input_ids, streamer)
    drafting = _drafting(config)
    with _ONE, _ours(model) as ours:
        target = ours.target
        if config.max_length > target.context_limit:
            raise UserError(
                f"max_length={config.max_length}: the context of {target.spec!r} holds {target.context_limit} tokens; lower max_new_tokens"
            )
        decoder = ours.decoder(drafter, method)
        verifier = decoder.verifier_for(drafting)
        keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        engines, masks = list[ProcessedEngine](), _masks(input_ids, model_kwargs.get("attention_mask"))
        _check_positions(masks, model_kwargs.get("position_ids"))
        for number, (row, mask) in enumerate(zip(input_ids, masks, strict=True)):
            shown = row.tolist()
            engines.append(
                ProcessedEngine(
                    target,
                    row[mask].tolist(),
                    config.max_length - len(shown),
                    replace(drafting, seed=drafting.seed + number),
                    decoder.drafter,
                    verifier,
                    processors=of_row(logits_processor, number, len(input_ids)),
                    criteria=of_row(stopping_criteria, number, len(input_ids)),
                    shown=shown,
                    keep=keep,
                    put=None if streamer is None else lambda tokens: streamer.put(torch.tensor(tokens)),
                )
            )
        for engine in engines:
            run_together([engine])
        if streamer is not None:
            streamer.end()
    new = [engine.out.tokens for engine in engines]
    return output_of(config, input_ids, new, [engine.kept or ([], []) for engine in engines])


def _streamer_of(frame: FrameType | None) -> Any:
    """The streamer that `generate`, our caller, was given: it hands none to a function that takes the place of its loop."""
    caller = None if frame is None else frame.f_back
    return None if caller is None or caller.f_code.co_name != "generate" else caller.f_locals.get("streamer")


def _check(config: Any, model_kwargs: dict[str, Any], input_ids: Tensor, streamer: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise UserError(
            f"num_beams={config.num_beams}: drafts are verified against one text; leave num_beams at 1"
        )
    if name := other_way(config):
        raise UserError(f"{name}: drafts are verified against greedy choices or samples; leave it out")
    for name in ("output_hidden_states", "output_attentions"):
        if config.return_dict_in_generate and getattr(config, name, None):
            raise UserError(f"{name}: the states of rejected drafts are among them; leave it out")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise UserError(
            "guidance_scale: its processor runs the model once a token, in an order that drafts do not keep; leave it out"
        )
    if other := next((k for k, v in model_kwargs.items() if v is not None and k not in _IGNORED), None):
        raise UserError(f"{other}: only tokens and attention_mask are taken as input")
    for name in ("cache", "past_key_values"):
        held = model_kwargs.get(name)
        if held is not None and held.get_seq_length() > 0:
            raise UserError(
                f"{name}: holds tokens already; every request is read from its beginning, leave it out"
            )
    if input_ids.shape[1] == 0:
        raise UserError("input_ids: there is no token to continue")
    if type(getattr(config, "watermarking_config", None)).__name__ == "SynthIDTextWatermarkingConfig":
        raise UserError(
            "watermarking_config: SynthID's processor remembers the order of its calls, which drafts change; leave it out"
        )
    if streamer is not None and len(input_ids) > 1:
        raise UserError(f"streamer: {len(input_ids)} texts are written at once; a streamer takes one")


def _drafting(config: Any) -> Sampling:
    """How q is drawn: as p is processed where the settings say so. It moves acceptance, never the output's distribution."""
    if not config.do_sample:
        return Sampling()
    seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed repeats a text
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    top_p = 1.0 if config.top_p is None else float(config.top_p)
    return Sampling(max(temperature, 1e-3), min(max(top_p, 1e-6), 1.0), int(config.top_k or 0), seed=seed)


def _masks(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Which tokens of each text are no padding. Raises UserError where padding stands elsewhere than left."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    mask = attention_mask.bool()
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise UserError("attention_mask: padding stands behind tokens; pad on the left (padding_side='left')")
    return mask


def _check_positions(masks_BL: Tensor, positions_BL: Tensor | None) -> None:
    if not bool(masks_BL[:, -1].all()):
        raise UserError("attention_mask: a text has no token but padding")
    plain = masks_BL.long().cumsum(1) - 1
    given = plain if positions_BL is None or positions_BL.dim() != 2 else positions_BL
    if not bool(((given == plain) | ~masks_BL).all()):
        raise UserError(
            "position_ids: others than 0, 1, 2, … from a text's first token are not taken; leave them out"
        )


_ONE = RLock()
"""One call at a time: each puts our attention into its model and takes it out."""


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
