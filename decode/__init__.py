"""Use a drafter to speed a target up, losslessly.

import decode
decoder = decode.load("HuggingFaceTB/SmolLM2-135M-Instruct", "pretrained/smollm2-135m-block")
print(decoder.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from align.common.errors import UserError
    from decode.engine.decoder import Decoder
    from decode.engine.output import Generation
    from decode.methods.custom_generate import custom_generate
    from decode.methods.load import load
    from decode.speculation.sampling import Sampling

__all__ = ["Decoder", "Generation", "Sampling", "UserError", "custom_generate", "load"]

_HOME = {
    "Decoder": "decode.engine.decoder",
    "Generation": "decode.engine.output",
    "Sampling": "decode.speculation.sampling",
    "UserError": "align.common.errors",
    "custom_generate": "decode.methods.custom_generate",
    "load": "decode.methods.load",
}


def __getattr__(name: str) -> Any:
    """Import on first use: reading records or printing --help needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
