"""What was found of one export, and how many drafts were accepted: of outputs decoded here, or as a server's metrics say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch

from align.common.text import plural, short
from align.target.model import Target
from decode.drafters.base import Drafter
from decode.engine.decoder import Decoder
from decode.exporting.serving import Snippet

FILES_WRONG, ENGINE_DIFFERS = 1, 3
"""Exit codes of a comparison; 0 = nothing differs, 2 = wrong input."""


@dataclass
class Verdict:
    """What was found of one export.

    lines: what was compared. files_same: the files hold the drafter, by the reference reader and by every setting and tensor; None = no
    files were given to check. engine_same: the engine computes with them what the drafter does. failed: something could not be
    compared. serve: lines that serve the folder.
    """

    format: str
    folder: Path
    files_same: bool | None = True
    engine_same: bool = True
    failed: bool = False
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    serve: list[Snippet] = field(default_factory=list)

    def add(self, reader: str, same: bool, line: str, by_engine: bool = False) -> None:
        """A comparison with one reader. by_engine: a difference is the engine's, not the files'."""
        if by_engine:
            self.engine_same &= same
        else:
            self.files_same = same and self.files_same is not False
        self.lines.append(f"{reader}: {line}")

    def fail(self, why: str, cause: str = "") -> None:
        """A comparison that could not be finished. cause: what differs in the files, if that is known."""
        self.files_same = False
        self.failed |= not cause
        self.lines.append(f"{why} ({cause})" if cause else why)

    def take_files(self, other: Verdict) -> None:
        """Take over what was found of the files in another comparison."""
        self.files_same = other.files_same
        self.failed |= other.failed
        self.lines += other.lines

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self.files_same is not False and self.engine_same

    @property
    def exit_code(self) -> int:
        """0, `FILES_WRONG` (also if the comparison could not be finished) or `ENGINE_DIFFERS`."""
        if self.files_same is False:
            return FILES_WRONG
        return 0 if self.engine_same else ENGINE_DIFFERS

    @property
    def conclusion(self) -> str:
        """The last line for people."""
        if self.files_same is False:
            return "NOT COMPARED TO THE END" if self.failed else "NOT THE SAME DRAFTER"
        if self.engine_same:
            return "THE SAME DRAFTER"
        checked = "FILES NOT CHECKED" if self.files_same is None else "FILES RIGHT"
        return f"{checked}, THE ENGINE DRAFTS OTHERWISE"


@dataclass(frozen=True)
class Counts:
    """Of speculative decoding since a server started: calls, drafted and accepted tokens, accepted ones by position."""

    calls: float = 0
    drafted: float = 0
    accepted: float = 0
    at_position: tuple[float, ...] = ()

    @classmethod
    def of(cls, accepted: Sequence[Sequence[int]], drafts: int) -> Counts:
        """Of outputs: accepted tokens of each call of each; `drafts`: K, positions."""
        calls = [a for one in accepted for a in one]
        at = tuple(float(sum(a > k for a in calls)) for k in range(drafts))
        return cls(len(calls), len(calls) * drafts, sum(calls), at)

    def since(self, before: Counts) -> Counts:
        """What came after `before`; a server that was started anew has counted less."""
        pairs = zip_longest(self.at_position, before.at_position, fillvalue=0.0)
        return Counts(
            self.calls - before.calls,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(a - b for a, b in pairs),
        )

    @property
    def drafts(self) -> int:
        """How many tokens a call drafts; near a text's end fewer."""
        return max(1, len(self.at_position), math.ceil(self.drafted / self.calls) if self.calls else 1)

    @property
    def tau(self) -> float:
        """Tokens per call."""
        return 1 + self.accepted / self.calls if self.calls else 1.0

    def alike(self, other: Counts, parted: float = 0.0) -> bool:
        """Whether `other` accepts as many drafts in as many calls, in all and at each position. `parted`: the share of texts that part."""
        # Another order of sums turns near-ties of two drafts: vLLM accepted 117 19 1 for our 114 17 1; a fault in it made 39 3 into 28 3.
        # So three, or a tenth. Behind the place where two texts part each is a sample of its own: three times the root of a count.
        if min(self.calls, other.calls) <= 0:
            return self.calls == other.calls
        own, theirs = ((c.accepted, *c.at_position) for c in (self, other))
        for a, b in zip(own, theirs, strict=False):  # some servers count no positions
            in_as_many = b * self.calls / other.calls
            most = max(a, in_as_many)
            if abs(a - in_as_many) > max(3.0, 0.1 * most, 3 * math.sqrt(most * parted)):
                return False
        return True

    @property
    def line(self) -> str:
        """For people."""
        positions = " ".join(f"{a:.0f}" for a in self.at_position)
        return f"{self.calls:.0f} calls, τ {self.tau:.3f}, accepted at each position {positions}"


