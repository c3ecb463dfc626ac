"""Is plain decoding an honest baseline? Timed once a run against transformers' own `generate` on an
unchanged model.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from align.common.errors import UserError
from align.target.loading import reload
from align.target.model import Target
from decode.engine.decoder import Decoder


@torch.no_grad()
def against_transformers(
    plain: Decoder, prompts: Sequence[list[int]], max_new_tokens: int = 64, repeats: int = 3
) -> dict[str, Any]:
    """Greedy decoding of the prompts by both, interleaved, prefill included; the fastest of the repeats
    counts.

    The stock model is loaded anew, with its own linear layers and SDPA attention, and freed afterwards.

    Returns:
        plain_tokens_per_s, transformers_tokens_per_s, ratio (plain over transformers), identical, prompts,
        repeats. `{"error": line}` where transformers can't run it.
    """
    try:
        stock = _stock_model(plain.target)
        for tokens in prompts[:1]:
            _stock_tokens(stock, plain.target, tokens, 4)
            plain.generate(tokens, max_new_tokens=4)
        best = {"plain": 0.0, "transformers": 0.0}
        counts = {"plain": 0, "transformers": 0}
        identical = True
        for tokens in prompts:
            timed: dict[str, list[float]] = {"plain": [], "transformers": []}
            for _ in range(repeats):
                started = perf_counter()
                ours = plain.generate(tokens, max_new_tokens=max_new_tokens).tokens
                timed["plain"].append(perf_counter() - started)
                started = perf_counter()
                theirs = _stock_tokens(stock, plain.target, tokens, max_new_tokens)
                timed["transformers"].append(perf_counter() - started)
            identical = identical and ours == theirs
            for name, output in (("plain", ours), ("transformers", theirs)):
                best[name] += min(timed[name])
                counts[name] += len(output)
    except (RuntimeError, ValueError, TypeError, AttributeError, UserError) as error:
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    speeds = {name: counts[name] / max(best[name], 1e-9) for name in best}
    return {
        "plain_tokens_per_s": speeds["plain"],
        "transformers_tokens_per_s": speeds["transformers"],
        "ratio": speeds["plain"] / speeds["transformers"],
        "identical": identical,
        "prompts": len(prompts),
        "repeats": repeats,
        "max_new_tokens": max_new_tokens,
    }


def _stock_model(target: Target) -> Any:
    model = reload(target, fast=False).model
    model.set_attn_implementation("sdpa")
    return model


def _stock_tokens(model: Any, target: Target, tokens: list[int], max_new_tokens: int) -> list[int]:
    from transformers import GenerationConfig

    limit = min(max_new_tokens, target.context_limit - len(tokens))
    config = GenerationConfig(
        max_new_tokens=limit,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=(target.eos_ids or (0,))[0],
    )
    ids = torch.tensor([tokens], device=target.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return output[0, len(tokens) :].tolist()
