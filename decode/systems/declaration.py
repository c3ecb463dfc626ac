"""What a system is: a class with a name, a source, drafters, and options with defaults and limits.
No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

from decode.speculation.settings import MOST_NODES
from specalign.common.errors import UserError, nearest


@dataclass(frozen=True)
class Limits:
    """The values that an option takes. `optional`: None too, written `none`."""

    kind: type
    default: Any = None
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    optional: bool = False

    @property
    def description(self) -> str:
        """What an error says that a value must be."""
        if self.kind is bool:
            return "true or false"
        noun = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.least):
            return noun
        if math.isinf(self.most):
            return f"{noun}, at least {self.least:g}"
        return f"{noun}, {self.least:g} to {self.most:g}"

    def check(self, key: str, value: Any) -> None:
        """Raises UserError for a value out of range."""
        if value is None and self.optional:
            return
        if self.choices:
            if value not in self.choices:
                raise UserError(f"{key}={value!r} is unknown{nearest(str(value), self.choices)}")
        elif self.kind in (int, float) and not (
            isinstance(value, int | float) and self.least <= value <= self.most
        ):
            raise UserError(f"{key}={value!r}: must be {self.description}")

    def parse(self, key: str, text: str) -> Any:
        """The value that a text stands for. Raises UserError for a text of another kind."""
        if text == "none" and self.optional:
            return None
        try:
            if self.kind is bool:
                return _FLAGS[text.lower()]
            value = self.kind(text)
            if self.kind is float and not math.isfinite(value):
                raise ValueError
        except (KeyError, ValueError):
            raise UserError(f"{key}={text!r}: must be {self.description}") from None
        return value


_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def option(default: Any, kind: type, **limits: Any) -> Any:
    """A field of a system. A default of None makes it optional."""
    return field(
        default=default,
        metadata={"limits": Limits(kind, default, optional=default is None, **limits)},
    )


def draft_tokens_option(default: int | None = None, least: int = 1) -> Any:
    """γ, the drafts per round. None: as many as the drafter was trained for."""
    return option(default, int, least=least, most=MOST_NODES)


def tree_nodes_option(default: int | None = 0) -> Any:
    """Drafts verified per round, as a tree; 0: a chain."""
    return option(default, int, least=0, most=MOST_NODES)


def steps_option() -> Any:
    """Forward passes that unmask a draft."""
    return option(1, int, least=1, most=MOST_NODES)


SYSTEMS: dict[str, type[System]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class System:
    """A way to decode. A subclass declares one: its docstring is its line in the help, its fields
    are its options.

    Class arguments:
        paper: arXiv ids. needs: the kinds of its drafters, or `ANY`. has_variants: whether one request may
        switch between variants (decode/proposers/adaptive.py). in_all: whether `all` includes it. grid: values
        that `--tune` tries.

    Raises:
        UserError: an option out of its range.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    has_variants: ClassVar[bool]
    in_all: ClassVar[bool]
    grid: ClassVar[Mapping[str, tuple[int, ...]]]
    drafts: ClassVar[bool] = False

    def __init_subclass__(
        cls,
        name: str = "",
        paper: str = "",
        needs: tuple[str, ...] = (),
        has_variants: bool = False,
        in_all: bool = True,
        grid: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        cls.name, cls.paper, cls.needs, cls.grid = name, paper, needs, grid or {}
        cls.has_variants, cls.in_all = has_variants, in_all
        dataclass(frozen=True, kw_only=True)(cls)
        if name:
            SYSTEMS[name] = cls

    def __post_init__(self) -> None:
        for name, limits in self.limits().items():
            limits.check(name, getattr(self, name))

    @classmethod
    def limits(cls) -> dict[str, Limits]:
        """Its options, with their limits."""
        return {f.name: f.metadata["limits"] for f in fields(cls)}

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, o in self.limits().items()
            if getattr(self, name) != o.default
        }

    @property
    def verifier_name(self) -> str:
        return "auto"

    @property
    def branches(self) -> bool:
        """Whether its drafts may branch."""
        return bool(getattr(self, "tree_nodes", 0))

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The kinds of its drafters under these options."""
        return self.needs
