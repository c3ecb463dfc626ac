"""The target writes: a batch of prompts and answers, one token a row and step, through one preallocated cache.

Every row is a small state machine: tokens that are given (a prompt, the turn between prompt and answer) are fed as
they stand, the others are drawn. Rows that have ended leave the batch as soon as enough of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from align.rows.conversation import Conversation, Message
from align.target.cache import KVCache
from align.target.model import Target

_BLOCK = 128  # vocabulary entries summed together in the first level of the inverse CDF
_ON_CPU, _ON_GPU = 1 << 19, 1 << 26  # logits that are drawn from at a time


@dataclass
class Row:
    """One sample being written.

    forced: tokens still to be fed before the answer; of a given prompt all of them, the template's too.
    opening: tokens that its written prompt still has to begin with.
    text_start: where its first user text begins in `tokens`.
    conversation: what is answered, where it is known as text. later: given messages behind the answer. turn: answers before it.
    prompt_ended: whether a written prompt that is still to be rendered came to its end.
    """

    index: int
    answer_temperature: float
    forced: list[int]
    writes_prompt: bool
    opening: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answer_start: int = -1
    done: bool = False
    broken: str = ""
    text_start: int = 0
    conversation: Conversation | None = None
    later: tuple[Message, ...] = ()
    turn: int = 0
    prompt_ended: bool = False


@dataclass(frozen=True)
class WriterSettings:
    """How rows are drawn: temperatures, nucleus and top-k limits, and the longest prompt and answer."""

    prompt_temperature: float
    top_p: float
    top_k: int
    max_prompt_tokens: int
    max_answer_tokens: int


def common_start(lists: Sequence[Sequence[int]]) -> list[int]:
    """The longest list that all of these begin with."""
    found = list[int]()
    for tokens in zip(*lists, strict=False):
        if len({*tokens}) > 1:
            break
        found.append(tokens[0])
    return found


def draw(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """One token a row by inverse CDF: a single uniform a row and two passes over V. Temperature 0 takes the argmax.

    Gumbel noise, or `torch.multinomial`, would draw B·V random numbers a step (128 × 49152: more than the model's own
    time); here the noise is B numbers, which, like the temperatures, lie on the CPU. Not decode's sampling, which computes
    in fp64 and breaks ties at the edge of top-k by token id: other sums would change the text that a seed writes. Overwrites `logits_BV`. Returns (B,) int64.
    """
    # on a CPU 2 MB at a time, so that every pass but the first stays in the cache
    most = _ON_CPU if logits_BV.device.type == "cpu" else _ON_GPU
    rows = max(1, most // logits_BV.shape[-1])
    parts = zip(logits_BV.split(rows), temperature_B.split(rows), uniform_B.split(rows), strict=True)
    return torch.cat([_draw_rows(z, t, u, top_p, top_k) for z, t, u in parts])


def _draw_rows(z: Tensor, temperature_B: Tensor, uniform_B: Tensor, top_p: float, top_k: int) -> Tensor:
    best = z.argmax(dim=-1)
    if not bool((temperature_B > 0).any()):
        return best
    temperature_B, uniform_B = temperature_B.to(z.device), uniform_B.to(z.device)
    z.sub_(z.gather(-1, best[:, None])).div_(temperature_B.clamp_min(1e-6)[:, None])
    if top_k:
        kth = z.topk(min(top_k, z.shape[-1]), dim=-1).values[:, -1:]
        z.masked_fill_(z < kth, -torch.inf)
    z.exp_()
    if top_p < 1.0:
        ordered, index = z.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        z = torch.zeros_like(z).scatter(
            -1, index, ordered.masked_fill(before >= top_p * ordered.sum(-1, True), 0.0)
        )
    pad = -z.shape[-1] % _BLOCK
    if pad:
        z = torch.nn.functional.pad(z, (0, pad))
    blocks = z.view(z.shape[0], -1, _BLOCK)
    upto = blocks.sum(-1).double().cumsum(-1)
    aim = uniform_B.double()[:, None] * upto[:, -1:]
    block = torch.searchsorted(upto, aim, right=True).clamp_max(upto.shape[1] - 1)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double()
    below = torch.where(block > 0, upto.gather(1, (block - 1).clamp_min(0)), torch.zeros_like(aim))
    place = torch.searchsorted(inside.cumsum(-1), (aim - below).clamp_min(0.0), right=True)
    # rounding may point past the block's last possible token: take that token
    last = (inside > 0).to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
    drawn = (block * _BLOCK + torch.minimum(place, last))[:, 0]
    return torch.where(temperature_B > 0, drawn, best)


class Writer:
    """Runs batches of rows to their ends.

    Args:
        target: p.
        prefix: tokens that a row without a given prompt starts with (kept in the cache once for all rows).
        turn: tokens between a written prompt and its answer; empty where the row is done behind its prompt, and for base models.
        ends: tokens that end a written prompt.
        settings: limits and temperatures.
        capacity: longest row in tokens, prefix included.
    """

    def __init__(
        self,
        target: Target,
        prefix: Sequence[int],
        turn: Sequence[int],
        ends: Collection[int],
        settings: WriterSettings,
        capacity: int,
    ) -> None:
        self.target, self.prefix, self.turn, self.settings = target, list(prefix), list(turn), settings
        # rows of different lengths go through one call, in which there is one rotary table
        self.capacity = min(capacity, target.context_limit, target.switch or capacity)
        self.ends = frozenset(ends)

    def write(
        self, rows: list[Row], generator: torch.Generator, progress: Callable[[int], None] | None = None
    ) -> None:
        """Write all rows to their ends, in place. `progress` hears how many tokens each step drew or fed."""
        target, shared = self.target, self._shared(rows)
        capacity = min(self.capacity, self._longest(rows, shared))
        cache = target.new_cache(len(rows), capacity)
        first = self._start(rows, shared, cache)
        width = len(rows)
        active = torch.arange(width)
        alive = list(rows)
        lengths = torch.tensor([len(r.tokens) for r in rows])
        uniforms = torch.empty(width, dtype=torch.float32)
        logits = first
        while True:
            uniforms.uniform_(generator=generator)
            tokens = self._choose(alive, logits, uniforms[active])
            keep = [i for i, row in enumerate(alive) if not row.done]
            if progress is not None:
                progress(len(keep))
            if not keep:
                return
            if len(keep) <= 0.8 * len(alive):
                index = torch.tensor(keep)
                cache.select(index)
                alive = [alive[i] for i in keep]
                active, lengths, tokens = active[index], lengths[index], tokens[index]
            running = torch.tensor([not r.done for r in alive])
            slots = lengths.clamp_max(capacity - 1)
            cache.slots_end = int(slots.max()) + 1
            cache.slots_B = slots.to(target.device)
            reach = torch.arange(cache.slots_end, device=target.device)[None] <= cache.slots_B[:, None]
            output = target.forward(
                tokens.to(target.device)[:, None],
                cache=cache,
                positions_BL=cache.slots_B[:, None],
                mask=reach[:, None, None],
            )
            lengths = lengths + running.long()
            assert output.logits_BLV is not None
            logits = output.logits_BLV[:, 0]

    def _shared(self, rows: Sequence[Row]) -> list[int]:
        """Tokens that all rows begin with: `prefix`, or of given prompts that do not begin with it what they share."""
        given = [row.forced for row in rows if row.forced]
        if len(given) < len(rows) or all(tokens[: len(self.prefix)] == self.prefix for tokens in given):
            return self.prefix
        shared = common_start(given)
        return shared[: min(len(tokens) for tokens in given) - 1]

    def _longest(self, rows: Sequence[Row], shared: Sequence[int]) -> int:
        """Tokens of the longest row that may come of these."""
        if any(row.writes_prompt for row in rows):
            return self.capacity
        return max(len(row.forced) or len(shared) for row in rows) + self.settings.max_answer_tokens

    def _start(self, rows: list[Row], shared: list[int], cache: KVCache) -> Tensor:
        """Put the shared tokens into every row of the cache; returns its next-token logits, (B, V)."""
        target = self.target
        for row in rows:
            row.tokens = list(shared)
            row.forced = row.forced[len(shared) :]
            if not row.writes_prompt and not row.forced:
                row.answer_start = len(row.tokens)
        if not shared:  # all rows have tokens to be fed
            return torch.zeros(len(rows), target.vocab_size, device=target.device)
        one = target.new_cache(1, len(shared))
        output = target.forward(torch.tensor([shared], device=target.device), cache=one)
        cache.fill(one)
        assert output.logits_BLV is not None
        return output.logits_BLV[:, -1].expand(len(rows), -1).clone()

    def _choose(self, rows: list[Row], logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """The next token of every row, (B,), forced or drawn; moves the rows' states on. Ended rows get a filler."""
        heat = [
            self.settings.prompt_temperature if r.answer_start < 0 else r.answer_temperature for r in rows
        ]
        drawn = draw(
            logits_BV, torch.tensor(heat), uniform_B, self.settings.top_p, self.settings.top_k
        ).tolist()
        for row, token in zip(rows, drawn, strict=True):
            if not row.done:
                self._step(row, token)
        return torch.tensor([r.tokens[-1] for r in rows])

    def _step(self, row: Row, token: int) -> None:
        if row.opening:
            row.tokens.append(row.opening.pop(0))
            return
        if row.forced:
            row.tokens.append(row.forced.pop(0))
            if not row.forced:
                row.answer_start = len(row.tokens)
                row.done = len(row.tokens) >= self.capacity
            return
        if row.answer_start >= 0:  # the answer
            row.tokens.append(token)
            written = len(row.tokens) - row.answer_start
            if (
                token in self.target.eos_ids
                or written >= self.settings.max_answer_tokens
                or len(row.tokens) >= self.capacity
            ):
                row.done = True
                if written == 1 and token in self.target.eos_ids:
                    row.broken = "empty answer"
            return
        written = len(row.tokens) - len(self.prefix)
        if token in self.ends and not self.turn:
            row.done = row.prompt_ended = True
        elif token in self.ends:
            row.forced = list(self.turn)
            row.tokens.append(row.forced.pop(0))
            if not row.forced:
                row.answer_start = len(row.tokens)
            if written == 0:
                row.done, row.broken = True, "empty prompt"
        elif not self.turn and (
            written >= self.settings.max_prompt_tokens or len(row.tokens) >= self.capacity
        ):
            row.done = True
        elif written >= self.settings.max_prompt_tokens:
            row.done, row.broken = True, "prompt too long"
            row.tokens.append(token)
        else:
            row.tokens.append(token)
