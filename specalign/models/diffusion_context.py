"""A standalone drafter's state over one request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specalign.lm.cache import KVCache
from specalign.models.standalone import DiffusionDrafter


class DiffusionContext:
    """The clean text of one request and logits of the noisy block after it, without gradients.

    A network that caches a prefix runs each committed token once, together with the first noisy
    block after it; one of full attention recomputes its window in every pass.
    """

    def __init__(self, drafter: DiffusionDrafter, capacity: int) -> None:
        self.drafter, self.tokens = drafter, list[int]()
        self.device = next(drafter.parameters()).device
        # with a shift: the last cached token's hidden state, which predicts the first position
        self.before_1D: Tensor | None = None
        self.cache: KVCache | None = None
        if drafter.cached:
            self.cache = drafter.network.new_cache(capacity)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens. The network sees them with the next block."""
        self.tokens.extend(tokens)

    def keep(self, count: int) -> None:
        """Roll back to the first `count` tokens."""
        del self.tokens[count:]
        if self.cache is None:
            return
        if self.drafter.network.shift and (self.before_1D is None or self.cache.length > count):
            # rerun the last token for its hidden state
            count, self.before_1D = max(count - 1, 0), None
        self.cache.length = min(self.cache.length, count)

    @torch.no_grad()
    def denoise(self, block_K: Tensor) -> Tensor:
        """Logits (K, V) over the target's vocabulary of a block of tokens and masks (K,), fp32."""
        drafter = self.drafter
        if self.cache is None:
            return drafter.target_logits(self.window_logits(block_K[None]))
        share = (block_K == drafter.mask_id).float().mean()
        f_1KV, self.before_1D = drafter.network.denoise(
            self._clean(self.cache.length),
            block_K[None],
            self.cache,
            self.before_1D,
            drafter.sigma_for_mask_fraction(share)[None],
        )
        return drafter.target_logits(f_1KV[0].float())

    def _clean(self, first: int) -> Tensor:
        return torch.tensor([self.tokens[first:]], dtype=torch.int64, device=self.device)

    def window_logits(self, block_1K: Tensor) -> Tensor:
        """The network's output for a block after the last clean tokens, without a cache, (K, V)."""
        drafter = self.drafter
        clean = self._clean(-drafter.config.window)
        tokens_1S = torch.cat((clean, block_1K), 1)
        inside_1S = torch.ones_like(tokens_1S, dtype=torch.bool)
        sigma_1 = drafter.window_sigma(tokens_1S, inside_1S)
        positions = torch.arange(tokens_1S.shape[1], device=self.device)[None]
        hidden_1SD = drafter.network.hidden(tokens_1S, sigma_1, positions_BL=positions)
        return drafter.logits(hidden_1SD[0, clean.shape[1] :], sigma_1.expand(block_1K.shape[1]))
