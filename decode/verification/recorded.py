"""What is recorded of decoding: requests, their rounds, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from decode.engine.request import RequestRunner
from decode.speculation.rounds import Round
from decode.speculation.tree import path_to
from decode.speculation.verifiers import Outcome
from decode.verification.batches import Asked


@dataclass
class RandomCall:
    """One random operator. `drafting`: the request whose proposal asked for it, if one did."""

    name: str
    again: Callable[[torch.Generator], Tensor]
    generator: torch.Generator | None
    values: Tensor
    drafting: RecordedRequest | None


@dataclass(eq=False)
class RecordedRequest:
    """One request. pieces: those of its text where it is streamed. captured: by that engine."""

    number: int
    asked: Asked
    runner: RequestRunner
    pieces: list[str] | None
    rounds: list[RecordedRound] = field(default_factory=list)
    generator: torch.Generator | None = None
    captured: bool = False


@dataclass(eq=False)
class RecordedRound:
    """One round of one request, after `text`. received: node (0 = the root) → the distribution (V,)
    that the rule, or the draw at that node, received. chosen: node → the target's own token there,
    of rounds without a rule. drafting, verifying: the random numbers of the round."""

    request: RecordedRequest
    text: list[int]
    round: InitVar[Round]
    drafting: list[Tensor]
    received: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, int] = field(default_factory=dict)
    verifying: list[Tensor] = field(default_factory=list)
    end: Outcome = Outcome([], 0, [])

    def __post_init__(self, round: Round) -> None:
        self.logits_MV = round.logits_MV.clone()  # overwritten
        self.proposal, self.verifier = round.proposal, round.verifier
        self.sampling, self.by_rule = round.sampling, round.by_rule

    @property
    def place(self) -> dict[str, int]:
        return {"request": self.request.number, "round": self.request.rounds.index(self)}

    def path(self, node: int) -> list[int]:
        """The drafts on the path to a node."""
        return path_to(self.proposal.tree, node)

    def text_at(self, node: int) -> list[int]:
        """The text up to a node, with the drafts on its path."""
        return [*self.text, *(int(self.proposal.tokens_K[i]) for i in self.path(node))]
