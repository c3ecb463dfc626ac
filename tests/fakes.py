"""A target that is a table, and drafters of every law: enough to run the engine thousands of times."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from decode.engine.decoder import Decoder
from decode.proposers.base import Request
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.sampling import best, draw, probs
from decode.speculation.settings import Sampling
from decode.speculation.tree import depths
from specalign.lm.model import TargetOutput
from tests.exact_distribution import chi_square, chi_square_tail


class TableCache:
    """Holds the tokens themselves in place of keys and values."""

    def __init__(self, capacity: int) -> None:
        self.slots, self._length, self.capacity = [-1] * capacity, 0, capacity

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        assert 0 <= value <= self._length, "a cache can only be rolled back"
        self._length = value

    def keep(self, start: int, offsets: list[int]) -> None:
        moved = [self.slots[start + i] for i in offsets]
        self.slots[start : start + len(moved)] = moved
        self.length = start + len(moved)

    def write(self, tokens: list[int]) -> None:
        assert self._length + len(tokens) <= len(self.slots), "written beyond the cache"
        self.slots[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)


class TableTarget:
    """Logits of the next token are a row of a table, chosen by the last two tokens IN THE CACHE."""

    def __init__(self, V: int = 4, seed: int = 0, context_limit: int = 1000) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(V + 1, V, V, generator=generator) * 1.5
        self.vocab_size, self.context_limit, self.eos_ids = V, context_limit, ()
        self.device = torch.device("cpu")
        self.spec, self.chains_only = "table", False
        self.tokenizer = None

    def new_cache(self, batch: int, capacity: int) -> Any:
        return TableCache(capacity)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        cache: Any,
        see_LL: Tensor | None = None,
        taps: tuple[int, ...] = (),
        logits: bool = True,
    ) -> TargetOutput:
        past, fresh = cache.length, tokens_BL[0].tolist()
        cache.write(fresh)
        see = torch.ones(len(fresh), len(fresh)).tril() if see_LL is None else see_LL
        paths = []
        for row in see:
            own = [past + i for i in row.nonzero()[:, 0].tolist()]
            paths.append([cache.slots[i] for i in [*range(past), *own]])
        hidden = self.hidden(paths)[None].float()
        return TargetOutput(self.head(hidden) if logits else None, hidden, None)

    def hidden(self, paths: list[list[int]]) -> Tensor:
        """What `head` needs of the texts that end at each place, (L, …)."""
        return torch.tensor([[self.vocab_size, *path][-2:] for path in paths])

    def forward_batch(
        self, tokens: Any, caches: Any, see: Any, taps: Any = ()
    ) -> list[TargetOutput]:
        each = zip(tokens, caches, see, strict=True)
        return [self.forward(t, cache=c, see_LL=s, taps=taps) for t, c, s in each]

    def head(self, hidden: Tensor) -> Tensor:
        pairs = hidden.long()
        return self.table[pairs[..., 0], pairs[..., 1]]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + t) for t in tokens)

    def law(
        self, prompt: list[int], length: int, sampling: Sampling
    ) -> dict[tuple[int, ...], float]:
        """Joint law of the next `length` tokens, processors in plain Python, one prefix at a time."""
        out: dict[tuple[int, ...], float] = {}

        def walk(prefix: list[int], mass: float) -> None:
            done = tuple(prefix[len(prompt) :])
            if len(done) == length or (done and done[-1] in self.eos_ids):
                out[done] = out.get(done, 0.0) + mass
                return
            first, second = [self.vocab_size, *prefix][-2:]
            row = self.table[first, second].tolist()
            p = plain_probs(row, sampling, set(prefix), done, self.eos_ids)
            for token, probability in enumerate(p):
                if probability > 0:
                    walk([*prefix, token], mass * probability)

        walk(list(prompt), 1.0)
        return out


def plain_probs(
    row: list[float],
    sampling: Sampling,
    seen: set[int],
    written: Sequence[int],
    ends: Sequence[int],
) -> list[float]:
    """Penalties, what is barred, temperature, top-k and min-p, by their definitions."""
    penalty = sampling.repetition_penalty
    row = [(x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(row)]
    row = [x - sampling.presence_penalty * (i in written) for i, x in enumerate(row)]
    barred = {*sampling.banned, *(ends if len(written) < sampling.min_new_tokens else ())}
    row = [-math.inf if i in barred else x for i, x in enumerate(row)]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = set(order[: sampling.top_k] if sampling.top_k else order)
    weights = [math.exp(x / sampling.temperature) if i in kept else 0.0 for i, x in enumerate(row)]
    weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


class ScriptedDrafter:
    """A drafter made of one function: (request, k) → Proposal or None."""

    name = "scripted"

    def __init__(
        self, law: Law, propose: Callable[[Request, int], Proposal | None], draft_tokens: int = 3
    ) -> None:
        self.kind, self.script, self.draft_tokens = law, propose, draft_tokens
        self.draft_nodes = 3 * draft_tokens
        self.observed: list[int] = []
        self.hidden: list[Tensor] = []
        """By call, of the positions that were kept, (kept, D)."""

    def law(self, sampling: Sampling) -> Law:
        return self.kind

    def start(self, request: Request) -> Any:
        def observe(output: TargetOutput, kept: int) -> None:
            assert output.hidden_BLD.shape[1] >= kept >= 1
            self.observed.append(kept)
            self.hidden.append(output.hidden_BLD[0, :kept])

        return SimpleNamespace(
            taps=(), observe=observe, propose=lambda k: self.script(request, k), close=lambda: None
        )


def _rows(request: Request, k: int, V: int) -> Tensor:
    """Draft logits for a prefix: anything, but the same for the same prefix."""
    seed = sum((i + 1) * t for i, t in enumerate(request.tokens[-3:])) + len(request.tokens)
    return torch.randn(k, V, generator=torch.Generator().manual_seed(seed)) * 2


def independent(request: Request, k: int) -> Proposal:
    logits = _rows(request, k, request.target.vocab_size)
    q = probs(logits, request.sampling, request.history.ahead(0, k))
    return Proposal(draw(q, request.generator), "independent", DraftProbs(q))


def pruned(request: Request, k: int) -> Proposal:
    ids = torch.arange(request.target.vocab_size - 1, 0, -1)
    before = request.history.ahead(0, k).columns(ids)
    q = probs(_rows(request, k, len(ids)), request.sampling, before)
    return Proposal(ids[draw(q, request.generator)], "independent", DraftProbs(q, ids))


def causal(request: Request, k: int) -> Proposal:
    logits, tokens, rows = _rows(request, k, request.target.vocab_size), [], []
    for i in range(k):
        row = logits[i] + (0 if not tokens else torch.roll(logits[0], int(tokens[-1])))
        rows.append(probs(row, request.sampling))
        tokens.append(draw(rows[-1], request.generator))
    return Proposal(torch.stack(tokens), "causal", DraftProbs(torch.stack(rows)))


def guessed(request: Request, k: int) -> Proposal | None:
    """Any tokens, any number, sometimes none."""
    logits = _rows(request, k, request.target.vocab_size)
    length = int(logits[0, 0].abs() * 10) % (k + 1)
    return Proposal(best(logits, Sampling())[:length], "point") if length else None


def oracle(script: list[int], wrong_every: int = 0) -> Callable[[Request, int], Proposal | None]:
    """Proposes the known output, made wrong at every so manyeth token."""

    def propose(request: Request, k: int) -> Proposal | None:
        done = len(request.tokens)
        tokens = script[done : done + k]
        if wrong_every:
            tokens = [t if (done + i) % wrong_every else (t + 1) % 3 for i, t in enumerate(tokens)]
        return Proposal(torch.tensor(tokens), "point") if tokens else None

    return propose


def branching(request: Request, k: int) -> Proposal | None:
    """Any tree of at most k levels, twins among siblings allowed."""
    seed = sum((i + 1) * t for i, t in enumerate(request.tokens[-3:])) + len(request.tokens)
    generator = torch.Generator().manual_seed(seed)
    parents: list[int] = []
    for _ in range(int(torch.randint(0, 3 * k + 1, (), generator=generator))):
        open_ = [-1, *(i for i, depth in enumerate(depths(tuple(parents))) if depth < k)]
        parents.append(open_[int(torch.randint(len(open_), (), generator=generator))])
    tokens = torch.randint(request.target.vocab_size, (len(parents),), generator=generator)
    return Proposal(tokens, "point", parents=tuple(parents)) if parents else None


def sprouting(siblings: Siblings, law: Law = "causal") -> Callable[[Request, int], Proposal | None]:
    """Trees of three nodes or four whose tokens are drawn, each given its path; the shape is settled first."""

    def propose(request: Request, k: int) -> Proposal:
        logits = _rows(request, k, request.target.vocab_size)
        shape = (-1, -1, 0, 1) if len(request.tokens) % 2 else (-1, 0, 0)
        parents = tuple(p for i, p in enumerate(shape) if depths(shape)[i] <= k)
        tokens: list[int] = []
        rows: list[Tensor] = []
        for i, parent in enumerate(parents):
            row = logits[depths(parents)[i] - 1]
            if parent >= 0:
                row = row + torch.roll(logits[0], tokens[parent])
            q = probs(row, request.sampling)
            rows.append(q)
            if siblings == "without_replacement":
                left = q.clone()
                for j in range(i):
                    if parents[j] == parent:
                        left[tokens[j]] = 0
                q = left if left.sum() > 0 else q
            tokens.append(int(draw(q, request.generator)))
        kind = siblings if len(set(parents)) < len(parents) else None
        q = DraftProbs(torch.stack(rows))
        return Proposal(torch.tensor(tokens), law, q, parents=parents, siblings=kind)

    return propose


def right_to_left(request: Request, k: int) -> Proposal:
    """Unmasked from the last position to the first, each given those right of it."""
    logits, tokens, rows = _rows(request, k, request.target.vocab_size), [], []
    for i in reversed(range(k)):
        row = logits[i] + (0 if not tokens else torch.roll(logits[0], int(tokens[0])))
        rows.insert(0, probs(row, request.sampling))
        tokens.insert(0, draw(rows[0], request.generator))
    q, steps = DraftProbs(torch.stack(rows)), torch.arange(k, 0, -1)
    return Proposal(torch.stack(tokens), "unmasked", q, steps, state_only=True)


DRAFTERS: dict[str, tuple[Law, Callable[[Request, int], Proposal | None]]] = {
    "independent": ("independent", independent),
    "pruned": ("independent", pruned),
    "causal": ("causal", causal),
    "guessed": ("point", guessed),
    "branching": ("point", branching),
    "i.i.d. siblings": ("causal", sprouting("iid")),
    "without replacement": ("causal", sprouting("without_replacement")),
    "right to left": ("unmasked", right_to_left),
}


LETTERS = [0, 1, 2, 0, 1, 2, 0]
SETTINGS = {
    "plain": Sampling(1.0),
    "sharp top-k": Sampling(0.7, top_k=2),
    "penalty": Sampling(1.3, repetition_penalty=2.5),
    "everything": Sampling(
        1.1, repetition_penalty=1.6, min_p=0.1, presence_penalty=0.9, banned=(1,), min_new_tokens=3
    ),
}


def plausible(
    found: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], runs: int
) -> bool:
    """Whether a correct engine would come so far from the law once in ten thousand times."""
    never = set(found) - {x for x, mass in law.items() if mass > 0}
    assert not never, "outcomes that the target never gives"
    return chi_square_tail(*chi_square(found, law, runs)) > 1e-4


def frequencies(
    decoder: Decoder, sampling: Sampling, runs: int, prompt: list[int], length: int
) -> Counter[tuple[int, ...]]:
    """How often each output of at most `length` tokens came, one a seed, fifty side by side (alone they say the same:
    tests/decode/engine/test_decoder.py)."""
    settings = [replace(sampling, seed=seed) for seed in range(runs)]
    outs = decoder.generate_batch([prompt] * runs, length, sampling=settings, batch_size=50)
    return Counter(tuple(out.tokens) for out in outs)


class Streamer:
    """What transformers' `generate` hands tokens to, as they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True
