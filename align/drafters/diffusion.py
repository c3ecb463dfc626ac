"""A standalone diffusion drafter: a network that reads tokens alone, the forward process that it undoes, and its target's
vocabulary.

The network is a DDiT (align/drafters/ddit.py) or a masked language model (align/drafters/masked_lm.py). Whatever its
conventions (a mask inside or beyond the target's vocabulary, a shift, σ or no σ, an exact cache or none), here row k of
a block predicts the token k + 1 places after the anchor, and `target_logits` are over the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from align.corruption import Anchors, Corrupted
from align.data import Batch
from align.drafters.ddit import DDiT, prefix_block_mask, prefix_block_positions
from align.drafters.masked_lm import MaskedLM
from align.errors import UserError
from align.graphs import Absorbing, Graph, Uniform
from align.parameterization import predictor_sigma
from align.row_statistics import LOG_ZERO
from align.schedules import Schedule, schedule
from align.target import Target

Annealed = Callable[[int], Tensor]
"""Length → bool (1, 1, L, L), as `masked_lm.annealed_see` draws it."""


@dataclass(frozen=True)
class DiffusionConfig:
    """What the network's own config.json does not say.

    block_size: K, the tokens of a block in training; decoding may draft fewer or more. vocab_size: the target's.
    prediction: `log_score` (SEDD) or `logits`; with the mask graph both give the same q.
    window: clean tokens that a network of full attention is shown before a block.
    network: its architecture, to tell one checkpoint from another.
    """

    block_size: int
    vocab_size: int
    graph: str = "absorbing"
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "loglinear"})
    prediction: str = "log_score"
    window: int = 512
    target: str = ""
    target_sha256: str = ""
    network: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DiffusionDrafter(nn.Module):
    """q as training and decoding see it.

    Args:
        config: its `vocab_size` is the target's, or that of a tokenizer of the drafter's own.

    Raises:
        UserError: a network over another vocabulary than the config's.
    """

    draft_vocab: Tensor | None = None
    """None: it drafts over the whole vocabulary."""

    def __init__(self, network: DDiT | MaskedLM, config: DiffusionConfig, target: Target) -> None:
        super().__init__()
        self.network, self.config = network, config
        self._target = [target]  # in a list, so that it is no submodule
        self.schedule: Schedule = schedule(**config.schedule)
        size, sizes = self.vocab_size, {config.vocab_size, config.vocab_size + 1}
        self.graph: Graph
        if config.graph == "uniform":
            self.mask_id, self.graph = -1, Uniform(size)
            sizes = {config.vocab_size}
        else:
            self.mask_id = network.mask_token_id if isinstance(network, MaskedLM) else size - 1
            self.graph = Absorbing(size, self.mask_id)
        if size not in sizes:
            raise UserError(
                f"the drafter has {size} tokens with its mask, target {target.spec!r} has {config.vocab_size} without: a "
                "drafter with a vocabulary of its own needs its tokenizer (--drafter-tokenizer)"
            )
        if isinstance(network, MaskedLM) and config.graph == "uniform":
            raise UserError("drafter.graph=uniform: a masked language model undoes the mask (absorbing)")

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def vocab_size(self) -> int:
        """The network's, a mask beyond the target's vocabulary included."""
        n = self.network
        return n.config.vocab_size if isinstance(n, DDiT) else int(n.model.config.vocab_size)

    @property
    def cached(self) -> bool:
        """Whether a clean prefix does not look at what follows, so that its keys can be kept."""
        n = self.network
        kind = n.config.attention if isinstance(n, DDiT) else n.family.attention
        return kind == "prefix_causal"

    @property
    def block(self) -> int:
        """The blocks by which a block-causal network sees (BD3-LM, SDAR); 0 for others."""
        n = self.network
        return n.config.block_size if isinstance(n, DDiT) else n.family.block_size

    # ---- over packed rows, with gradients ----

    def block_rows(
        self, batch: Batch, anchors: Anchors, noisy: Corrupted, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `logits` reads of every noisy block: hidden (B, A, K, D) and the σ to give it with (B, A, K). `annealed`: a mask
        of that length laid over the one that says who sees whom (attention annealing, arXiv 2410.17891)."""
        sigma_BA1 = self.schedule.total(noisy.times)[..., None]
        sigma_BAK = sigma_BA1.expand(noisy.tokens_t.shape)
        if not self.cached:
            return self._windows(batch, anchors, noisy, annealed)
        size = anchors.block_size
        tokens_BS = torch.cat((batch.tokens_BL, noisy.tokens_t.flatten(1)), 1)
        see = prefix_block_mask(batch.document_BL, anchors.index_BA, size)
        if annealed is not None:
            see = see & annealed(see.shape[-1])
        positions_BS = prefix_block_positions(batch.positions_BL, anchors.index_BA, size)
        if isinstance(self.network, MaskedLM):
            hidden = self.network.block_hidden(tokens_BS, see, positions_BS, anchors.index_BA, size)
            return hidden, sigma_BAK
        clean = torch.zeros_like(batch.tokens_BL, dtype=sigma_BA1.dtype)
        sigma_BS = torch.cat((clean, sigma_BAK.flatten(1)), 1)
        hidden_BSD = self.network.hidden(tokens_BS, sigma_BS, positions_BL=positions_BS, see=see)
        return hidden_BSD[:, batch.tokens_BL.shape[1] :].unflatten(1, noisy.tokens_t.shape[1:]), sigma_BAK

    def _windows(
        self, batch: Batch, anchors: Anchors, noisy: Corrupted, annealed: Annealed | None
    ) -> tuple[Tensor, Tensor]:
        """Full attention: every block is a sequence of its own, behind the last clean tokens of its document."""
        B, A, K = noisy.tokens_t.shape
        width = min(self.config.window, batch.tokens_BL.shape[1])
        back = torch.arange(width - 1, -1, -1, device=batch.tokens_BL.device)
        place_BAW = anchors.index_BA[..., None] - back
        inside = place_BAW >= 0
        flat = place_BAW.clamp_min(0).flatten(1)
        clean_BAW = batch.tokens_BL.gather(1, flat).view(B, A, width)
        document_BAW = batch.document_BL.gather(1, flat).view(B, A, width)
        inside &= document_BAW == batch.document_BL.gather(1, anchors.index_BA)[..., None]
        tokens_NS = torch.cat((clean_BAW, noisy.tokens_t), 2).flatten(0, 1)
        inside_NS = torch.cat((inside, torch.ones_like(noisy.valid)), 2).flatten(0, 1)
        first_N1 = (batch.positions_BL.gather(1, anchors.index_BA).flatten() + 1)[:, None]
        at_S = torch.arange(-width, K, device=flat.device)
        absolute_NS = (first_N1 + at_S).clamp_min(0)
        positions_NS = inside_NS.long().cumsum(1).sub(1).clamp_min(0)
        see = self._visible(absolute_NS, inside_NS)
        if annealed is not None:
            see = see & annealed(width + K)
        sigma_N = predictor_sigma(tokens_NS, self.mask_id, real_BL=inside_NS)[:, 0]
        hidden_NSD = self._hidden(tokens_NS, sigma_N, positions_NS, see)
        hidden = hidden_NSD[:, width:].unflatten(0, (B, A))
        return hidden, sigma_N.view(B, A, 1).expand(B, A, K)

    def _visible(self, absolute_NS: Tensor, inside_NS: Tensor) -> Tensor:
        """Who sees whom in a window, (N, 1, S, S): everything that is there, or by blocks counted from the text's start."""
        see_NSS = inside_NS[:, None] | torch.eye(
            inside_NS.shape[1], dtype=torch.bool, device=inside_NS.device
        )
        if self.block:
            block_NS = absolute_NS // self.block
            see_NSS = see_NSS & (block_NS[:, None] <= block_NS[..., None])
        return see_NSS[:, None]

    def suffix_rows(
        self, batch: Batch, noisy: Corrupted, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """Whole rows as SEDD pretrains, each document behind a clean prefix: hidden (B, L, D) and σ (B, L)."""
        sigma_B1 = self.schedule.total(noisy.times)[:, None]
        same = batch.document_BL[:, :, None] == batch.document_BL[:, None]
        see = same | torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
        if self.cached:  # clean tokens see what is before them, noisy ones all of their document
            before = torch.ones_like(same[0]).tril()
            see = see & (before | noisy.valid[:, :, None])
        if annealed is not None:
            see = see & annealed(see.shape[-1])[0]
        sigma_BL = torch.where(noisy.valid, sigma_B1, torch.zeros_like(sigma_B1) if self.cached else sigma_B1)
        return self._hidden(noisy.tokens_t, sigma_BL, batch.positions_BL, see[:, None]), sigma_BL

    def _hidden(self, tokens: Tensor, sigma: Tensor, positions: Tensor, see: Tensor | None) -> Tensor:
        if isinstance(self.network, MaskedLM):
            return self.network.hidden(tokens, positions_BL=positions, see=see)
        return self.network.hidden(tokens, sigma, positions_BL=positions, see=see)

    # ---- rows of hidden states ----

    def logits(self, hidden: Tensor, sigma: Tensor) -> Tensor:
        """The network's output f of any rows, (…, D) and σ (…) → (…, its V), fp32."""
        if isinstance(self.network, MaskedLM):
            return self.network.head(hidden)
        return self.network.head(hidden, sigma).float()

    def target_logits(self, f: Tensor) -> Tensor:
        """Logits of q over the target's vocabulary, (…, its V) → (…, V): the mask is never a token. Of the mask graph alone:
        a softmax of the log-score is SEDD's q as well as MDLM's (the score's sum is free)."""
        if self.mask_id < 0:
            raise UserError("drafter.graph=uniform has no one-step q: calibration and draws need absorbing")
        if self.mask_id >= self.config.vocab_size:
            return f[..., : self.config.vocab_size]
        column = torch.tensor([self.mask_id], device=f.device)
        return f.index_fill(-1, column, LOG_ZERO)


class DiffusionContext:
    """A clean text that grows, and the rows of a noisy block after it: what decoding asks for. One request, no gradient.

    A cached network runs each committed token once; another runs its window anew for every pass.
    """

    def __init__(self, drafter: DiffusionDrafter, capacity: int) -> None:
        self.drafter, self.tokens = drafter, list[int]()
        self.last_1D: Tensor | None = None
        network = drafter.network
        self.cache = None
        if drafter.cached:
            made = (
                network.new_cache(1, capacity) if isinstance(network, DDiT) else network.new_cache(capacity)
            )
            self.cache = made

    @property
    def device(self) -> torch.device:
        return next(self.drafter.parameters()).device

    @torch.no_grad()
    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self.tokens.extend(tokens)
        if self.cache is None or not tokens:
            return
        new_1L = torch.tensor([list(tokens)], device=self.device)
        if isinstance(self.drafter.network, MaskedLM):
            self.last_1D = self.drafter.network.extend(new_1L, self.cache)[:, -1]
        else:
            self.drafter.network.extend(new_1L, self.cache)

    def keep(self, count: int) -> None:
        """Back to the first `count` tokens."""
        again = self.tokens[count - 1 : count] if self.last_1D is not None else []
        del self.tokens[count - len(again) :]
        if self.cache is not None:
            self.cache.length = len(self.tokens)
        self.extend(again)  # the last one's hidden state predicts the block's first position

    @torch.no_grad()
    def denoise(self, block_K: Tensor) -> Tensor:
        """Logits over the target's vocabulary of a block that holds tokens and masks, (K,) → (K, V) fp32."""
        drafter, network = self.drafter, self.drafter.network
        block_1K = block_K[None]
        masked = (block_K == drafter.mask_id).double().mean()
        if self.cache is None:
            f_KV = self._whole(block_1K)
        elif isinstance(network, MaskedLM):
            f_KV = network.denoise(block_1K, self.cache, self.last_1D)[0]
        else:
            sigma_1 = drafter.schedule.total(masked.float())[None]
            f_KV = network.denoise(block_1K, sigma_1, self.cache)[0].float()
        return drafter.target_logits(f_KV)

    def _whole(self, block_1K: Tensor) -> Tensor:
        drafter = self.drafter
        clean = torch.tensor([self.tokens[-drafter.config.window :]], device=self.device)
        tokens_1S = torch.cat((clean, block_1K), 1)
        sigma_1 = predictor_sigma(tokens_1S, drafter.mask_id)[:, 0]
        positions = torch.arange(tokens_1S.shape[1], device=self.device)[None]
        see = None
        if drafter.block:
            start = len(self.tokens) - clean.shape[1]
            see = drafter._visible(positions + start, torch.ones_like(tokens_1S, dtype=torch.bool))
        hidden_1SD = drafter._hidden(tokens_1S, sigma_1, positions, see)
        return drafter.logits(hidden_1SD[0, clean.shape[1] :], sigma_1.expand(block_1K.shape[1]))
