"""A target as transformers runs it."""

from typing import Any

from transformers import GenerationConfig

from specalign.lm.loading import reload
from specalign.lm.model import Target


def stock_model(target: Target) -> Any:
    """The target as transformers runs it, with its own attention (SDPA where it has that) and
    linear layers; of its generation config only the ends of a text apply."""
    model = reload(target, fast=False).model
    # what a config given to `generate` leaves out is taken from the model's
    ends = list(target.eos_ids)
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=(ends or [0])[0]
    )
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # gpt-oss, Mamba 2: there is none
        model.set_attn_implementation("eager")
    return model
