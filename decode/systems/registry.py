"""Every system: its name, source, drafters and options, as a class whose fields are the options. No
torch: commands and reports import this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

from decode.speculation.settings import MIN_TEMPERATURE, MOST_NODES
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.schema import JsonObject

PLAIN, LOOKUP, DRAFTER, COMBINED = "plain", "lookup", "drafter", "combined"
MAIN = DRAFTER  # verdicts begin with it and tables print it in bold
TITLES = {LOOKUP: "Prompt lookup", DRAFTER: "The drafter", COMBINED: "The drafter with lookup"}
"""What sentences call a system; others go by their names."""
LOSSY = "lossy"  # prefix of the verifiers that change the output's distribution

VERIFIERS = (
    "greedy", "point_mass", "self_selection", "token", "block", "recursive", "k_seq", "traversal", "hybrid", "gumbel",
    "lossy_typical", "lossy_top_beta",
)  # fmt: skip
"""The keys of `decode.speculation.verifiers.VERIFIERS`."""
ORDERS = ("left_to_right", "random", "confidence")
"""The order in which masked positions are filled (decode/proposers/diffusion.py)."""

ROLES = ("block", "variable_prefix", "diffusion", "autoregressive")
BLOCK, VARIABLE_PREFIX, DIFFUSION, AUTOREGRESSIVE = ROLES
"""The kinds of drafters: block, D²SD's second one, standalone diffusion, causal language model."""
ANY = "any"
"""The first drafter given, whatever its kind."""

_NOUNS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Limits:
    """The values that an option takes. A default of None allows None too, written `none`."""

    kind: type
    default: Any = None
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def check(self, key: str, value: Any) -> None:
        """Raises UserError for a value out of range."""
        if value is None and self.default is None:
            return
        if self.choices and value not in self.choices:
            raise UserError(f"{key}={value!r} is unknown{nearest(str(value), self.choices)}")
        inside = isinstance(value, int | float) and self.least <= value <= self.most
        if self.kind in (int, float) and not inside:
            raise UserError(f"{key}={value!r}: must be a number, {self.least:g} to {self.most:g}")

    def parse(self, key: str, text: str) -> Any:
        """The value that a text stands for. Raises UserError for a text of another kind."""
        if text == "none" and self.default is None:
            return None
        try:
            return {"true": True, "false": False}[text] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            raise UserError(f"{key}={text!r}: must be {_NOUNS[self.kind]}") from None


def option(default: Any, kind: type, **limits: Any) -> Any:
    return field(default=default, metadata={"limits": Limits(kind, default, **limits)})


def count_option(default: int | None = None, least: int = 1) -> Any:
    """A number of drafts, nodes, steps, …. For `draft_tokens` None means the drafter's block size,
    for `tree_nodes` 0 means a chain."""
    return option(default, int, least=least, most=MOST_NODES)


