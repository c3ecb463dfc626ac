"""Every system: its name, source, drafters and options.

A system is a class whose fields are its options, with defaults and limits.
decode/systems/parsing.py reads `specdiff:gamma=16:steps=4` as an object of such a class;
decode/systems/construction.py makes its proposer. No torch: commands and reports import this
module.
"""

from __future__ import annotations

from typing import Any

from decode.speculation.settings import MOST_NODES
from decode.systems.declaration import (
    SYSTEMS as SYSTEMS,
)
from decode.systems.declaration import (
    System,
    draft_tokens_option,
    option,
    steps_option,
    tree_nodes_option,
)
from specalign.common.errors import UserError
from specalign.common.files import expand_path

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
"""`decode.proposers.diffusion.ORDERS`: in which order masked positions are filled."""
CONTROLLERS = ("fixed", "adl", "cost")
"""Draft lengths: fixed; DiffuSpec's adaptive one; the one with the most tokens per second."""

BLOCK, VARIABLE_PREFIX, DIFFUSION, AUTOREGRESSIVE = ROLES = (
    "block",
    "variable_prefix",
    "diffusion",
    "autoregressive",
)
"""The kinds of trained drafters: a block drafter, D²SD's second one, a standalone diffusion
drafter, a causal language model."""
ANY = "any"
"""In place of a kind: the first drafter given, whatever its kind."""

ALIASES = {"gamma": "draft_tokens", "nodes": "tree_nodes"}
"""Short spellings of options in method strings."""


def option_name(spelling: str) -> str:
    """An option's name, from any of its spellings."""
    return ALIASES.get(spelling, spelling)


class DraftingSystem(System):
    """`copying`: where the text repeats itself, copy instead of drafting. `verifier` None: the
    system's own."""

    drafts = True
    verifier: str | None = option(None, str, choices=("auto", *VERIFIERS))
    controller: str = option("fixed", str, choices=CONTROLLERS)
    copying: bool = option(False, bool)

    @property
    def verifier_name(self) -> str:
        return self.verifier or "auto"

    @property
    def own_options(self) -> dict[str, Any]:
        """The options that not every system has."""
        return {
            name: getattr(self, name)
            for name in self.limits()
            if name not in DraftingSystem.limits()
        }


class CorpusSystem(DraftingSystem):
    """A system that may read a file of texts."""

    corpus: str | None = option(None, str)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corpus is not None and not expand_path(self.corpus).is_file():
            raise UserError(f"corpus={self.corpus!r}: no such file")


_TO_16, _TO_8 = {"gamma": (2, 4, 8, 16)}, {"gamma": (2, 4, 8)}


class Plain(System, name=PLAIN, in_all=False):
    """plain decoding: one target forward per token"""


class GivenDrafter(DraftingSystem, name=DRAFTER, needs=(ANY,), in_all=False):
    """the first drafter given, whatever its kind"""

    draft_tokens: int | None = draft_tokens_option()
    tree_nodes: int | None = tree_nodes_option(None)  # None: by temperature
    steps: int = steps_option()
    order: str = option(ORDERS[0], str, choices=ORDERS)


class Combined(GivenDrafter, name=COMBINED, needs=(ANY,), in_all=False):
    """the same drafter, copying where the text repeats itself"""

    copying: bool = option(True, bool)


class Compiled(System, name="compiled"):
    """plain decoding through torch.compile"""


class Lookup(DraftingSystem, name=LOOKUP, grid=_TO_16):
    """prompt lookup: copies what followed the last occurrence of the text's ending"""

    draft_tokens: int = draft_tokens_option(8)
    longest: int = option(3, int, least=1)


class Retrieval(
    CorpusSystem, name="retrieval", paper="2411.10666, 2311.08252", has_variants=True, grid=_TO_16
):
    """what most often followed the longest earlier occurrence of the ending, in the text or a
    corpus"""

    draft_tokens: int = draft_tokens_option(8)
    shortest: int = option(2, int, least=1)
    tree_nodes: int = tree_nodes_option()


class Autoregressive(
    DraftingSystem,
    name=AUTOREGRESSIVE,
    paper="2211.17192, 2302.01318",
    needs=(AUTOREGRESSIVE,),
    grid={"gamma": (1, 2, 4, 8)},
):
    """speculative decoding with a smaller causal language model"""

    draft_tokens: int = draft_tokens_option(4)


class Block(DraftingSystem, name=BLOCK, needs=(BLOCK,), has_variants=True, grid=_TO_16):
    """the block drafter, a chain, which its confidence head may stop early"""

    draft_tokens: int | None = draft_tokens_option()
    confidence: float = option(0.0, float, least=0, most=1)


class BlockTree(
    DraftingSystem,
    name="block_tree",
    needs=(BLOCK,),
    has_variants=True,
    grid={"nodes": (3, 5, 8, 16)},
):
    """the block drafter, a tree of its most probable paths, or of those that pay"""

    draft_tokens: int | None = draft_tokens_option()
    tree_nodes: int = tree_nodes_option(5)
    by_cost: bool = option(False, bool)


