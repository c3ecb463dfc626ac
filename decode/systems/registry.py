"""Every system: its name, source, drafters and options.

A system is a class whose fields are its options, with defaults and limits. decode/systems/parsing.py reads
`specdiff:gamma=16:steps=4` as an object of such a class; decode/systems/construction.py makes its proposer.
No torch: commands and reports import this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from align.common.errors import UserError, nearest
from align.common.files import expanded
from decode.speculation.settings import MOST_NODES

PLAIN, LOOKUP, DRAFTER, COMBINED = "plain", "lookup", "drafter", "combined"
MAIN = DRAFTER
"""The system that a verdict begins with and tables print in bold."""
TITLES = {LOOKUP: "Prompt lookup", DRAFTER: "The drafter", COMBINED: "The drafter with lookup"}
"""What sentences call a system; others go by their names."""
LOSSY = "lossy"
"""Prefix of the verifiers that change the output's distribution."""

VERIFIERS = (
    "greedy", "point_mass", "self_selection", "token", "block", "recursive", "k_seq", "traversal", "hybrid", "gumbel",
    "lossy_typical", "lossy_top_beta",
)  # fmt: skip
"""The keys of `decode.speculation.verifiers.VERIFIERS`."""
ORDERS = ("left_to_right", "blockwise", "random", "confidence")
"""`decode.drafters.diffusion.ORDERS`: in which order masked positions are filled."""
CONTROLLERS = ("fixed", "adl", "cost")
"""Draft lengths: fixed; DiffuSpec's adaptive one; the one with the most tokens per second."""

BLOCK, VARIABLE_PREFIX, DIFFUSION, AUTOREGRESSIVE = ROLES = (
    "block",
    "variable_prefix",
    "diffusion",
    "autoregressive",
)
"""The kinds of trained drafters: a block drafter, D²SD's second one, a standalone diffusion drafter, a causal language model."""
ANY = "any"
"""In place of a kind: the first drafter given, whatever its kind."""

ALIASES = {"gamma": "draft_tokens", "nodes": "tree_nodes"}
"""Short spellings of options in method strings."""


def option_name(spelling: str) -> str:
    """An option's name, from any of its spellings."""
    return ALIASES.get(spelling, spelling)


@dataclass(frozen=True)
class Limits:
    """The values that an option takes. `optional`: None too, written `none`."""

    kind: type
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
    return field(default=default, metadata={"limits": Limits(kind, optional=default is None, **limits)})


def draft_tokens_option(default: int | None = None, least: int = 1) -> Any:
    """γ, the drafts per round. None: as many as the drafter was trained for."""
    return option(default, int, least=least, most=MOST_NODES)


def tree_nodes_option(default: int | None = 0) -> Any:
    """Drafts verified per round, as a tree; 0: a chain."""
    return option(default, int, least=0, most=MOST_NODES)


