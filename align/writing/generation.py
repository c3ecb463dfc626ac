"""Generates a batch of prompts and answers with the target, one token per row and step, in one
preallocated cache.

Given tokens (a prompt, the turn between prompt and answer) are fed, the others are drawn. Finished
rows leave the batch once enough of them have finished.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from align.writing.rows import Plan, Row, Source, batch_seed
from align.writing.template import common_start
from specalign.lm.cache import KVCache, Slots
from specalign.lm.model import Target

_BLOCK = 128  # vocabulary entries summed together in the first level of the inverse CDF
_LOGITS_AT_ONCE_CPU = 1 << 19  # 2 MB, so that every pass but the first stays in the CPU cache
_LOGITS_AT_ONCE_GPU = 1 << 26


def draw(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Sample one token a row by inverse CDF; temperature 0 takes the argmax. Returns (B,) int64.

    Gumbel noise would draw B·V random numbers a step, which takes longer than a small model; here
    it is one uniform a row. `temperature_B` and `uniform_B` are on the CPU. Overwrites `logits_BV`.
    """
    limit = _LOGITS_AT_ONCE_CPU if logits_BV.device.type == "cpu" else _LOGITS_AT_ONCE_GPU
    rows = max(1, limit // logits_BV.shape[-1])
    parts = zip(
        logits_BV.split(rows), temperature_B.split(rows), uniform_B.split(rows), strict=True
    )
    return torch.cat([_draw_rows(z, t, u, top_p, top_k) for z, t, u in parts])


def _draw_rows(
    z: Tensor, temperature_B: Tensor, uniform_B: Tensor, top_p: float, top_k: int
) -> Tensor:
    best = z.argmax(dim=-1)
    if not bool((temperature_B > 0).any()):
        return best
    temperature_B = temperature_B.to(z.device)
    z.sub_(z.gather(-1, best[:, None])).div_(temperature_B.clamp_min(1e-6)[:, None])
    if top_k:
        kth = z.topk(min(top_k, z.shape[-1]), dim=-1).values[:, -1:]
        z.masked_fill_(z < kth, -torch.inf)
    z.exp_()
    if top_p < 1.0:
        ordered, index = z.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(before >= top_p * ordered.sum(-1, True), 0.0)
        z = torch.zeros_like(z).scatter(-1, index, kept)
    pad = -z.shape[-1] % _BLOCK
    if pad:
        z = torch.nn.functional.pad(z, (0, pad))
    blocks = z.view(z.shape[0], -1, _BLOCK)
    upto = blocks.sum(-1).double().cumsum(-1)
    aim = uniform_B.to(z.device).double()[:, None] * upto[:, -1:]
    block = torch.searchsorted(upto, aim, right=True).clamp_max(upto.shape[1] - 1)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double()
    below = torch.where(block > 0, upto.gather(1, (block - 1).clamp_min(0)), torch.zeros_like(aim))
    place = torch.searchsorted(inside.cumsum(-1), (aim - below).clamp_min(0.0), right=True)
    # rounding may point past the block's last possible token: take that token
    last = (inside > 0).to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
    drawn = (block * _BLOCK + torch.minimum(place, last))[:, 0]
    return torch.where(temperature_B > 0, drawn, best)


class Writer(Source):
    """Writes batches of a plan's rows with the target in this process."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self.target, self.plan = target, plan
        self.data = plan.recipe.data
        self.prefix = list(plan.template.prefix)
        self.capacity = min(plan.capacity, target.context_limit)

    def write(self, number: int) -> list[Row] | None:
        rows = self.plan.rows(number)
        if not rows:
            return None
        generator = torch.Generator().manual_seed(batch_seed(self.plan.recipe.seed, number))
        remaining = [row for row in rows if not row.done]
        while remaining:
            self.write_rows(remaining, generator)
            remaining = [row for row in remaining if self.plan.advance(row)]
        return rows

    def write_rows(self, rows: list[Row], generator: torch.Generator) -> None:
        """Write all rows to their ends, in place."""
        target = self.target
        shared = self._shared_start(rows)
        capacity = min(self.capacity, self._longest(rows, shared))
        cache = target.new_cache(len(rows), capacity)
        logits = self._start(rows, shared, cache)
        active = torch.arange(len(rows))
        alive = list(rows)
        lengths = torch.tensor([len(row.tokens) for row in rows])
        uniforms = torch.empty(len(rows), dtype=torch.float32)
        while True:
            uniforms.uniform_(generator=generator)
            tokens = self._choose(alive, logits, uniforms[active])
            keep = [i for i, row in enumerate(alive) if not row.done]
            if not keep:
                return
            if len(keep) <= 0.8 * len(alive):
                index = torch.tensor(keep)
                cache.select(index)
                alive = [alive[i] for i in keep]
                active, lengths, tokens = (t[index] for t in (active, lengths, tokens))
            running = torch.tensor([not row.done for row in alive])
            end = int(lengths.max().clamp_max(capacity - 1)) + 1
            slots_B1 = lengths.clamp_max(capacity - 1).to(target.device)[:, None]
            rows_B1 = torch.arange(len(alive), device=target.device)[:, None]
            cache.slots = Slots(rows_B1, slots_B1, end)
            reach = torch.arange(end, device=target.device) <= slots_B1
            output = target.forward(
                tokens.to(target.device)[:, None],
                cache=cache,
                positions_BL=slots_B1,
                mask=reach[:, None, None],
            )
            lengths = lengths + running.long()
            assert output.logits_BLV is not None
            logits = output.logits_BLV[:, 0]

    def _shared_start(self, rows: Sequence[Row]) -> list[int]:
        """Tokens that all rows begin with: the prefix, or what given prompts without it share."""
        given = [row.forced for row in rows if row.forced]
        have_prefix = all(tokens[: len(self.prefix)] == self.prefix for tokens in given)
        if len(given) < len(rows) or have_prefix:
            return self.prefix
        return common_start(given)[: min(len(tokens) for tokens in given) - 1]

    def _longest(self, rows: Sequence[Row], shared: Sequence[int]) -> int:
        """Tokens of the longest row that can result."""
        if any(row.writes_prompt for row in rows):
            return self.capacity
        return max(len(row.forced) or len(shared) for row in rows) + self.data.max_answer_tokens

    def _start(self, rows: list[Row], shared: list[int], cache: KVCache) -> Tensor:
        """Put the shared tokens into every row of the cache; returns the next-token logits (B,
        V)."""
        target = self.target
        for row in rows:
            row.tokens = list(shared)
            row.forced = row.forced[len(shared) :]
            if not row.writes_prompt and not row.forced:
                row.answer_start = len(row.tokens)
        if not shared:  # all rows have tokens to feed
            return torch.zeros(len(rows), target.vocab_size, device=target.device)
        one = target.new_cache(1, len(shared))
        output = target.forward(torch.tensor([shared], device=target.device), cache=one)
        cache.fill(one)
        assert output.logits_BLV is not None
        return output.logits_BLV[:, -1].expand(len(rows), -1).clone()

    def _choose(self, rows: list[Row], logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """Extend every row by a fed or drawn token; returns the last tokens (B,)."""
        d = self.data
        temperatures = [
            r.answer_temperature if r.answer_start >= 0 else d.prompt_temperature for r in rows
        ]
        drawn_B = draw(logits_BV, torch.tensor(temperatures), uniform_B, d.top_p, d.top_k)
        for row, token in zip(rows, drawn_B.tolist(), strict=True):
            if not row.done:
                self._extend(row, token)
        return torch.tensor([row.tokens[-1] for row in rows])

    def _extend(self, row: Row, token: int) -> None:
        """Append the next token: a given one if there is one, else `token`."""
        if row.opening:
            row.tokens.append(row.opening.pop(0))
        elif row.forced:
            row.tokens.append(row.forced.pop(0))
            if not row.forced:
                row.answer_start = len(row.tokens)
                row.done = len(row.tokens) >= self.capacity
        elif row.answer_start >= 0:
            self._extend_answer(row, token)
        else:
            self._extend_prompt(row, token)

    def _extend_answer(self, row: Row, token: int) -> None:
        row.tokens.append(token)
        written = len(row.tokens) - row.answer_start
        ended = token in self.target.eos_ids
        full = written >= self.data.max_answer_tokens or len(row.tokens) >= self.capacity
        row.done = ended or full
        if ended and written == 1:
            row.drop("empty answer")

    def _extend_prompt(self, row: Row, token: int) -> None:
        template = self.plan.template
        turn = () if template.joined else template.turn  # a joined one is rendered first
        written = len(row.tokens) - len(self.prefix)
        too_long = written >= self.plan.longest_prompt
        if token in self.plan.prompt_ends and not turn:
            row.done = True
            row.prompt_ended = True
        elif token in self.plan.prompt_ends:
            row.forced = list(turn)
            row.tokens.append(row.forced.pop(0))
            if not row.forced:
                row.answer_start = len(row.tokens)
            if written == 0:
                row.drop("empty prompt")
        elif not turn and (too_long or len(row.tokens) >= self.capacity):
            row.done = True
        else:
            row.tokens.append(token)
            if too_long:
                row.drop("prompt too long")