class SpecDiff(
    DraftingSystem,
    name="specdiff",
    paper="2408.05636",
    needs=(DIFFUSION,),
    has_variants=True,
    grid={**_TO_8, "steps": (1, 2), "nodes": (0, 5)},
):
    """SpecDiff: masks after the text, unmasked in a few steps"""

    draft_tokens: int | None = draft_tokens_option()
    steps: int = steps_option()
    order: str = option(ORDERS[0], str, choices=ORDERS)
    hot_start: bool = option(False, bool)
    tree_nodes: int = tree_nodes_option()


class SpecDiff2(
    DraftingSystem,
    name="specdiff2",
    paper="2511.00606",
    needs=(DIFFUSION,),
    has_variants=True,
    grid={**_TO_8, "candidates": (2, 4, 8)},
):
    """SpecDiff-2: several one-step drafts, of which the target's p selects one"""

    draft_tokens: int | None = draft_tokens_option()
    candidates: int = option(8, int, least=1, most=MOST_NODES)
    draft_temperature: float | None = option(None, float, least=0)
    keep_q: bool = option(False, bool)

    @property
    def verifier_name(self) -> str:
        return self.verifier or ("auto" if self.keep_q else "self_selection")

    @property
    def branches(self) -> bool:
        return self.candidates > 1


class DiffuSpec(
    CorpusSystem, name="diffuspec", paper="2510.02358", needs=(DIFFUSION,), grid=_TO_16
):
    """DiffuSpec: a path through one step's candidates that an n-gram model finds plausible"""

    draft_tokens: int | None = draft_tokens_option()
    path_search: bool = option(True, bool)
    adaptive_length: bool = option(True, bool)


class D2SD(
    DraftingSystem,
    name="d2sd",
    paper="2606.04446",
    needs=(BLOCK, VARIABLE_PREFIX),
    has_variants=True,
    grid={"boundaries": (1, 2, 4)},
):
    """D²SD: a second block drafter drafts again after the first one's likeliest mistakes"""

    draft_tokens: int | None = draft_tokens_option()
    boundaries: int = option(4, int, least=1)
    keep_q: bool = option(True, bool)
    branches = True


class Hierarchical(
    DraftingSystem, name="hierarchical", paper="2510.19705", needs=(AUTOREGRESSIVE,), grid=_TO_8
):
    """a smaller causal model whose own decoding is sped up by a cheaper drafter"""

    draft_tokens: int = draft_tokens_option(
        4, least=2
    )  # at 1 the inner drafter has nothing to draft
    inner: str = option("retrieval", str, choices=("lookup", "retrieval", "diffusion"))

    @property
    def all_needs(self) -> tuple[str, ...]:
        return (*self.needs, DIFFUSION) if self.inner == "diffusion" else self.needs


class Double(
    CorpusSystem,
    name="double",
    paper="2601.05524",
    needs=(AUTOREGRESSIVE,),
    grid={"gamma": (1, 2, 4)},
):
    """Double: retrieval for drafter and target, drafting while the target verifies"""

    draft_tokens: int = draft_tokens_option(4)
    branches = True


class Duo(DraftingSystem, name="duo", paper="2503.00784", needs=(AUTOREGRESSIVE,), grid=_TO_8):
    """DuoDecoding: the smaller model drafts ahead on its own device, as long a draft as pays"""

    controller: str = option("cost", str, choices=CONTROLLERS)
    draft_tokens: int = draft_tokens_option(8)
    device: str | None = option(None, str)


class Tolerator(
    DraftingSystem,
    name="tolerator",
    paper="2510.05090",
    needs=(DIFFUSION,),
    has_variants=True,
    grid={**_TO_8, "rounds": (1, 2)},
):
    """Tolerator: drafts are filled in, then masked again in part and refined"""

    draft_tokens: int | None = draft_tokens_option()
    steps: int = steps_option()
    rounds: int = option(2, int, least=0)


class SpecDec(
    DraftingSystem, name="specdec_lossy", paper="2203.16487", needs=(DIFFUSION,), grid=_TO_8
):
    """SpecDec's relaxed verification of a diffusion draft: LOSSY"""

    draft_tokens: int | None = draft_tokens_option()

    @property
    def verifier_name(self) -> str:
        return self.verifier or "lossy_top_beta"


def list_systems() -> str:
    """Every system with its drafters and options, for `--help`."""
    lines = ["methods, each with its options after colons (specdiff:gamma=16:steps=4):"]
    for system in SYSTEMS.values():
        needed = (
            f" (needs {', '.join(system.needs)})"
            if system.needs and ANY not in system.needs
            else ""
        )
        paper = f" [arXiv {system.paper}]" if system.paper else ""
        purpose = " ".join((system.__doc__ or "").split())
        lines.append(f"  {system.name}: {purpose}{needed}{paper}")
        if issubclass(system, DraftingSystem):
            options = system().own_options.items()
            lines.append(
                f"      {', '.join(f'{key}={format_value(value)}' for key, value in options)}"
            )
    lines += [
        f"  all that draft: verifier=auto, controller={'|'.join(CONTROLLERS)} (duo: cost), "
        "copying=false (combined: true): "
        "where the text repeats itself, copy instead of drafting",
        f"  short spellings: {', '.join(f'{short} is {long}' for short, long in ALIASES.items())}",
    ]
    return "\n".join(lines)


def format_value(value: object) -> str:
    """The text of a value; empty for None."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
