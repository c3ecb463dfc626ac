"""A standalone diffusion drafter: a network that reads only tokens, and its forward process.

The network is a DDiT (specalign/models/ddit.py) or a masked language model (masked_lm.py). Whatever
its conventions (mask, shift, σ, cache), here row k of a block predicts the token k + 1 places after
the anchor, and `target_logits` are over the target's vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from specalign.common.batch import Anchors, Batch, Corrupted
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.diffusion.noise import LOG_ZERO
from specalign.diffusion.schedules import schedule
from specalign.lm.model import Target
from specalign.models.ddit import DDiT
from specalign.models.masked_lm import MaskedLM

Annealed = Callable[[int], Tensor]
"""Length → bool (1, 1, L, L), as `masked_lm.annealed_see` draws it."""


@dataclass(frozen=True)
class DiffusionConfig:
    """What the network's own config.json does not say.

    block_size: K, the tokens of a block in training; decoding may draft fewer or more. vocab_size:
    the target's. prediction: `log_score` (SEDD) or `logits`; both give the same q. window: clean
    tokens before a block that a network of full attention reads. mask_id: of a DDiT, if it is not
    the last id. network: its architecture, to tell one checkpoint from another.
    """

    block_size: int
    vocab_size: int
    schedule: JsonObject = field(default_factory=lambda: {"name": "loglinear"})
    prediction: Literal["log_score", "logits"] = "log_score"
    window: int = 512
    mask_id: int | None = None
    target: str = ""
    target_sha256: str = ""
    network: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "window"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1, below 2^31")
        if not isinstance(self.schedule.get("name"), str):
            raise UserError(f"schedule={self.schedule!r:.40} must be an object with a name")

    def to_dict(self) -> JsonObject:
        return asdict(self)


class DiffusionDrafter(nn.Module):
    """q as training and decoding see it. `padded`: the network may have more rows than its
    tokenizer has tokens; those are never predicted. Raises UserError for a network over another
    vocabulary than the config's, or a mask outside it."""

    draft_vocab: Tensor | None = None

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
        self.schedule = schedule(**config.schedule)
        one = torch.ones((), dtype=torch.float64)
        self._most_masked = float(self.schedule.mask_probability(one))
        size = network.vocab_size  # a mask beyond the target's included
        # a clean prefix does not see what follows, so that its keys can be cached
        self.cached = network.attention == "prefix_causal"
        self.mask_id = network.mask_token_id if config.mask_id is None else config.mask_id
        unscaled = isinstance(network, DDiT) and not network.config.scale_by_sigma
        if config.prediction == "log_score" and unscaled:
            raise UserError("a log-score that is not scaled by σ is not supported")
        if not 0 <= self.mask_id < size:
            raise UserError(f"mask_id={self.mask_id} is not within 0..{size - 1}")
        extra = size - config.vocab_size
        if extra not in (0, 1) and not (padded and extra > 0):
            sizes = f"drafter {size} (with mask token), target {config.vocab_size}"
            raise UserError(f"vocabulary mismatch: {sizes}; pass --drafter-tokenizer")

    @property
    def target(self) -> Target:
        return self._target[0]

    def sigma_for_mask_fraction(self, share: Tensor) -> Tensor:
        """The σ at which this share of tokens is expected to be masked."""
        return -torch.log1p(-self._most_masked * share)

    def block_rows(
        self, batch: Batch, anchors: Anchors, noisy: Corrupted, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `logits` reads of every noisy block: hidden (B, A, K, D) and its σ (B, A, K).
        `annealed`: a further attention mask of that length (attention annealing, arXiv
        2410.17891)."""
        if not self.cached:
            return self._windows(batch, anchors, noisy, annealed)
        sigma_BAK = self.schedule.total(noisy.times)[..., None].expand(noisy.tokens_t.shape)
        index_BA, size = anchors.index_BA, anchors.block_size
        see = prefix_block_mask(batch.document_BL, index_BA, size)
        if annealed is not None:
            see = see & annealed(see.shape[-1])
        after = torch.arange(1, size + 1, device=index_BA.device)
        places_BAK = batch.positions_BL.gather(1, index_BA)[..., None] + after
        tokens_BS = torch.cat((batch.tokens_BL, noisy.tokens_t.flatten(1)), 1)
        positions_BS = torch.cat((batch.positions_BL, places_BAK.flatten(1)), 1)
        clean = torch.zeros_like(batch.tokens_BL, dtype=sigma_BAK.dtype)
        sigma_BS = torch.cat((clean, sigma_BAK.flatten(1)), 1)
        given = (tokens_BS, sigma_BS, positions_BS, see)
        return self.network.block_hidden(*given, index_BA, size), sigma_BAK

    def _windows(
        self, batch: Batch, anchors: Anchors, noisy: Corrupted, annealed: Annealed | None
    ) -> tuple[Tensor, Tensor]:
        """Full attention: a sequence for each block, after the last clean tokens of its
        document."""
        B, A, K = noisy.tokens_t.shape
        width = min(self.config.window, batch.tokens_BL.shape[1])
        back = torch.arange(width - 1, -1, -1, device=batch.tokens_BL.device)
        place_BAW = anchors.index_BA[..., None] - back
        flat = place_BAW.clamp_min(0).flatten(1)
        clean_BAW = batch.tokens_BL.gather(1, flat).view(B, A, width)
        document_BAW = batch.document_BL.gather(1, flat).view(B, A, width)
        document_BA1 = batch.document_BL.gather(1, anchors.index_BA)[..., None]
        inside = (place_BAW >= 0) & (document_BAW == document_BA1)
        tokens_NS = torch.cat((clean_BAW, noisy.tokens_t), 2).flatten(0, 1)
        inside_NS = torch.cat((inside, torch.ones_like(noisy.valid)), 2).flatten(0, 1)
        hidden_NSD, sigma_N = self.window_hidden(tokens_NS, inside_NS, annealed)
        return hidden_NSD[:, width:].unflatten(0, (B, A)), sigma_N.view(B, A, 1).expand(B, A, K)

    def window_hidden(
        self, tokens_NS: Tensor, inside_NS: Tensor, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of windows that begin with padding, (N, S, D), and σ (N,)."""
        size = tokens_NS.shape[1]
        positions_NS = inside_NS.long().cumsum(1).sub(1).clamp_min(0)
        # padding sees itself, so that every row sees something
        own_SS = torch.eye(size, dtype=torch.bool, device=tokens_NS.device)
        see = ((inside_NS[:, None] & inside_NS[..., None]) | own_SS)[:, None]
        if annealed is not None:
            see = see & annealed(size)
        sigma_N = self.window_sigma(tokens_NS, inside_NS)
        hidden = self.network.hidden(tokens_NS, sigma_N, positions_BL=positions_NS, see=see)
        return hidden, sigma_N

    def window_sigma(self, tokens_NS: Tensor, inside_NS: Tensor) -> Tensor:
        """σ of windows, (N,): by the share of masks in them."""
        masked_NS = (tokens_NS == self.mask_id) & inside_NS
        return self.sigma_for_mask_fraction(masked_NS.sum(1) / inside_NS.sum(1))

    def suffix_rows(
        self, batch: Batch, noisy: Corrupted, annealed: Annealed | None = None
    ) -> tuple[Tensor, Tensor]:
        """Whole rows, each document after a clean prefix (SEDD): hidden (B, L, D) and σ (B, L)."""
        sigma_B1 = self.schedule.total(noisy.times)[:, None]
        same = batch.document_BL[:, :, None] == batch.document_BL[:, None]
        see = same | torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
        if self.cached:  # clean tokens see what is before them, noisy ones all of their document
            see = see & (torch.ones_like(same[0]).tril() | noisy.valid[:, :, None])
            sigma_BL = torch.where(noisy.valid, sigma_B1, torch.zeros_like(sigma_B1))
        else:  # as for a block after a prefix: by the share of masks in the document
            masked_BL = (noisy.tokens_t == self.mask_id) & (batch.document_BL >= 0)
            share_BL = (same * masked_BL.to(sigma_B1.dtype)[:, None]).sum(2) / same.sum(2)
            sigma_BL = self.sigma_for_mask_fraction(share_BL)
        if annealed is not None:
            see = see & annealed(see.shape[-1])[0]
        places = batch.positions_BL
        hidden = self.network.hidden(
            noisy.tokens_t, sigma_BL, positions_BL=places, see=see[:, None]
        )
        return hidden, sigma_BL

    def logits(self, hidden: Tensor, sigma: Tensor) -> Tensor:
        """The network's output f of any rows, (…, D) and σ (…) → (…, its V), fp32."""
        return self.network.head(hidden, sigma).float()

    def target_logits(self, f: Tensor) -> Tensor:
        """Logits of q over the target's vocabulary, (…, its V) → (…, V), without the mask. A
        softmax of the log-score is SEDD's q as well as MDLM's."""
        f = f[..., : self.config.vocab_size]
        if self.mask_id >= self.config.vocab_size:
            return f
        f = f.clone()
        f[..., self.mask_id] = LOG_ZERO
        return f


def prefix_block_mask(document_BL: Tensor, anchors_index_BA: Tensor, block_size: int) -> Tensor:
    """The attention mask of training rows [L clean tokens, A blocks of K noisy ones], as in cached
    drafting: bool (B, 1, L+A·K, L+A·K). A clean token sees those of its document up to itself
    (padding only itself); block a its anchor's document up to and including the anchor, and itself
    in both directions."""
    length, device = document_BL.shape[1], document_BL.device
    index_L = torch.arange(length, device=device)
    block_N = torch.arange(anchors_index_BA.shape[1] * block_size, device=device) // block_size
    # a query sees its own document up to `last`: itself, or its anchor
    last_BN = anchors_index_BA[:, block_N]
    last_BS = torch.cat((index_L.expand_as(document_BL), last_BN), dim=1)
    document_BS = torch.cat((document_BL, document_BL.gather(1, last_BN)), dim=1)
    same = (document_BS[..., None] == document_BL[:, None]) & (document_BL >= 0)[:, None]
    own_S = torch.cat((-1 - index_L, block_N))  # clean tokens are each a block of their own
    see = (own_S[:, None] == own_S).expand(len(document_BL), -1, -1).clone()
    see[..., :length] |= same & (index_L <= last_BS[..., None])
    return see[:, None]
