"""Copies of what followed the text's own ending, in a captured round."""

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.captured.drafting import Draft, Drafting, WrappingDrafting, fixed_shape, room_of
from decode.captured.state import RowState
from decode.proposers.lookup import JOINING, LONGEST, SHORTEST
from decode.speculation.tree import chain


def find_copy(state: RowState, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """The tokens (B, count) after the last earlier occurrence of each text's longest ending, of at
    most `longest` tokens, and the length of that match. Past the text the copy is copied."""
    text_BS, length_B1 = state.text_BS, state.counter("length")[:, None] + 1
    place_S = torch.arange(text_BS.shape[1], device=text_BS.device)
    tail_BC = state.last_tokens(longest)
    same_BS = (place_S > 0) & (place_S < length_B1)
    agreed_BS = torch.zeros_like(text_BS)
    for i in range(longest):
        earlier_BS = text_BS.roll(i + 1, dims=1)
        same_BS = same_BS & (place_S > i) & (earlier_BS == tail_BC[:, longest - 1 - i, None])
        agreed_BS = agreed_BS + same_BS
    best_B1 = (agreed_BS * text_BS.shape[1] + place_S).argmax(1, keepdim=True)
    agreed_B = agreed_BS.gather(1, best_B1)[:, 0]
    start_B1 = torch.minimum(best_B1, length_B1 - 1)
    offset_BC = torch.arange(count, device=text_BS.device) % (length_B1 - start_B1)
    return text_BS.gather(1, start_B1 + offset_BC), agreed_B


class Copied(WrappingDrafting):
    """Base of copies next to another drafter's drafts."""

    def __init__(
        self, inner: Drafting, copy_tokens: int, shortest: int = JOINING, longest: int = LONGEST
    ) -> None:
        super().__init__(inner)
        self.layers = inner.layers
        self.copy_tokens, self.shortest, self.longest = copy_tokens, shortest, longest


class CopiedBranch(Copied):
    """Chosen drafts and a copy as one more branch. A copied token that another node drafts already
    does not count, and the copy continues below that node."""

    def __init__(self, inner: Drafting, *options: int) -> None:
        super().__init__(inner, *options)
        self.nodes, self.chains = inner.nodes + self.copy_tokens, not inner.nodes

    def draft(self, state: RowState, end: int) -> Draft:
        draft = self.inner.draft(state, end)
        copy_BC, agreed_B = find_copy(state, self.copy_tokens, self.longest)
        room_B = room_of(state, self.copy_tokens) * (agreed_B >= self.shortest)
        above_BC, depth_BC = fixed_shape(chain(self.copy_tokens), room_B)
        if self.chains:
            return Draft(copy_BC, above_BC, depth_BC)
        row_B = torch.zeros_like(room_B)
        above, depth = [], []
        for i in range(self.copy_tokens):
            same_BN = (draft.above_BN == row_B[:, None]) & (
                draft.tokens_BN == copy_BC[:, i : i + 1]
            )
            same_BN = same_BN & draft.live_BN
            found_B = same_BN.any(1)
            above.append(row_B)
            depth.append(torch.where(found_B, 0, depth_BC[:, i]))
            row_B = torch.where(found_B, same_BN.int().argmax(1) + 1, self.inner.nodes + i + 1)
        return Draft(
            torch.cat((draft.tokens_BN, copy_BC), 1),
            torch.cat((draft.above_BN, torch.stack(above, 1)), 1),
            torch.cat((draft.depth_BN, torch.stack(depth, 1)), 1),
        )


class CopiedChain(Copied):
    """Drawn drafts in a row, or a copy in their place: the text decides, before anything is drawn.
    A copied token is one drawn from a q with all its mass on it."""

    def __init__(self, inner: Drafting, copy_tokens: int) -> None:
        super().__init__(inner, copy_tokens, SHORTEST)
        self.nodes = max(inner.nodes, copy_tokens)

    def draft(self, state: RowState, end: int) -> Draft:
        draft = self.inner.draft(state, end)
        assert draft.q_BNV is not None and draft.drawn_B is not None
        copy_BN, agreed_B = find_copy(state, self.nodes, self.longest)
        copies_B1 = (agreed_B >= self.shortest)[:, None]
        room_B = room_of(state, self.copy_tokens) * copies_B1[:, 0]
        above_BN, depth_BN = fixed_shape(chain(self.nodes), room_B)
        more = self.nodes - self.inner.nodes
        q_BNV = F.pad(draft.q_BNV, (0, 0, 0, more))
        one_hot = torch.zeros_like(q_BNV).scatter(2, copy_BN[..., None], 1.0)
        q_BNV = torch.where(copies_B1[..., None], one_hot, q_BNV)
        return Draft(
            torch.where(copies_B1, copy_BN, F.pad(draft.tokens_BN, (0, more))),
            above_BN,
            torch.where(copies_B1, depth_BN, F.pad(draft.depth_BN, (0, more))),
            q_BNV,
            draft.drawn_B,
            chain(self.nodes),
        )