SYSTEMS: dict[str, type[System]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class System:
    """A way to decode. A subclass declares one, its docstring being its line in the help, with the
    kinds of drafters that it needs (or `ANY`), the option values that `--tune` tries, and whether
    `all` includes it."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    in_all: ClassVar[bool]
    grid: ClassVar[Mapping[str, tuple[int, ...]]]
    drafts: ClassVar[bool] = False
    own_verifier: ClassVar[str] = "auto"

    def __init_subclass__(
        cls,
        name: str = "",
        needs: tuple[str, ...] = (),
        in_all: bool = True,
        grid: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        cls.name, cls.needs, cls.grid, cls.in_all = name, needs, grid or {}, in_all
        dataclass(frozen=True, kw_only=True)(cls)
        if name:
            SYSTEMS[name] = cls

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            self.limits()[name].check(name, value)

    @classmethod
    def limits(cls) -> dict[str, Limits]:
        return {f.name: f.metadata["limits"] for f in fields(cls)}

    @property
    def given(self) -> JsonObject:
        """The options that differ from their defaults."""
        return {k: v for k, v in vars(self).items() if v != self.limits()[k].default}

    @property
    def verifier_name(self) -> str:
        return getattr(self, "verifier", None) or self.own_verifier

    @property
    def branches(self) -> bool:
        return bool(getattr(self, "tree_nodes", 0))


class DraftingSystem(System):
    """`copying`: where the text repeats itself, copy instead of drafting. `verifier` None: the
    system's own."""

    drafts = True
    verifier: str | None = option(None, str, choices=("auto", *VERIFIERS))
    copying: bool = option(False, bool)

    @property
    def own_options(self) -> JsonObject:
        """The options that not every system has."""
        return {k: v for k, v in vars(self).items() if k not in DraftingSystem.limits()}


class CorpusSystem(DraftingSystem):
    """A system that may read a file of texts."""

    corpus: str | None = option(None, str)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corpus is not None and not expand_path(self.corpus).is_file():
            raise UserError(f"corpus={self.corpus!r}: no such file")


class SizedSystem(DraftingSystem):
    """A system whose drafter was trained with a block size: the draft tokens if None."""

    draft_tokens: int | None = count_option()


_TO_16 = {"draft_tokens": (2, 4, 8, 16)}
_TO_8 = {"draft_tokens": (2, 4, 8)}
_TO_4 = {"draft_tokens": (1, 2, 4)}
_FROM_1 = {"draft_tokens": (1, 2, 4, 8)}
_NODES = {"tree_nodes": (3, 5, 8, 16)}
_STEPS = {**_TO_8, "steps": (1, 2)}
_CANDIDATES = {**_TO_8, "candidates": (2, 4, 8)}
_BOUNDARIES = {"boundaries": (1, 2, 4)}
_ROUNDS = {**_TO_8, "rounds": (1, 2)}


class Plain(System, name=PLAIN, in_all=False):
    """plain decoding: one target forward per token"""


class GivenDrafter(DraftingSystem, name=DRAFTER, needs=(ANY,), in_all=False):
    """the first drafter given, whatever its kind"""

    draft_tokens: int | None = count_option()
    tree_nodes: int | None = count_option(None, least=0)  # None: by temperature
    steps: int = count_option(1)
    order: str = option(ORDERS[0], str, choices=ORDERS)


class Combined(GivenDrafter, name=COMBINED, needs=(ANY,), in_all=False):
    """the same drafter plus prompt lookup where the text repeats itself"""

    copying: bool = option(True, bool)


class Lookup(DraftingSystem, name=LOOKUP, grid=_TO_16):
    """prompt lookup: copies what followed the last occurrence of the text's ending"""

    draft_tokens: int = count_option(8)
    longest: int = count_option(3)


class Retrieval(CorpusSystem, name="retrieval", grid=_TO_16):
    """copies what most often followed the longest earlier occurrence of the text's ending, in the
    text or a corpus (arXiv 2411.10666, 2311.08252)"""

    draft_tokens: int = count_option(8)
    shortest: int = count_option(2)
    tree_nodes: int = count_option(0, least=0)


class Autoregressive(DraftingSystem, name=AUTOREGRESSIVE, needs=(AUTOREGRESSIVE,), grid=_FROM_1):
    """speculative decoding with a smaller causal language model (arXiv 2211.17192, 2302.01318)"""

    draft_tokens: int = count_option(4)


class BlockSystem(SizedSystem, name=BLOCK, needs=(BLOCK,), grid=_TO_16):
    """a chain from the block drafter; its confidence head can stop it early"""

    confidence: float = option(0.0, float, least=0, most=1)


class BlockTree(SizedSystem, name="block_tree", needs=(BLOCK,), grid=_NODES):
    """a tree of the block drafter's most probable paths"""

    tree_nodes: int = count_option(5, least=0)


class SpecDiff(SizedSystem, name="specdiff", needs=(DIFFUSION,), grid=_STEPS):
    """SpecDiff: masks appended to the text, unmasked in a few steps (arXiv 2408.05636)"""

    steps: int = count_option(1)
    order: str = option(ORDERS[0], str, choices=ORDERS)


class SpecDiff2(SizedSystem, name="specdiff2", needs=(DIFFUSION,), grid=_CANDIDATES):
    """SpecDiff-2: several one-step drafts, of which the target's p selects one (arXiv
    2511.00606)"""

    candidates: int = count_option(8)
    draft_temperature: float | None = option(None, float, least=MIN_TEMPERATURE, most=100)
    keep_q: bool = option(False, bool)

    @property
    def verifier_name(self) -> str:
        return self.verifier or ("auto" if self.keep_q else "self_selection")

    @property
    def branches(self) -> bool:
        return self.candidates > 1


class DiffuSpec(CorpusSystem, name="diffuspec", needs=(DIFFUSION,), grid=_TO_16):
    """DiffuSpec: a path through one step's candidates that an n-gram model finds plausible (arXiv
    2510.02358)"""

    draft_tokens: int | None = count_option()


class D2SD(SizedSystem, name="d2sd", needs=(BLOCK, VARIABLE_PREFIX), grid=_BOUNDARIES):
    """D²SD: a second block drafter continues after the first one's likeliest mistakes (arXiv
    2606.04446)"""

    boundaries: int = count_option(4)
    branches = True


class Hierarchical(DraftingSystem, name="hierarchical", needs=(AUTOREGRESSIVE,), grid=_TO_8):
    """a smaller causal model whose own decoding is sped up by a cheaper drafter (arXiv
    2510.19705)"""

    draft_tokens: int = count_option(4, least=2)  # at 1 the inner one drafts nothing
    inner: str = option("retrieval", str, choices=("lookup", "retrieval"))


class Double(CorpusSystem, name="double", needs=(AUTOREGRESSIVE,), grid=_TO_4):
    """Double: retrieval for drafter and target, drafting while the target verifies (arXiv
    2601.05524)"""

    draft_tokens: int = count_option(4)
    branches = True


class Duo(DraftingSystem, name="duo", needs=(AUTOREGRESSIVE,), grid=_TO_8):
    """DuoDecoding: the smaller model drafts ahead on its own device; the draft length follows
    measured costs (arXiv 2503.00784)"""

    controller: str = option("cost", str, choices=("fixed", "cost"))
    draft_tokens: int = count_option(8)
    device: str | None = option(None, str)


class Tolerator(SizedSystem, name="tolerator", needs=(DIFFUSION,), grid=_ROUNDS):
    """Tolerator: drafts are filled in, then partly masked again and refined (arXiv 2510.05090)"""

    steps: int = count_option(1)
    rounds: int = count_option(2, least=0)


class SpecDec(SizedSystem, name="specdec_lossy", needs=(DIFFUSION,), grid=_TO_8):
    """SpecDec's relaxed verification of a diffusion draft: LOSSY (arXiv 2203.16487)"""

    own_verifier = "lossy_top_beta"