@dataclass(frozen=True)
class Decoded:
    """Prompts decoded greedily here.

    outputs: plain ones. accepted: of each call, by chains of the drafter's.
    """

    prompts: Sequence[list[int]]
    outputs: Sequence[list[int]]
    accepted: Sequence[list[int]]

    def as_plain(self, written: Sequence[list[int]]) -> int:
        """How many of somebody's outputs are the plain ones."""
        return sum(a == b for a, b in zip(self.outputs, written, strict=True))

    def alike(self, theirs: Sequence[list[int]], drafts: int) -> tuple[bool, str]:
        """Whether somebody accepts as much, and a line for people. `drafts`: K."""
        each = zip(self.accepted, self.outputs, strict=True)
        ours = [_without_end(accepted, len(output)) for accepted, output in each]
        own, other = (Counts.of(accepted, drafts) for accepted in (ours, theirs))
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        line = f"{equal} of {plural(len(theirs), 'prompt')} accepted call for call alike; ours: {own.line}, theirs: {other.line}"
        # another order of sums may turn a near-tie of two drafts; a fault turns many
        return own.alike(other) and abs(own.tau - other.tau) < 0.02 * own.tau, line


def _without_end(accepted: list[int], tokens: int) -> list[int]:
    """Accepted drafts of each call of an output of so many tokens, without an accepted end of text."""
    # Each call writes its accepted drafts and a token of p's, the prefill one of p's before them. Only an accepted end of text has none
    # of p's behind it. Those who are asked for as many tokens as the output has can't draft its last one: they take it as p's own.
    ended = sum(accepted) + len(accepted) == tokens
    return [*accepted[:-1], accepted[-1] - 1] if ended else accepted


def decoded(target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int) -> Decoded:
    """Each prompt greedily, plainly and with the drafter's chains."""
    plain, ours = Decoder(target), Decoder(target, drafter)
    outputs, calls = ([d.generate(p, max_new_tokens=max_new_tokens) for p in prompts] for d in (plain, ours))
    return Decoded(prompts, [o.tokens for o in outputs], [c.accepted for c in calls])


NEAR_TIE = "tie"


def compare_output(target: Target, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Empty where the output is plain greedy decoding's, `NEAR_TIE` where it leaves it at two tokens as good as equally probable."""
    for place, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a == b:
            continue
        if a is None or b is None:
            ended = ours if b is None else theirs
            return "" if ended[place] in target.eos_ids else f"{len(theirs)} tokens for {len(ours)}"
        if not 0 <= b < target.vocab_size:
            return f"token {short(b)} at place {place}, which the target does not have"
        logits = target.forward(torch.tensor([prompt + ours[:place]], device=target.device)).logits_BLV
        assert logits is not None
        gap = float(logits[0, -1, a] - logits[0, -1, b])
        return (
            NEAR_TIE
            if gap < NEAR
            else f"token {b} at place {place}, where {a} is more probable by a factor of {math.exp(min(gap, 50)):.3g}"
        )
    return ""


NEAR = 0.1
"""Nats between two tokens that half precision may exchange."""
