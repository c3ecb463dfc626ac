"""The proof that p is the model's own: on a few tokens, what we compute equals what the model
computes by itself.

The model runs first as transformers runs it, with its own attention and cache. Then we run it:
whole, in pieces through our cache with a tree of drafts and a rollback between them, and two
requests in one forward pass. A target that differs by more than rounding is refused; one that
differs only over branches takes chains only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from specalign.common.errors import UserError
from specalign.lm.inspection.own_output import CUT, LENGTH, OwnOutput, own_output
from specalign.lm.logits import LogitForm, Readout, candidates
from specalign.lm.model import Target
from specalign.lm.names import ModelSource

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""The largest difference that is rounding, in standard deviations of the logits."""
_CUSTOM_CACHE = "it uses a custom cache class"
_UNSUPPORTED = {
    "doge": "it selects keys by the number of tokens in a forward pass",
    "minimax": _CUSTOM_CACHE,
    "xlstm": _CUSTOM_CACHE,
}
_WAYS = ({"fuse": True}, {"fuse": False}, {"fuse": False, "own_attention": True})
"""How a model may run, the fastest first: fused, our attention, its own attention."""


def prove_target(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    source: ModelSource,
    fast: bool = True,
    round_to_bf16: bool = False,
) -> Target:
    """The target, proved; with our attention where that equals the model's, else with the model's
    own. Raises UserError where it does not run, or its outputs differ from the model's own.

    Args:
        model: as transformers loaded it, with its own eager attention.
        fast, round_to_bf16: as in `load_target`; weights are rounded after the proof.
    """
    _check_supported(model, source.spec)
    with _choosing_few(model):
        own = _run_own(model.eval(), tokenizer, source.spec)
        target = _first_exact(model, tokenizer, source, own, fast and not round_to_bf16)
    if fast and round_to_bf16:
        target.round_weights()
    return target


def _check_supported(model: PreTrainedModel, spec: str) -> None:
    kind, reason = model.config.model_type, ""
    if kind in _UNSUPPORTED:
        reason = f"architecture {kind!r} is not supported: {_UNSUPPORTED[kind]}"
    elif model.dtype not in _TOLERANCE:
        reason = f"its weights are {_name(model)}; only float32, bfloat16 and float16 are supported"
    elif any("quantized.dynamic" in type(part).__module__ for part in model.modules()):
        reason = (  # one scale for all rows of a pass
            "it is quantized by torch.ao.quantization, so drafts would change the text; use the "
            "unquantized model"
        )
    if reason:
        raise UserError(f"target {spec!r}: {reason}")


