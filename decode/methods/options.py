"""How the given drafter drafts, where a method's name does not say it: options of `decode.load` and of the commands. No torch,
so that a command refuses a typing mistake at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from align.common.errors import UserError, nearest
from decode.method_names import ORDERS, VERIFIERS


@dataclass(frozen=True)
class DraftOptions:
    """What each means: `decode.methods.load.load`. Every system that has a gamma reads `draft_tokens`; the systems `drafter` and
    `combined` read the others.

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
        """The options among those of a parsed command line, which they are taken out of."""
        return cls(**{f.name: typed.pop(f.name) for f in fields(cls) if f.name in typed})

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not at their defaults, in the order of the fields."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def of_a_method(self) -> dict[str, Any]:
        """Those given that are written as options of a method."""
        others = ("draft_tokens", "drafter_tokenizer")
        return {in_methods(key): value for key, value in self.given.items() if key not in others}


def in_methods(key: str) -> str:
    """What methods call an option of `DraftOptions`."""
    return {"draft_tokens": "gamma", "tree_nodes": "nodes"}.get(key, key)
