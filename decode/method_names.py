"""Names of methods, verifiers and orders, as they are written in options, records and tables. No torch."""

from __future__ import annotations

from collections.abc import Mapping

PLAIN = "plain"
LOSSY = "lossy"
"""What the names of verifiers begin with that change the target's distribution."""

VERIFIERS = (
    "greedy", "point_mass", "self_selection", "token", "block", "recursive", "k_seq", "traversal", "hybrid", "gumbel",
    "lossy_typical", "lossy_top_beta",
)  # fmt: skip
"""The keys of decode/speculation/verifiers.py's `VERIFIERS`."""
ORDERS = ("left_to_right", "blockwise", "random", "confidence")
"""In which masked positions are filled in: decode/drafters/diffusion.py's `ORDERS`."""


def written(name: str, options: Mapping[str, str]) -> str:
    """A method as it is written, `name:key=value:…`."""
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])
