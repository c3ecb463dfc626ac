"""Masked-diffusion language models as drafters: a known decoder architecture with another attention
mask. Whatever the checkpoint's convention, row i here predicts the token at position i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import JsonObject
from specalign.kernels.linear import few_rows, uses_rows
from specalign.kernels.replacing import speed_up_linears
from specalign.lm.attention import block_mask, clean_then_noisy
from specalign.lm.cache import KVCache, LayerShape
from specalign.lm.model import Target
from specalign.models.families import Family


class MaskedLM(nn.Module):
    """The network q of a masked-diffusion language model, built by `load_masked_lm` or `adapt`.

    family: with the checkpoint's own mask_token_id and block_size. source: config.json as it was
    read and will be written. With a `target`, embedding and head are the target's: frozen, and not
    among the parameters.
    """

    def __init__(
        self, model: Any, family: Family, source: JsonObject, target: Target | None = None
    ) -> None:
        super().__init__()
        self.model, self.family, self.source = model, family, source
        self._target = [target] if target else []  # in a list, so that it is no submodule
        self._head_VD: Tensor | None = None  # rounded by `prepare_for_drafting`
        self._dtype: torch.dtype | None = None
        self.vocab_size = int(model.config.vocab_size)
        self.mask_token_id, self.attention = family.mask_token_id, family.attention
        self.block_size, self.kept_at_once = family.block_size, family.block_size or 1
        if target:
            model.set_input_embeddings(nn.Identity())
            model.set_output_embeddings(nn.Identity())
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its arithmetic: the weights' before `prepare_for_drafting` rounded them."""
        return self._dtype or self.model.dtype

    @property
    def head_weight_VD(self) -> Tensor:
        """The output matrix, (V, D)."""
        if self._target:
            return self._target[0].head_weight_VD.detach()
        return self.model.get_output_embeddings().weight

    def embed(self, tokens: Tensor) -> Tensor:
        if self._target:
            return self._target[0].embed(tokens).detach().to(self.dtype)
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Logits in fp32, (…, D) → (…, V); σ does not matter."""
        if self._head_VD is not None:
            return few_rows(hidden, self._head_VD)
        target, weight = self._target[0] if self._target else None, self.head_weight_VD
        # the target may store its head in half precision (specalign/kernels/replacing.py)
        hidden = hidden.to(weight.dtype if target is None else target.dtype)
        if torch.is_grad_enabled():
            return F.linear(hidden, weight.to(hidden.dtype)).float()
        if target is None:
            return few_rows(hidden, weight).float()
        return target.head_product(hidden)

    @torch.no_grad()
    def prepare_for_drafting(self) -> None:
        """Replace the linear layers by those that are fastest for few rows on this CPU, in bf16. It
        may change drafts, never the distribution of the output."""
        self._dtype, device = self.model.dtype, self.model.device
        speed_up_linears(self.model, self._dtype, device, torch.bfloat16)
        if uses_rows(self._dtype, device):
            self._head_VD = self.head_weight_VD.detach().to(torch.bfloat16)

    def see(self, tokens_BL: Tensor) -> Tensor:
        """The family's default attention mask: bool, broadcastable to (B, 1, L, L).

        full: everything; block_causal: its own and earlier blocks, counted from the row's start;
        prefix_causal: causal before the row's first mask, everything from there on.
        """
        length, device = tokens_BL.shape[1], tokens_BL.device
        at = torch.arange(length, device=device)
        if self.family.attention == "full":
            return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)
        if self.family.attention == "block_causal":
            block = at // self.family.block_size
            return (block <= block[:, None])[None, None]
        denoised_BL = (tokens_BL == self.mask_token_id).cumsum(1) > 0
        return ((at <= at[:, None]) | denoised_BL[:, :, None])[:, None]

    def hidden(
        self,
        tokens_BL: Tensor,
        sigma: Tensor | None = None,
        *,
        positions_BL: Tensor | None = None,
        see: Tensor | None = None,
    ) -> Tensor:
        """Normalised hidden states, (B, L, D); row i is what `head` turns into the prediction of
        position i. With a shift the raw row i − 1 predicts it, and the row of position 0 is zero.

        sigma: does not matter. see: bool, (L, L) or broadcastable to (B, 1, L, L), True = attend;
        every row must see something. Default: `see(tokens_BL)`.
        """
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
        mask = self.see(tokens_BL) if see is None else see
        mask = mask[None, None] if mask.dim() == 2 else mask
        return self._predicting(self._run(tokens_BL, mask, positions_BL, None), None)

    def block_hidden(
        self,
        tokens_BS: Tensor,
        sigma_BS: Tensor,
        positions_BS: Tensor,
        see: Tensor,
        index_BA: Tensor,
        size: int,
    ) -> Tensor:
        """The hidden states that predict the A blocks at the end of rows of tokens, (B, A, K, D).
        With a shift a block's anchor, at `index_BA` of the row, predicts its first position."""
        raw_BSD, count = self._run(tokens_BS, see, positions_BS, None), index_BA.shape[1]
        blocks = raw_BSD[:, -count * size :].unflatten(1, (count, size))
        if not self.family.shift:
            return blocks
        first = raw_BSD.gather(1, index_BA[..., None].expand(-1, -1, raw_BSD.shape[-1]))
        return torch.cat((first[:, :, None], blocks[:, :, :-1]), dim=2)

    def forward(self, tokens_BL: Tensor, **options: Any) -> Tensor:
        """Raw logits in fp32, (B, L, V), row i for position i; arguments of `hidden`."""
        return self.head(self.hidden(tokens_BL, **options))

    def _run(
        self, tokens_BL: Tensor, mask: Tensor | None, positions_BL: Tensor, cache: KVCache | None
    ) -> Tensor:
        """The body's last hidden states, row by row as the checkpoint has them."""
        return self.model.get_decoder()(
            inputs_embeds=self.embed(tokens_BL),
            attention_mask=mask,
            position_ids=positions_BL,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _predicting(self, raw_BLD: Tensor, before_BD: Tensor | None) -> Tensor:
        """Rows moved to the positions that they predict: the shift is applied here alone."""
        if not self.family.shift:
            return raw_BLD
        first = torch.zeros_like(raw_BLD[:, 0]) if before_BD is None else before_BD
        return torch.cat((first[:, None], raw_BLD[:, :-1]), dim=1)

    def new_cache(self, capacity: int) -> KVCache:
        """A one-row cache. Raises ValueError for a family of full attention, whose keys cannot be
        kept."""
        if self.family.cache != "exact":
            raise ValueError(f"{self.family.name}: its attention has no exact cache")
        c = self.model.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        shape = LayerShape(heads, width, width)
        return KVCache([shape] * c.num_hidden_layers, 1, capacity, self.dtype, self.model.device)

    @torch.no_grad()
    def denoise(
        self, clean_1C: Tensor, block_1K: Tensor, cache: KVCache, before_1D: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (1, K, V) of a block after the cached prefix and the clean tokens after that, in
        one pass, as `DDiT.denoise`; and the next call's `before_1D`: with a shift, the raw hidden
        state of the last cached token."""
        tokens_1S = torch.cat((clean_1C, block_1K), 1)
        clean, length, past = clean_1C.shape[1], tokens_1S.shape[1], cache.length
        cache.check_room(length)
        assert past % self.kept_at_once == 0, "the cached prefix is no whole blocks"
        groups = self.model.config.num_attention_heads // cache.slabs[0].keys.shape[1]
        if self.family.attention == "block_causal":
            see_SS = self.see(tokens_1S)[0, 0]
        else:
            see_SS = clean_then_noisy(clean, length - clean, tokens_1S.device)
        mask = block_mask(see_SS, length, past, groups, self.dtype, self.model.device)
        positions = torch.arange(past, past + length, device=tokens_1S.device)[None]
        raw_1SD = self._run(tokens_1S, mask, positions, cache)
        logits = self.head(self._predicting(raw_1SD, before_1D)[:, clean:])
        kept = clean // self.kept_at_once * self.kept_at_once
        cache.advance(kept)
        if not self.family.shift:
            return logits, None
        return logits, raw_1SD[:, kept - 1] if kept else before_1D


def annealed_see(length: int, progress: float, generator: torch.Generator) -> Tensor:
    """Attention mask annealing (DiffuLLaMA, arXiv 2410.17891): bool (1, 1, L, L), True = attend.
    Causal at `progress` 0, full at 1; between, each later position is seen with that
    probability."""
    shape = (1, 1, length, length)
    drawn = torch.rand(shape, generator=generator, device=generator.device) < progress
    return drawn | torch.ones(length, length, dtype=torch.bool, device=drawn.device).tril()


def with_lora(
    network: MaskedLM, rank: int, alpha: float, targets: Sequence[str], seed: int = 0
) -> None:
    """Freeze the network and train low-rank updates of the linear layers whose names end in
    `targets` (arXiv 2106.09685); they start at zero. Raises UserError without the package `peft`,
    or such a layer."""
    config = lora_config(rank, alpha, targets)
    from peft import get_peft_model

    with in_one_line("LoRA"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network.model = get_peft_model(network.model, config)


def lora_config(rank: int, alpha: float, targets: Sequence[str]) -> Any:
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("LoRA needs the package peft: pip install 'specalign[lora]'") from None
    scale: Any = alpha  # peft's annotation wants a whole number; it takes any
    return LoraConfig(r=rank, lora_alpha=scale, target_modules=list(targets), lora_dropout=0.0)


def merge_lora(network: MaskedLM) -> None:
    """Add the low-rank updates, if there are any, to the weights that they update."""
    if is_lora(network):
        network.model = network.model.merge_and_unload()


def is_lora(network: MaskedLM) -> bool:
    return hasattr(network.model, "merge_and_unload")