@contextmanager
def _choosing_few(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which indexers select fewer keys than the proof has tokens (16 bits would
    tie)."""
    modules: list[Any] = list(model.modules())
    indexers = [m for m in modules if isinstance(getattr(m, "index_topk", None), int)]
    own = [m.index_topk for m in indexers]
    if model.dtype == torch.float32:
        for module in indexers:
            module.index_topk = min(module.index_topk, CUT // 2)
    try:
        yield
    finally:
        for module, most in zip(indexers, own, strict=True):
            module.index_topk = most


def _run_own(model: PreTrainedModel, tokenizer: Tokenizer, spec: str) -> OwnOutput:
    """The model's own output. Raises UserError if it does not run or produces NaN."""
    try:
        own = own_output(model, tokenizer)
    except Exception as error:  # a model's failures have no common class
        wraps = model.config.get_text_config(decoder=True) is not model.config
        what = f"architecture {model.config.model_type!r} does not run{' on text alone' * wraps}"
        raise UserError(f"target {spec!r}: {what}: {first_line(error)}") from None
    if bool((own.logits_LV.isnan() | (own.logits_LV == torch.inf)).any()):
        raise UserError(
            f"target {spec!r}: its logits are NaN or infinite: its weights are damaged, or "
            f"{_name(model)} is too narrow for them (if so, use dtype float32)"
        )
    return own


def _first_exact(
    model: PreTrainedModel, tokenizer: Tokenizer, source: ModelSource, own: OwnOutput, fast: bool
) -> Target:
    """The model by the first of `_WAYS` that equals it. Raises UserError where none does."""
    reason = ""
    for way in _WAYS:
        try:
            readout = Readout(_find_form(model, own), own.never_V)
            target = Target(
                model, tokenizer, source, readout, fast=fast, read_past=own.read_past, **way
            )
            reason = _difference(target, own)
        except Exception as error:
            reason = first_line(error)
        if not reason:
            return target
    if getattr(model.config, "is_decoder", None) is False:
        reason += " (config.json: is_decoder=false)"
    name = model.config.model_type
    what = f"architecture {name!r} failed the exactness check"
    raise UserError(f"target {source.spec!r}: {what}: {reason}")


def _name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def first_line(error: Exception) -> str:
    """An error in one line, with its class unless it is one of ours."""
    lines = str(error).strip().splitlines() or [""]
    known = isinstance(error, NotImplementedError | UserError)
    return lines[0] if known else f"{type(error).__name__}: {lines[0]}"


@torch.no_grad()
def _find_form(model: PreTrainedModel, own: OwnOutput) -> LogitForm:
    """The form that makes the model's logits of its head's product, or NotImplementedError."""
    product = model.get_output_embeddings()(own.head_input_LD).float()
    if own.never_V is not None:
        product = product[:, ~own.never_V]

    def error(form: LogitForm) -> float:
        return float((form(product) - own.written_LV).abs().max())

    best = min(candidates(model.config.get_text_config(decoder=True)), key=error)
    rounding = 1e-4 if model.dtype == torch.float32 else 0.03
    if error(best) > rounding * float(own.written_LV.abs().max()):
        raise NotImplementedError(
            "its logits are not its head's output scaled or capped per its config"
        )
    return best


def _difference(target: Target, own: OwnOutput) -> str:
    """What differs from the model's own output, or "". Restricts the target to what is exact."""
    dtype, most = target.dtype, _TOLERANCE[target.dtype]
    whole = target.forward(own.tokens_1L).logits_BLV
    found = _distance(whole, own, range(LENGTH), dtype)
    if found > most:
        return f"its logits differ from the model's own by {found:.2g} standard deviations"
    if not target.chains_only and _in_pieces(target, own, True, torch.float32) > most:
        target.restrict(chains_only=True)
    if target.anatomy.others:  # a layer that caches no keys may keep a state elsewhere
        found = _after_rejection(target, own)
        if found > most / 10:  # the same sums twice: hardly any rounding
            return (
                f"a rejected draft changes later logits by {found:.2g} standard "
                "deviations: it keeps a state outside its cache"
            )
    if target.anatomy.recurrent:
        target.restrict(stepwise=_in_pieces(target, own, False, torch.float32) > most)
    if target.chains_only:
        found = _in_pieces(target, own, False, dtype)
        if found > most:
            return (
                f"with a cache, its logits differ from the model's own by {found:.2g} standard "
                "deviations"
            )
    if target.together:
        target.restrict(one_by_one=_side_by_side(target, own, dtype) > most)
    return ""


def _distance(
    logits_1LV: Tensor | None, own: OwnOutput, places: Sequence[int], dtype: torch.dtype
) -> float:
    """How far logits are from the model's own at these places. In 16 bits the median of the places
    counts: an expert's router may flip at one of them."""
    assert logits_1LV is not None
    wanted = own.logits_LV[list(places)]
    apart_L = (logits_1LV[0] - wanted).abs().amax(-1) / own.written_LV.std()
    return float(apart_L.max() if dtype == torch.float32 else apart_L.median())


def _in_pieces(target: Target, own: OwnOutput, branching: bool, dtype: torch.dtype) -> float:
    """The largest difference of a prefix, drafts, a rollback and the rest, through our cache."""
    tokens, cache = own.tokens_1L, target.new_cache(1, LENGTH + 2)
    prefix = target.forward(tokens[:, :CUT], cache=cache).logits_BLV
    wrong, a, b, c = tokens[:, :1], *(tokens[:, CUT + i : CUT + i + 1] for i in range(3))
    see_LL = None
    drafts, rows = torch.cat((a, b, wrong, wrong), 1), [0, 1]
    if branching:  # `wrong` and `b` are siblings
        drafts, rows = torch.cat((a, wrong, b, c), 1), [0, 2, 3]
        see = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
        see_LL = torch.tensor(see, dtype=torch.bool, device=target.device)
    try:
        logits = target.forward(drafts, cache=cache, see_LL=see_LL).logits_BLV
    except RuntimeError:
        if branching:  # its own attention does not take such a mask
            return float("inf")
        raise
    assert logits is not None
    cache.keep(CUT, rows)
    end = CUT + len(rows)
    rest = target.forward(tokens[:, end:], cache=cache).logits_BLV
    return max(
        _distance(prefix, own, range(CUT), dtype),
        _distance(logits[:, rows], own, range(CUT, end), dtype),
        _distance(rest, own, range(end, LENGTH), dtype),
    )


def _after_rejection(target: Target, own: OwnOutput) -> float:
    """How far two rejected drafts move the logits after them apart: 0 if rollback is exact."""
    found = []
    for wrong in own.tokens_1L[0, :2].tolist():
        cache = target.new_cache(1, LENGTH + 2)
        target.forward(own.tokens_1L[:, :CUT], cache=cache)
        target.forward(torch.tensor([[wrong, wrong]], device=target.device), cache=cache)
        cache.keep(CUT, [])
        after = target.forward(own.tokens_1L[:, CUT : CUT + 1], cache=cache)
        found.append(target.head(after.hidden_BLD))
    return float((found[0] - found[1]).abs().max() / own.written_LV.std())


def _side_by_side(target: Target, own: OwnOutput, dtype: torch.dtype) -> float:
    """The largest difference of two requests of different lengths in one forward pass, twice."""
    tokens, found = own.tokens_1L, [0.0]
    caches = [target.new_cache(1, LENGTH) for _ in range(2)]
    try:
        for parts in ([(0, CUT), (0, 3)], [(CUT, LENGTH), (3, 5)]):
            new = [tokens[:, a:b] for a, b in parts]
            outputs = target.forward_batch(new, caches, [None, None])
            for output, (a, b) in zip(outputs, parts, strict=True):
                found.append(_distance(output.logits_BLV, own, range(a, b), dtype))
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return float("inf")
    return max(found)
