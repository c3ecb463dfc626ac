"""What drafts in a captured round: tensor code for all requests at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.captured.state import RowState
from decode.speculation.drafts import Drafts
from decode.speculation.tree import node_depths, parent_rows
from specalign.lm.model import TargetOutput


class Unsupported(Exception):
    """The captured engine can't run this; the message says why."""


class Draft(NamedTuple):
    """N drafted tokens of each request.

    above_BN: the row of each token's parent, 0 = the root; a parent stands before its children.
    depth_BN: from 1; 0 = the node does not count. q_BNV: None for chosen tokens. drawn_B: how many
    uniform numbers they used. forest: the parents of every row, where they are fixed.
    """

    tokens_BN: Tensor
    above_BN: Tensor
    depth_BN: Tensor
    q_BNV: Tensor | None = None
    drawn_B: Tensor | None = None
    forest: tuple[int, ...] | None = None
    without_replacement: bool = False
    steps_BN: Tensor | None = None

    @property
    def live_BN(self) -> Tensor:
        return self.depth_BN > 0

    def see_BMM(self) -> Tensor:
        """Which nodes each node sees: itself and its ancestors, the root first."""
        batch, nodes = self.tokens_BN.shape
        see_BMM = torch.eye(nodes + 1, dtype=torch.bool, device=self.tokens_BN.device)
        see_BMM = see_BMM.expand(batch, -1, -1).clone()
        rows_B = torch.arange(batch, device=see_BMM.device)
        for i in range(nodes):
            see_BMM[:, i + 1] |= see_BMM[rows_B, self.above_BN[:, i]]
        return see_BMM

    def as_drafts(self) -> Drafts:
        """For the rules of verification. Tokens that do not count get a q that no rule accepts."""
        assert self.q_BNV is not None and self.forest is not None
        q_BNV = self.q_BNV.masked_fill(~self.live_BN[..., None], torch.nan)
        forest = (self.forest,) * len(self.tokens_BN)
        return Drafts(self.tokens_BN, forest, q_BNV, self.steps_BN, self.without_replacement)


class Observation(NamedTuple):
    """A forward pass of the target over a round's rows. path_BM: those of the accepted path first,
    which ends at row `end_B`."""

    hidden_BMD: Tensor
    taps_BMFD: Tensor | None
    path_BM: Tensor
    end_B: Tensor


class Drafting:
    """Drafts for the rows of a captured engine; this class: plain decoding.

    nodes: N. chains: its drafts never branch. taps: the target's layers that `observe` needs.
    layers: its network's.
    """

    nodes: int = 0
    chains: bool = True
    taps: tuple[int, ...] = ()
    layers: Sequence[nn.Module] = ()

    @property
    def catches_up(self) -> bool:
        """Whether it has to read what rounds without drafts committed."""
        return False

    def check(self, longest: int) -> None:
        """Raises Unsupported where it can't draft for texts of this length."""

    def allocate(self, state: RowState) -> None:
        """Allocate memory for all rows."""

    def clear(self, row: int) -> None:
        """A request is about to begin in this row."""

    def read_prompt(self, row: int, output: TargetOutput) -> None:
        """A forward pass over (more of) the prompt of a row; not captured."""

    def start(self, row: int, tokens: list[int]) -> None:
        """The prompt of a row and its first token are known; not captured."""

    def catch_up(self, state: RowState, end: int, count: int) -> None:
        """`count` rounds did not draft, and each of them committed one token; not captured."""

    def draft(self, state: RowState, end: int) -> Draft:
        """Draft for all rows; entries 0 … end − 1 of the cache are read."""
        none_B0 = state.numbers_FB.new_zeros(state.shape.rows, 0)
        return Draft(none_B0, none_B0, none_B0)

    def observe(self, state: RowState, seen: Observation) -> None:
        """The accepted path is about to be committed; the counters are those before it."""


class WrappingDrafting(Drafting):
    """Around another drafter. By itself: rounds in which that one only observes."""

    def __init__(self, inner: Drafting) -> None:
        self.inner, self.taps = inner, inner.taps

    @property
    def catches_up(self) -> bool:
        return self.inner.catches_up

    def check(self, longest: int) -> None:
        self.inner.check(longest)

    def allocate(self, state: RowState) -> None:
        self.inner.allocate(state)

    def clear(self, row: int) -> None:
        self.inner.clear(row)

    def read_prompt(self, row: int, output: TargetOutput) -> None:
        self.inner.read_prompt(row, output)

    def start(self, row: int, tokens: list[int]) -> None:
        self.inner.start(row, tokens)

    def catch_up(self, state: RowState, end: int, count: int) -> None:
        self.inner.catch_up(state, end, count)

    def observe(self, state: RowState, seen: Observation) -> None:
        self.inner.observe(state, seen)


def room_of(state: RowState, most: int) -> Tensor:
    """How many levels of drafts count, (B,)."""
    return state.room_B.clamp(max=most) * state.counter("active")


def fixed_shape(parents: tuple[int, ...], room_B: Tensor) -> tuple[Tensor, Tensor]:
    """Parents' rows and depths (B, N) of a tree of fixed shape; nodes deeper than there is room do
    not count."""
    rows = len(room_B)
    above_BN = parent_rows((parents,), len(parents), room_B.device).expand(rows, -1)
    depth_N = node_depths(parents, room_B.device)
    return above_BN, torch.where(depth_N <= room_B[:, None], depth_N, 0)
