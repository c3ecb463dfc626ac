"""The proof that p is the model's own: on a few tokens, what we compute is what the model computes by itself.

The model runs first as transformers runs it, with its own attention and its own cache. Then we run it: whole, and in pieces
through our cache with a tree of drafts and a rollback between them, and two requests side by side. Where that differs by
more than rounding the target is refused; where branches alone differ it takes chains alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.kernels.replacing import speed_up_linears
from align.target.fused import fused
from align.target.inspection.own_output import CUT, LENGTH, Own, own_output
from align.target.logits import LogitForm, candidates
from align.target.model import Target

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""The largest difference that is rounding, in standard deviations of the logits."""


def proven(model: Any, tokenizer: Any, spec: str, fast: bool = True, round_to_bf16: bool = False) -> Target:
    """The target, proved; with our attention where that is the model's, else with the model's own.

    Args:
        model: as transformers loaded it, with its own eager attention.
        fast, round_to_bf16: as in `align.target.loading.load_target`.

    Raises:
        UserError: it does not run, or its outputs differ from the model's own: what differs, in one line.
    """
    with _choosing_few(model):
        return _proven(model, tokenizer, spec, fast, round_to_bf16)


@contextmanager
def _choosing_few(model: Any) -> Iterator[None]:
    """Within it, indexers choose fewer keys than the proof has tokens. In 16 bits two of so few would tie too often."""
    indexers = [m for m in model.modules() if isinstance(getattr(m, "index_topk", None), int)]
    chosen = [m.index_topk for m in indexers]
    try:
        for module, most in zip(indexers, chosen, strict=True):
            module.index_topk = min(most, CUT // 2) if model.dtype == torch.float32 else most
        yield
    finally:
        for module, most in zip(indexers, chosen, strict=True):
            module.index_topk = most


def _proven(model: Any, tokenizer: Any, spec: str, fast: bool, round_to_bf16: bool) -> Target:
    name = model.config.model_type
    if model.dtype not in _TOLERANCE:
        held = str(model.dtype).removeprefix("torch.")
        raise UserError(f"target {spec!r}: its weights are {held}; float32, bfloat16 and float16 are run")
    if part := _packed(model):
        raise UserError(
            f"target {spec!r}: {part} is quantised by torch.ao.quantization, with one scale for all rows of a call, so that drafts would "
            "change the text; give the model as it was before"
        )
    try:
        own = own_output(model.eval(), tokenizer)
    except Exception as error:  # a model's failures have no common class
        wraps = model.config.get_text_config(decoder=True) is not model.config
        alone = f" on text alone (it is a {type(model).__name__})" if wraps else ""
        raise UserError(
            f"target {spec!r}: architecture {name!r} does not run{alone}: {first_line(error)}"
        ) from None
    if bool((own.logits_LV.isnan() | (own.logits_LV == torch.inf)).any()):
        raise UserError(
            f"target {spec!r}: its logits are NaN or infinite: its weights are damaged, or {str(model.dtype).removeprefix('torch.')} is too "
            "narrow for them (then: dtype float32)"
        )
    said, quick, was_fused = "", fast and not round_to_bf16, True
    for attempt in ("fused", "modules", "own attention"):
        if attempt == "modules" and not was_fused:  # they were tried just now
            continue
        try:
            target = Target(
                model,
                tokenizer,
                spec,
                quick,
                own_attention=attempt == "own attention",
                fuse=attempt == "fused",
                read_past=own.read_past,
            )
            was_fused = target.fused is not None
            target.never_V, target.before_head = own.never_V, own.before_head
            target.logit_form = _form(target, own)
            said = _difference(target, own, target.dtype)
            _read_placeholders(target, own)
        except Exception as error:
            said = first_line(error)
        if not said:
            if fast and round_to_bf16:  # proved as it is; a drafter's weights are rounded after that
                speed_up_linears(model, target.dtype, target.device, torch.bfloat16, own.read_past)
                target.find_ends()
                target.fast, target.fused = fast, fused(model, target.body, target.layers)
            return target
    if _looks_ahead(model, own):
        said = "it reads a text in both directions"
        said += (
            " (config.json: is_decoder=false)" if getattr(model.config, "is_decoder", None) is False else ""
        )
    raise UserError(f"target {spec!r}: architecture {name!r} can't be run exactly: {said}")


def _packed(model: Any) -> str:
    """The first part that rounds what it reads by one scale for a call's rows; empty = none."""
    named = model.named_modules()
    return next((name for name, part in named if "quantized.dynamic" in type(part).__module__), "")


@torch.no_grad()
def _looks_ahead(model: Any, own: Own) -> bool:
    """Whether the last tokens change what the first ones give."""
    try:
        whole, first = (
            model(input_ids=own.tokens_1L[:, :n], use_cache=False).logits[0] for n in (LENGTH, CUT)
        )
    except Exception:  # then another reason stands
        return False
    return float((whole[:CUT] - first).abs().max() / own.written_LV.std()) > 0.5


def first_line(error: Exception) -> str:
    """What an error says, in one line, with its kind where that tells more."""
    lines = str(error).strip().splitlines() or [""]
    known = isinstance(error, NotImplementedError | UserError)
    return lines[0] if known else f"{type(error).__name__}: {lines[0]}"


def _form(target: Target, own: Own) -> LogitForm:
    """What the model does behind its head: the form that gives its own logits out of what its head saw."""
    if own.layers_write not in (None, width := own.head_input_LD.shape[-1]):
        raise NotImplementedError(
            f"its head reads states of width {width}, its layers write {own.layers_write}"
        )
    product = target.model.get_output_embeddings()(own.head_input_LD).float()
    wanted_LV = own.written_LV
    size = float(wanted_LV.abs().max())
    if own.never_V is not None:
        product = product[:, ~own.never_V]

    def error(form: LogitForm) -> float:
        logits = form(product)
        return float((logits - wanted_LV).abs().max()) if logits.shape == wanted_LV.shape else size

    best = min(candidates(target.config), key=error)
    if error(best) > (1e-4 if target.dtype == torch.float32 else 0.03) * size:
        raise NotImplementedError(
            "its logits are not its head's product, scaled or capped as its config says"
        )
    return best


def _difference(target: Target, own: Own, dtype: torch.dtype) -> str:
    """What differs from the model's own output; nothing = "". Takes from the target what it can't do exactly."""
    most, tokens = _TOLERANCE[dtype], own.tokens_1L
    whole = target.forward(tokens).logits_BLV
    if (found := _apart(whole, own, range(LENGTH), dtype)) > most:
        return f"its logits differ from the model's own by {found:.2g} standard deviations"
    if not target.chains_only and _in_pieces(target, own, True, torch.float32) > most:
        target.chains_only = True
    if target.anatomy.recurrent:
        if (found := _trace(target, own)) > most / 10:  # the same sums twice: hardly a difference is rounding
            return f"a rejected draft changes the logits behind it by {found:.2g} standard deviations: it keeps a state outside its cache"
        target.stepwise = _in_pieces(target, own, False, torch.float32) > most
    if target.chains_only and (found := _in_pieces(target, own, False, dtype)) > most:
        return f"through a cache its logits differ from the model's own by {found:.2g} standard deviations"
    if target.together:
        target.together = _side_by_side(target, own, dtype) <= most
    return ""


def _read_placeholders(target: Target, own: Own) -> None:
    """Choose, for each placeholder, the token as which the model reads it."""
    most, unproved = _TOLERANCE[target.dtype], []
    padding = [target.tokenizer.pad_token_id, getattr(target.config, "pad_token_id", None)]
    for token, (text_1L, logits_LV) in own.placed.items():
        wanted = replace(own, tokens_1L=text_1L, logits_LV=logits_LV)
        for other in dict.fromkeys([token, 0, *(p for p in padding if p is not None)]):
            target.stand_ins[token] = other
            found = target.forward(text_1L).logits_BLV
            if _apart(found, wanted, range(LENGTH), target.dtype) <= most:
                break
        else:
            target.stand_ins[token] = token
            unproved.append(token)
    target.stand_ins = {token: other for token, other in target.stand_ins.items() if token != other}
    target.unproved = tuple(unproved)


def _apart(logits_1LV: Tensor | None, own: Own, places: Sequence[int], dtype: torch.dtype) -> float:
    """How far logits are from the model's own at these places. In 16 bits the median of the places counts: there an expert's
    router may flip at one of them."""
    assert logits_1LV is not None
    wanted = own.logits_LV[list(places)]
    apart_L = (logits_1LV[0] - wanted).abs().amax(-1) / own.written_LV.std()
    return float(apart_L.max() if dtype == torch.float32 else apart_L.median())


def _in_pieces(target: Target, own: Own, branching: bool, dtype: torch.dtype) -> float:
    """The largest difference of a prefix, drafts of which one is rejected, and the rest, through our cache."""
    tokens, cache = own.tokens_1L, target.new_cache(1, LENGTH + 2)
    found = [_apart(target.forward(tokens[:, :CUT], cache=cache).logits_BLV, own, range(CUT), dtype)]
    wrong, a, b, c = tokens[:, :1], *(tokens[:, CUT + i : CUT + i + 1] for i in range(3))
    try:
        if branching:  # `wrong` and `b` are siblings
            see_LL = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
            drafts, rows = torch.cat((a, wrong, b, c), 1), [0, 2, 3]
            logits = target.forward(drafts, cache=cache, see_LL=see_LL.to(target.device)).logits_BLV
        else:
            drafts, rows = torch.cat((a, b, wrong, wrong), 1), [0, 1]
            logits = target.forward(drafts, cache=cache).logits_BLV
    except RuntimeError:
        if branching:  # its own attention has no place for such a mask
            return float("inf")
        raise
    assert logits is not None
    found.append(_apart(logits[:, rows], own, range(CUT, CUT + len(rows)), dtype))
    cache.keep(CUT, rows)
    rest = target.forward(tokens[:, CUT + len(rows) :], cache=cache).logits_BLV
    return max(*found, _apart(rest, own, range(CUT + len(rows), LENGTH), dtype))


def _trace(target: Target, own: Own) -> float:
    """What one rejected draft or another changes in the tokens behind it: nothing, where a rollback is one."""
    found = []
    for wrong in own.tokens_1L[0, :2].tolist():
        cache = target.new_cache(1, LENGTH + 2)
        target.forward(own.tokens_1L[:, :CUT], cache=cache)
        drafts = torch.tensor([[wrong, wrong]], device=target.device)
        target.forward(drafts, cache=cache)
        cache.keep(CUT, [])
        found.append(target.forward(own.tokens_1L[:, CUT : CUT + 1], cache=cache).logits_BLV)
    one, other = found
    assert one is not None and other is not None
    return float((one - other).abs().max() / own.written_LV.std())


def _side_by_side(target: Target, own: Own, dtype: torch.dtype) -> float:
    """The largest difference of two requests of different lengths in one forward, twice."""
    tokens, found = own.tokens_1L, [0.0]
    caches = [target.new_cache(1, LENGTH) for _ in range(2)]
    try:
        for parts in ([(0, CUT), (0, 3)], [(CUT, LENGTH), (3, 5)]):
            outputs = target.forward_together([tokens[:, a:b] for a, b in parts], caches, [None, None])
            for output, (a, b) in zip(outputs, parts, strict=True):
                found.append(_apart(output.logits_BLV, own, range(a, b), dtype))
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return float("inf")
    return max(found)
