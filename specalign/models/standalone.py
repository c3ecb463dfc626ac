"""A standalone diffusion drafter: a network that reads only tokens, and its forward process.

The network is a DDiT (specalign/models/ddit.py) or a masked language model (specalign/models/masked_lm.py).
Whatever its conventions (mask, shift, σ, cache), here row k of a block predicts the token k + 1
places after the anchor, and `target_logits` are over the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specalign.common.batch import Anchors, Batch, Corrupted
from specalign.common.errors import UserError, nearest
from specalign.common.schema import finite
from specalign.diffusion.graphs import Absorbing, Graph, Uniform
from specalign.diffusion.parameterization import LOG_ZERO
from specalign.diffusion.schedules import Schedule, schedule
from specalign.lm.model import Target
from specalign.models.ddit import DDiT, prefix_block_mask, prefix_block_positions
from specalign.models.masked_lm import MaskedLM

GRAPHS, PREDICTIONS = ("absorbing", "uniform"), ("log_score", "logits")
Annealed = Callable[[int], Tensor]
"""Length → bool (1, 1, L, L), as `masked_lm.annealed_see` draws it."""


@dataclass(frozen=True)
class DiffusionConfig:
    """What the network's own config.json does not say.

    block_size: K, the tokens of a block in training; decoding may draft fewer or more. vocab_size:
    the target's. prediction: `log_score` (SEDD) or `logits`; with the mask graph both give the same
    q. window: clean tokens before a block that a network of full attention reads. mask_id: of a
    DDiT, if it is not the last id. mask_rates: the mask rates of a published checkpoint (BD3-LM's
    clipped schedule), written when it is saved. network: its architecture, to tell one checkpoint
    from another.

    Raises:
        UserError: a value that does not fit, with its key.
    """

    block_size: int
    vocab_size: int
    graph: str = "absorbing"
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "loglinear"})
    prediction: str = "log_score"
    window: int = 512
    mask_id: int | None = None
    mask_rates: tuple[float, float] | None = None
    target: str = ""
    target_sha256: str = ""
    network: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "window"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 1 << 31:
                raise UserError(
                    f"{name}={value!r:.40} must be a whole number of at least 1, below 2^31"
                )
        if self.mask_id is not None and type(self.mask_id) is not int:
            raise UserError(f"mask_id={self.mask_id!r:.40} must be a whole number, or null")
        for name, known in (("graph", GRAPHS), ("prediction", PREDICTIONS)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"{name}={value!r:.40} is unknown{nearest(str(value), known)}")
        if not isinstance(self.schedule, dict) or not isinstance(self.schedule.get("name"), str):
            raise UserError(f"schedule={self.schedule!r:.40} must be an object with a name")
        rates = self.mask_rates
        if rates is not None:
            pair = isinstance(rates, list | tuple) and len(rates) == 2 and all(map(finite, rates))
            if not pair or not 0 <= rates[0] <= rates[1] <= 1:
                raise UserError(
                    f"mask_rates={rates!r:.40} must be two shares, the smaller one first"
                )
            object.__setattr__(self, "mask_rates", tuple(rates))  # JSON has only lists

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DiffusionDrafter(nn.Module):
    """q as training and decoding see it.

    Args:
        config: its `vocab_size` is the target's, or that of the drafter's own tokenizer.
        padded: the network may have more rows than its tokenizer has tokens; those are never
            predicted.

    Raises:
        UserError: a network over another vocabulary than the config's.
    """

    draft_vocab: Tensor | None = None
    """None: it drafts over the whole vocabulary."""

    def __init__(
        self,
        network: DDiT | MaskedLM,
        config: DiffusionConfig,
        target: Target,
        padded: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.config = network, config
        self._target = [target]  # in a list, so that it is no submodule
        self.schedule: Schedule = schedule(**config.schedule)
        self.graph: Graph
        size, uniform = self.vocab_size, config.graph == "uniform"
        if isinstance(network, MaskedLM):
            self.mask_id = network.mask_token_id
        else:
            self.mask_id = size - 1 if config.mask_id is None else config.mask_id
        if uniform:
            if isinstance(network, MaskedLM):
                raise UserError(
                    "drafter.graph=uniform: a masked language model undoes the mask (absorbing)"
                )
            self.mask_id, self.graph = -1, Uniform(size)
        elif not 0 <= self.mask_id < size:
            raise UserError(f"mask_id={self.mask_id} is not within 0..{size - 1}")
        else:
            self.graph = Absorbing(size, self.mask_id)
        fits = size == config.vocab_size or (not uniform and size == config.vocab_size + 1)
        if not fits and not (padded and size > config.vocab_size):
            raise UserError(
                f"the drafter has {size} tokens with its mask, target {target.spec!r} has "
                f"{config.vocab_size} without: a "
                "drafter with its own vocabulary needs its tokenizer (--drafter-tokenizer)"
            )

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
        """Whether a clean prefix does not see what follows, so that its keys can be cached."""
        n = self.network
        kind = n.config.attention if isinstance(n, DDiT) else n.family.attention
        return kind == "prefix_causal"

    @property
    def caches_blocks(self) -> bool:
        """Whether a block-causal network's blocks can be cached: not if tokens are conditioned on
        σ."""
        n = self.network
        return bool(self.block) and not (isinstance(n, DDiT) and n.config.time_input == "sigma")

    @property
    def scale_by_sigma(self) -> bool:
        """Whether f is SEDD's log-score without the part that depends only on σ."""
        return not isinstance(self.network, DDiT) or self.network.config.scale_by_sigma

    def sigma_for_mask_fraction(self, share: Tensor) -> Tensor:
        """The σ at which this share of tokens is expected to be masked."""
        most = float(self.schedule.mask_probability(torch.ones((), dtype=torch.float64)))
        return -torch.log1p(-most * share)

    @property
    def block(self) -> int:
        """The blocks by which a block-causal network sees (BD3-LM, SDAR); 0 for others."""
        n = self.network
        return n.config.block_size if isinstance(n, DDiT) else n.family.block_size

    # ---- over packed rows, with gradients ----

    def block_rows(
        self, batch: Batch, anchors: Anchors, noisy: Corrupted, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `logits` reads of every noisy block: hidden (B, A, K, D) and its σ (B, A, K).
        `annealed`: a further attention mask of that length (attention annealing, arXiv
        2410.17891)."""
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
        return hidden_BSD[:, batch.tokens_BL.shape[1] :].unflatten(
            1, noisy.tokens_t.shape[1:]
        ), sigma_BAK

    def _windows(
        self, batch: Batch, anchors: Anchors, noisy: Corrupted, annealed: Annealed | None
    ) -> tuple[Tensor, Tensor]:
        """Full attention: every block is a sequence of its own, after the last clean tokens of its
        document."""
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
        sigma_N = self._window_sigma(tokens_NS, inside_NS)
        if self.mask_id < 0:
            sigma_N = self.schedule.total(noisy.times).flatten()
        hidden_NSD = self._hidden(tokens_NS, sigma_N, positions_NS, see)
        hidden = hidden_NSD[:, width:].unflatten(0, (B, A))
        return hidden, sigma_N.view(B, A, 1).expand(B, A, K)

    def _visible(self, absolute_NS: Tensor, inside_NS: Tensor) -> Tensor:
        """Attention mask of a window, (N, 1, S, S): everything inside, or by blocks counted from
        the text's start. Padding sees itself, so that every row sees something."""
        own_SS = torch.eye(inside_NS.shape[1], dtype=torch.bool, device=inside_NS.device)
        see_NSS = (inside_NS[:, None] & inside_NS[..., None]) | own_SS
        if self.block:
            block_NS = absolute_NS // self.block
            see_NSS = see_NSS & (block_NS[:, None] <= block_NS[..., None])
        return see_NSS[:, None]

    def _window_sigma(self, tokens_NS: Tensor, inside_NS: Tensor) -> Tensor:
        """σ of windows, (N,): by the share of masks in them."""
        masked_NS = (tokens_NS == self.mask_id) & inside_NS
        return self.sigma_for_mask_fraction(masked_NS.sum(1) / inside_NS.sum(1))

    def suffix_rows(
        self, batch: Batch, noisy: Corrupted, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """Whole rows as SEDD pretrains, each document after a clean prefix: hidden (B, L, D) and σ
        (B, L)."""
        sigma_B1 = self.schedule.total(noisy.times)[:, None]
        same = batch.document_BL[:, :, None] == batch.document_BL[:, None]
        see = same | torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
        if self.cached:  # clean tokens see what is before them, noisy ones all of their document
            before = torch.ones_like(same[0]).tril()
            see = see & (before | noisy.valid[:, :, None])
        if annealed is not None:
            see = see & annealed(see.shape[-1])[0]
        if self.cached:
            sigma_BL = torch.where(noisy.valid, sigma_B1, torch.zeros_like(sigma_B1))
        elif self.mask_id < 0:
            sigma_BL = sigma_B1.expand(noisy.valid.shape)
        else:  # as for a block after a prefix: by the share of masks in the document
            masked_BL = ((noisy.tokens_t == self.mask_id) & (batch.document_BL >= 0)).to(
                sigma_B1.dtype
            )
            sigma_BL = self.sigma_for_mask_fraction(
                (same * masked_BL[:, None]).sum(2) / same.sum(2)
            )
        return self._hidden(noisy.tokens_t, sigma_BL, batch.positions_BL, see[:, None]), sigma_BL

    def _hidden(
        self, tokens: Tensor, sigma: Tensor, positions: Tensor, see: Tensor | None
    ) -> Tensor:
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
        """Logits of q over the target's vocabulary, (…, its V) → (…, V), without the mask. Only for
        the mask graph, where a softmax of the log-score is SEDD's q as well as MDLM's."""
        if self.mask_id < 0:
            raise UserError(
                "drafter.graph=uniform has no one-step q: calibration and draws need absorbing"
            )
        f = f[..., : self.config.vocab_size]
        if self.mask_id >= self.config.vocab_size:
            return f
        column = torch.tensor([self.mask_id], device=f.device)
        return f.index_fill(-1, column, LOG_ZERO)
