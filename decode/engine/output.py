"""The output of one request, with its counts and times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NEW_TOKENS = 256


class Tree(NamedTuple):
    """The draft tree of a call: every node's parent, and the accepted nodes in order."""

    parents: tuple[int, ...]
    path: list[int]


class RoundTrace(NamedTuple):
    """A round for a replay: seconds since the first token at its end, the tokens that it committed,
    how many of them were drafts, and the drafts that were rejected: of a tree, those that would
    have come next in draft order."""

    seconds: float
    committed: int
    accepted: int
    rejected: tuple[int, ...]


def list_rejected(
    tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]
) -> tuple[int, ...]:
    """The drafts after the accepted path, each time the first that was drafted there."""
    last = path[-1] if path else -1
    rejected = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last:
            rejected.append(token)
            last = node
    return tuple(rejected)


class RoundResult(NamedTuple):
    """A round of one request in the captured engine: the tokens that it committed, how many of them
    were drafts, the depth of the drafts, the accepted nodes, all drafted tokens and their
    parents."""

    tokens: list[int]
    accepted: int
    depth: int
    path: list[int]
    drafts: list[int]
    parents: tuple[int, ...]


@dataclass(repr=False)
class Generation:
    """One request's output, counts and times.

    A *call* is a verifying forward pass of the target. The prefill, which yields the first token,
    does not count.
    """

    tokens: list[int]
    """The output tokens, including EOS if reached; up to the token that completed a stop string."""
    text: str
    """The output as text, without special tokens, cut before a stop string."""
    prompt_tokens: int
    finish: str
    """eos, length (max_new_tokens), stop (a stop string), context (the target's context is full) or
    closed (a stream that was closed early)."""
    calls: int = 0
    drafted: list[int] = field(default_factory=list)
    """Drafted tokens per call; for a tree, its depth."""
    trees: list[Tree | None] = field(default_factory=list)
    """The shape of each call's drafts and the accepted path; None for a chain."""
    accepted: list[int] = field(default_factory=list)
    """Drafted tokens committed per call, none of them after an EOS, a stop string or a limit."""
    seconds: float = 0.0
    """Decoding time, excluding the prefill."""
    prefill_seconds: float = 0.0
    """Time to allocate the cache, process the prompt and choose the first token, including the
    rounds of other requests in between."""
    draft_seconds: float = 0.0
    """Part of `seconds` spent drafting. Queued GPU work counts where it is synchronized."""
    verify_seconds: float = 0.0
    """Part of `seconds` spent in target calls and verification."""
    trace: list[RoundTrace] = field(default_factory=list)
    """With `trace=True`, every round."""
    seed: int | None = None
    """None for greedy decoding. It reproduces the output unless a batch adapted drawn drafts."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "…"
        speed = f"{self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else "no speed"
        counts = f"{len(self.tokens)} tokens ({self.finish}), {self.calls} calls"
        return f"<Generation {text!r}: {counts}, τ {self.tau:.2f}, {speed}>"

    @property
    def nodes(self) -> list[int]:
        """Drafted tokens verified per call: `drafted`, unless drafts branch."""
        pairs = zip(self.drafted, self.trees, strict=True)
        return [n if tree is None else len(tree.parents) for n, tree in pairs]

    @property
    def tau(self) -> float:
        """τ: tokens committed per call, the prefill's token excluded; 0 without a call."""
        return (len(self.tokens) - 1) / self.calls if self.calls else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, the prefill's token and time excluded; 0 without a call."""
        return (len(self.tokens) - 1) / self.seconds if self.calls and self.seconds > 0 else 0.0
