"""Decode losslessly with a target and a drafter.

import decode
decoder = decode.load("HuggingFaceTB/SmolLM2-135M-Instruct")
print(decoder.generate("Why is the sky blue?"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder, Stream
    from decode.engine.output import Generation
    from decode.speculation.settings import Sampling
    from decode.systems.load import load
    from specalign.common.errors import UserError
    from specalign.rows.conversation import Conversation

__all__ = ["Conversation", "Decoder", "Generation", "Sampling", "Stream", "UserError", "load"]

_HOME = {
    "Conversation": "specalign.rows.conversation",
    "Decoder": "decode.engine.decoder",
    "Generation": "decode.engine.output",
    "Sampling": "decode.speculation.settings",
    "Stream": "decode.engine.decoder",
    "UserError": "specalign.common.errors",
    "load": "decode.systems.load",
}


def __getattr__(name: str) -> Any:
    """Import on first use: reading records or printing --help needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The API, for completion, although most of it is imported on first use."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
