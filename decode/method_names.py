"""Names of methods, verifiers and orders, as they are written in options, records and tables. No torch."""

from __future__ import annotations

from collections.abc import Mapping

PLAIN, LOOKUP, DRAFTER, COMBINED = "plain", "lookup", "drafter", "combined"
"""Plain decoding, prompt lookup, the drafter that was given, and that drafter with prompt lookup in front."""
MAIN = DRAFTER
"""The method that a verdict begins with and a table prints in bold, where it was measured."""
TITLES = {LOOKUP: "Prompt lookup", DRAFTER: "The drafter", COMBINED: "The drafter with lookup"}
"""Method → what a sentence calls it; any other by its name."""
LOSSY = "lossy"
"""The prefix of the names of verifiers that change the output's distribution."""

VERIFIERS = (
    "greedy", "point_mass", "self_selection", "token", "block", "recursive", "k_seq", "traversal", "hybrid", "gumbel",
    "lossy_typical", "lossy_top_beta",
)  # fmt: skip
"""The keys of decode/speculation/verifiers.py's `VERIFIERS`."""
ORDERS = ("left_to_right", "blockwise", "random", "confidence")
"""The orders in which masked positions are filled: decode/drafters/diffusion.py's `ORDERS`."""

EXPORTS = ("dflash", "speculators", "dspark", "transformers", "gguf", "custom_generate", "draft_model")
"""Formats of other engines: decode/exporting/registry.py's `FORMATS`, and the ordinary language model that an autoregressive drafter is."""


def written(name: str, options: Mapping[str, str]) -> str:
    """A method as it is written, `name:key=value:…`."""
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])
