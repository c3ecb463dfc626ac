"""The baseline: plain decoding timed against transformers' own `generate` on an unchanged model,
once per run."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from decode.engine.decoder import Decoder
from decode.engine.stock import stock_model
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.model import Target


@torch.no_grad()
def time_against_transformers(
    plain: Decoder, tokens: list[int], max_new_tokens: int = 64, repeats: int = 3
) -> JsonObject:
    """Greedy decoding of one prompt by both in turn, prefill included; the fastest repeat counts.
    The stock model is loaded for this, with its own linear layers and attention.

    Returns:
        plain_tokens_per_s, transformers_tokens_per_s, ratio (plain over transformers), ratios (of
            each
        repeat), identical, prompts, repeats, parameters (of the target). `{"error": line}` if
            transformers
        can't run the model.
    """
    seconds: dict[str, list[float]] = {"plain": [], "transformers": []}
    try:
        stock = stock_model(plain.target)
        _stock_tokens(stock, plain.target, tokens, 4)
        plain.generate(tokens, max_new_tokens=4)
        for _ in range(repeats):
            started = perf_counter()
            ours = plain.generate(tokens, max_new_tokens=max_new_tokens).tokens
            seconds["plain"].append(perf_counter() - started)
            started = perf_counter()
            theirs = _stock_tokens(stock, plain.target, tokens, max_new_tokens)
            seconds["transformers"].append(perf_counter() - started)
    except (RuntimeError, ValueError, TypeError, AttributeError, UserError) as error:
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    plain_speed = len(ours) / max(min(seconds["plain"]), 1e-9)
    stock_speed = len(theirs) / max(min(seconds["transformers"]), 1e-9)
    return {
        "plain_tokens_per_s": plain_speed,
        "transformers_tokens_per_s": stock_speed,
        "ratio": plain_speed / stock_speed,
        "identical": ours == theirs,
        "prompts": 1,
        "repeats": repeats,
        "parameters": sum(weight.numel() for weight in stock.parameters()),
        "ratios": [b / a for a, b in zip(seconds["plain"], seconds["transformers"], strict=True)],
        "max_new_tokens": max_new_tokens,
    }


def _stock_tokens(model: Any, target: Target, tokens: list[int], max_new_tokens: int) -> list[int]:
    limit = min(max_new_tokens, target.context_limit - len(tokens))
    ids = torch.tensor([tokens], device=target.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
    )
    return output[0, len(tokens) :].tolist()
