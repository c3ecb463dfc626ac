"""Aligned discrete-diffusion drafters and lossless speculative decoding.

import specalign
decoder = specalign.load("HuggingFaceTB/SmolLM2-135M-Instruct")
print(decoder.generate("Why is the sky blue?"))

The names are `decode`'s; the package itself holds what training and decoding share.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import on first use: `specalign.common` needs neither torch nor `decode`."""
    decode = import_module("decode")
    if name not in decode.__all__:
        raise AttributeError(f"module 'specalign' has no attribute {name!r}")
    return getattr(decode, name)


def __dir__() -> list[str]:
    return dir(import_module("decode"))
