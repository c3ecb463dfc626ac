"""How the drafter given is to draft, where that is not written behind a method's name: the options of `decode.load` and of the
commands. No torch, so that a command refuses what is mistyped at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from align.common.errors import UserError, nearest
from decode.method_names import ORDERS, VERIFIERS


@dataclass(frozen=True)
class DraftOptions:
    """`verifier`, `tree_nodes`, `steps`, `order` and `copying` are read by the systems `drafter` and `combined`, `draft_tokens` by
    every system that has a gamma. What they mean: `decode.methods.load.load`.

    Raises:
        UserError: a number out of its range, an unknown order or verifier.
    """

    verifier: str = "auto"
    draft_tokens: int | None = None
    tree_nodes: int | None = None
    steps: int = 1
    order: str = ORDERS[0]
    copying: bool = False
    drafter_tokenizer: str | None = None
    """Of a standalone drafter whose vocabulary is not the target's."""

    def __post_init__(self) -> None:
        for name, value in (("draft_tokens", self.draft_tokens), ("steps", self.steps)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value!r}: must be at least 1")
        if self.tree_nodes is not None:
            from decode.speculation.tree import MOST_NODES

            if not 0 <= self.tree_nodes <= MOST_NODES:
                raise UserError(f"tree_nodes={self.tree_nodes!r}: must be 0 (a chain) to {MOST_NODES}")
        if self.order not in ORDERS:
            raise UserError(f"order={self.order!r} is unknown{nearest(self.order, ORDERS)}")
        if self.verifier != "auto" and self.verifier not in VERIFIERS:
            raise UserError(
                f"unknown verifier {self.verifier!r}{nearest(self.verifier, [*VERIFIERS, 'auto'])}"
            )

    @classmethod
    def out_of(cls, typed: dict[str, Any]) -> DraftOptions:
        """Those of a parsed command line, which is left with the others."""
        return cls(**{f.name: typed.pop(f.name) for f in fields(cls) if f.name in typed})

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not at their defaults, in the order in which they stand here."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def of_a_method(self) -> dict[str, Any]:
        """Those given, as options of a method."""
        names = {
            "tree_nodes": "nodes",
            "steps": "steps",
            "order": "order",
            "verifier": "verifier",
            "copying": "copying",
        }
        return {names[key]: value for key, value in self.given.items() if key in names}
