"""What transformers' `generate` returns, out of the new tokens of each text of a batch and the
logits of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput


def output_of(
    config: Any,
    ids_BL: Tensor,
    new: Sequence[list[int]],
    rows: Sequence[tuple[list[Tensor], list[Tensor]]],
) -> Any:
    """Tokens (B, n), or with `return_dict_in_generate` sequences, scores and logits as asked for.

    Args:
        new: of each text; shorter ones are padded.
        rows: of each text the raw and the processed logits (V,) of each token, where they were
            kept.
    """
    longest = max(map(len, new))
    prepared = getattr(config, "_pad_token_tensor", None)  # the end of text where there is none
    pad = 0 if prepared is None else int(prepared)
    padded = [tokens + [pad] * (longest - len(tokens)) for tokens in new]
    sequences = torch.cat(
        (ids_BL, torch.tensor(padded, dtype=ids_BL.dtype, device=ids_BL.device)), dim=1
    )
    if not config.return_dict_in_generate:
        return sequences
    logits, scores = (_steps([of_text[which] for of_text in rows], longest) for which in (0, 1))
    made: Any = GenerateDecoderOnlyOutput  # its fields are said to be narrower than they are
    return made(
        sequences=sequences,
        logits=logits if config.output_logits else None,
        scores=scores if config.output_scores else None,
    )


def _steps(rows: Sequence[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """By step (B, V); zeros behind a text's end."""
    if not rows[0]:
        return ()
    nothing = torch.zeros_like(rows[0][0])
    return tuple(
        torch.stack([r[i] if i < len(r) else nothing for r in rows]) for i in range(longest)
    )