def steps_option() -> Any:
    """Forward passes that unmask a draft."""
    return option(1, int, least=1, most=MOST_NODES)


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to decode, with its options.

    Class variables:
        paper: arXiv ids. needs: the kinds of its drafters, or `ANY`. has_variants: whether its sessions read their
        options at each draft, so that one request may switch between variants (decode/wrappers/adaptive.py).
        in_all: whether `all` includes it. grid: values that `--tune` tries.

    Raises:
        UserError: an option out of its range.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    drafts: ClassVar[bool] = False
    has_variants: ClassVar[bool] = False
    in_all: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def __post_init__(self) -> None:
        for name, limits in self.limits().items():
            limits.check(name, getattr(self, name))

    @classmethod
    def limits(cls) -> dict[str, Limits]:
        """Its options, with their limits."""
        return {f.name: f.metadata["limits"] for f in fields(cls)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {f.name: f.default for f in fields(cls)}

    @property
    def branches(self) -> bool:
        """Whether its drafts may branch."""
        return False

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The kinds of its drafters under these options."""
        return self.needs

    @property
    def corpora(self) -> tuple[str, ...]:
        """The files that it reads."""
        return ()


@dataclass(frozen=True, kw_only=True)
class DraftingSystem(System):
    """A system that drafts. `copying`: where the text repeats itself, copy instead of drafting."""

    drafts = True
    verifier: str | None = option(None, str, choices=("auto", *VERIFIERS))
    controller: str = option("fixed", str, choices=CONTROLLERS)
    copying: bool = option(False, bool)

    @property
    def default_verifier(self) -> str:
        return "auto"

    @property
    def chosen_verifier(self) -> str:
        return self.verifier or self.default_verifier


@dataclass(frozen=True, kw_only=True)
class TreeSystem(DraftingSystem):
    """A system whose drafts are trees where `tree_nodes` is above 0."""

    tree_nodes: int = tree_nodes_option()

    @property
    def branches(self) -> bool:
        return self.tree_nodes > 0


@dataclass(frozen=True, kw_only=True)
class CorpusSystem(DraftingSystem):
    """A system that may read a file of texts."""

    corpus: str | None = option(None, str)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corpus is not None and not expanded(self.corpus).is_file():
            raise UserError(f"corpus={self.corpus!r}: no such file")

    @property
    def corpora(self) -> tuple[str, ...]:
        return () if self.corpus is None else (self.corpus,)


@dataclass(frozen=True, kw_only=True)
class Plain(System):
    name = PLAIN
    description = "plain decoding: one target forward per token"
    in_all = False


@dataclass(frozen=True, kw_only=True)
class Compiled(System):
    name = "compiled"
    description = "plain decoding through torch.compile"


@dataclass(frozen=True, kw_only=True)
class GivenDrafter(DraftingSystem):
    """`tree_nodes` None: by temperature (`decode.drafters.block`)."""

    name = DRAFTER
    description = "the first drafter given, whatever its kind"
    needs = (ANY,)
    in_all = False
    draft_tokens: int | None = draft_tokens_option()
    tree_nodes: int | None = tree_nodes_option(None)
    steps: int = steps_option()
    order: str = option(ORDERS[0], str, choices=ORDERS)

    @property
    def branches(self) -> bool:
        return bool(self.tree_nodes)


@dataclass(frozen=True, kw_only=True)
class Combined(GivenDrafter):
    name = COMBINED
    description = "the same drafter, copying where the text repeats itself"
    copying: bool = option(True, bool)


@dataclass(frozen=True, kw_only=True)
class Lookup(DraftingSystem):
    name = LOOKUP
    description = "prompt lookup: copies what followed the last occurrence of the text's ending"
    grid = {"gamma": (2, 4, 8, 16)}
    draft_tokens: int = draft_tokens_option(8)
    longest: int = option(3, int, least=1)


@dataclass(frozen=True, kw_only=True)
class Retrieval(TreeSystem, CorpusSystem):
    name = "retrieval"
    description = (
        "what most often followed the longest earlier occurrence of the ending, in the text or a corpus"
    )
    paper = "2411.10666, 2311.08252"
    has_variants = True
    grid = {"gamma": (2, 4, 8, 16)}
    draft_tokens: int = draft_tokens_option(8)
    shortest: int = option(2, int, least=1)


@dataclass(frozen=True, kw_only=True)
class Autoregressive(DraftingSystem):
    name = AUTOREGRESSIVE
    description = "speculative decoding with a smaller causal language model"
    paper = "2211.17192, 2302.01318"
    needs = (AUTOREGRESSIVE,)
    grid = {"gamma": (1, 2, 4, 8)}
    draft_tokens: int = draft_tokens_option(4)


@dataclass(frozen=True, kw_only=True)
class Block(DraftingSystem):
    name = BLOCK
    description = "the block drafter, a chain, which its confidence head may stop early"
    needs = (BLOCK,)
    has_variants = True
    grid = {"gamma": (2, 4, 8, 16)}
    draft_tokens: int | None = draft_tokens_option()
    confidence: float = option(0.0, float, least=0, most=1)
    passes: int | None = option(None, int, least=1)


@dataclass(frozen=True, kw_only=True)
class BlockTree(TreeSystem):
    name = "block_tree"
    description = "the block drafter, a tree of its most probable paths, or of those that pay"
    needs = (BLOCK,)
    has_variants = True
    grid = {"nodes": (3, 5, 8, 16)}
    draft_tokens: int | None = draft_tokens_option()
    tree_nodes: int = tree_nodes_option(5)
    passes: int | None = option(None, int, least=1)
    by_cost: bool = option(False, bool)


@dataclass(frozen=True, kw_only=True)
class SpecDiff(TreeSystem):
    name = "specdiff"
    description = "SpecDiff: masks after the text, unmasked in a few steps"
    paper = "2408.05636"
    needs = (DIFFUSION,)
    has_variants = True
    grid = {"gamma": (2, 4, 8), "steps": (1, 2), "nodes": (0, 5)}
    draft_tokens: int | None = draft_tokens_option()
    steps: int = steps_option()
    order: str = option(ORDERS[0], str, choices=ORDERS)
    hot_start: bool = option(False, bool)


@dataclass(frozen=True, kw_only=True)
class SpecDiff2(DraftingSystem):
    name = "specdiff2"
    description = "SpecDiff-2: several one-step drafts, of which the target's p selects one"
    paper = "2511.00606"
    needs = (DIFFUSION,)
    has_variants = True
    grid = {"gamma": (2, 4, 8), "candidates": (2, 4, 8)}
    draft_tokens: int | None = draft_tokens_option()
    candidates: int = option(8, int, least=1, most=MOST_NODES)
    draft_temperature: float | None = option(None, float, least=0)
    keep_q: bool = option(False, bool)

    @property
    def default_verifier(self) -> str:
        return "auto" if self.keep_q else "self_selection"

    @property
    def branches(self) -> bool:
        return self.candidates > 1


@dataclass(frozen=True, kw_only=True)
class DiffuSpec(CorpusSystem):
    name = "diffuspec"
    description = "DiffuSpec: a path through one step's candidates that an n-gram model finds plausible"
    paper = "2510.02358"
    needs = (DIFFUSION,)
    grid = {"gamma": (2, 4, 8, 16)}
    draft_tokens: int | None = draft_tokens_option()
    path_search: bool = option(True, bool)
    adaptive_length: bool = option(True, bool)


@dataclass(frozen=True, kw_only=True)
class D2SD(DraftingSystem):
    name = "d2sd"
    description = "D²SD: a second block drafter drafts again after the first one's likeliest mistakes"
    paper = "2606.04446"
    needs = (BLOCK, VARIABLE_PREFIX)
    has_variants = True
    grid = {"boundaries": (1, 2, 4)}
    draft_tokens: int | None = draft_tokens_option()
    boundaries: int = option(4, int, least=1)
    keep_q: bool = option(True, bool)

    @property
    def branches(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Hierarchical(DraftingSystem):
    name = "hierarchical"
    description = "a smaller causal model whose own decoding is sped up by a cheaper drafter"
    paper = "2510.19705"
    needs = (AUTOREGRESSIVE,)
    grid = {"gamma": (2, 4, 8)}
    draft_tokens: int = draft_tokens_option(4, least=2)  # at 1 the inner drafter has nothing to draft
    inner: str = option("retrieval", str, choices=("lookup", "retrieval", "diffusion"))

    @property
    def all_needs(self) -> tuple[str, ...]:
        return (*self.needs, DIFFUSION) if self.inner == "diffusion" else self.needs


@dataclass(frozen=True, kw_only=True)
class Double(CorpusSystem):
    name = "double"
    description = "Double: retrieval for drafter and target, drafting while the target verifies"
    paper = "2601.05524"
    needs = (AUTOREGRESSIVE,)
    grid = {"gamma": (1, 2, 4)}
    draft_tokens: int = draft_tokens_option(4)

    @property
    def branches(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Duo(DraftingSystem):
    name = "duo"
    description = "DuoDecoding: the smaller model drafts ahead on its own device, as long a draft as pays"
    paper = "2503.00784"
    needs = (AUTOREGRESSIVE,)
    grid = {"gamma": (2, 4, 8)}
    controller: str = option("cost", str, choices=CONTROLLERS)
    draft_tokens: int = draft_tokens_option(8)
    device: str | None = option(None, str)


@dataclass(frozen=True, kw_only=True)
class Tolerator(DraftingSystem):
    name = "tolerator"
    description = "Tolerator: drafts are filled in, then masked again in part and refined"
    paper = "2510.05090"
    needs = (DIFFUSION,)
    has_variants = True
    grid = {"gamma": (2, 4, 8), "rounds": (1, 2)}
    draft_tokens: int | None = draft_tokens_option()
    steps: int = steps_option()
    rounds: int = option(2, int, least=0)


@dataclass(frozen=True, kw_only=True)
class SpecDec(DraftingSystem):
    name = "specdec_lossy"
    description = "SpecDec's relaxed verification of a diffusion draft: LOSSY"
    paper = "2203.16487"
    needs = (DIFFUSION,)
    grid = {"gamma": (2, 4, 8)}
    draft_tokens: int | None = draft_tokens_option()

    @property
    def default_verifier(self) -> str:
        return "lossy_top_beta"


SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        Plain, GivenDrafter, Combined, Compiled, Lookup, Retrieval, Autoregressive, Block, BlockTree, SpecDiff, SpecDiff2,
        DiffuSpec, D2SD, Hierarchical, Double, Duo, Tolerator, SpecDec,
    )
}  # fmt: skip


def list_systems() -> str:
    """Every system with its drafters and options, for `--help`."""
    lines = ["methods, each with its options after colons (specdiff:gamma=16:steps=4):"]
    common = DraftingSystem.limits()
    for system in SYSTEMS.values():
        needed = f" (needs {', '.join(system.needs)})" if system.needs and ANY not in system.needs else ""
        paper = f" [arXiv {system.paper}]" if system.paper else ""
        lines.append(f"  {system.name}: {system.description}{needed}{paper}")
        options = [f"{k}={_format_default(v)}" for k, v in system.defaults().items() if k not in common]
        if options:
            lines.append(f"      {', '.join(options)}")
    aliases = ", ".join(f"{short} is {long}" for short, long in ALIASES.items())
    controllers = "|".join(CONTROLLERS)
    lines.append(
        f"  all that draft: verifier=auto, controller={controllers} (duo: cost), copying=false (combined: true): "
        "where the text repeats itself, copy instead of drafting"
    )
    lines.append(f"  short spellings: {aliases}")
    return "\n".join(lines)


def _format_default(value: object) -> str:
    """A default as it is typed; empty where the drafter decides."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
