"""Masked-diffusion language models as drafters: a known decoder architecture with another attention
mask. Whatever the checkpoint's convention, row i here predicts the token at position i."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.common.errors import in_one_line
from specalign.common.schema import JsonObject
from specalign.kernels.linear import RowsLinear, fast_linear, few_rows
from specalign.kernels.replacing import speed_up_linears
from specalign.lm.cache import KVCache
from specalign.lm.model import Target
from specalign.lm.slabs import LayerShape
from specalign.models.diffusion_network import DiffusionNetwork
from specalign.models.families import Family


class MaskedLM(DiffusionNetwork):
    """The network q of a masked-diffusion language model, built by `load_masked_lm` or `adapt`; σ
    does not matter.

    family: with the checkpoint's own mask_token_id. source: config.json as it was
    read and will be written. With a `target`, embedding and head are the target's: frozen, and not
    among the parameters.
    """

    shift = 1  # of all families
    opens = False

    def __init__(
        self, model: Any, family: Family, source: JsonObject, target: Target | None = None
    ) -> None:
        super().__init__()
        self.model, self.family, self.source = model, family, source
        self._target = [target] if target else []  # in a list, so that it is no submodule
        self._head_VD: Tensor | None = None  # rounded by `prepare_for_drafting`
        self._dtype: torch.dtype | None = None  # of the weights before it rounds them
        self._heads = getattr(model.config, "num_attention_heads", 1)
        self._kv_heads = getattr(model.config, "num_key_value_heads", None) or self._heads
        self.groups, self.vocab_size = self._heads // self._kv_heads, int(model.config.vocab_size)
        self.mask_token_id, self.attention = family.mask_token_id, family.attention
        if target:
            model.set_input_embeddings(nn.Identity())
            model.set_output_embeddings(nn.Identity())
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
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
        """Logits in fp32, (…, D) → (…, V)."""
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
        if fast_linear(self._dtype, device) is RowsLinear:
            self._head_VD = self.head_weight_VD.detach().to(torch.bfloat16)

    def run(
        self,
        tokens_BL: Tensor,
        see: Tensor | None,
        positions_BL: Tensor,
        cache: KVCache | None,
        sigma: Tensor | None = None,
    ) -> Tensor:
        if see is None and cache is None:  # else the model's own mask, which is causal
            see = torch.ones(1, 1, 1, tokens_BL.shape[1], dtype=torch.bool, device=tokens_BL.device)
        return self.model.get_decoder()(
            inputs_embeds=self.embed(tokens_BL),
            attention_mask=see,
            position_ids=positions_BL,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        c = self.model.config
        width = getattr(c, "head_dim", None) or c.hidden_size // self._heads
        shapes = [LayerShape(self._kv_heads, width, width)] * c.num_hidden_layers
        return KVCache(shapes, rows, capacity, self.dtype, self.model.device)


def annealed_see(length: int, progress: float, generator: torch.Generator) -> Tensor:
    """Attention mask annealing (DiffuLLaMA, arXiv 2410.17891): bool (1, 1, L, L), True = attend.
    Causal at `progress` 0, full at 1; between, each later position is seen with that
    probability."""
    shape = (1, 1, length, length)
    drawn = torch.rand(shape, generator=generator, device=generator.device) < progress
    return drawn | torch.ones(length, length, dtype=torch.bool, device=drawn.device).tril()


def with_lora(network: MaskedLM, rank: int, targets: Sequence[str], seed: int = 0) -> None:
    """Freeze the network and train low-rank updates, scaled by two, of the linear layers whose
    names end in `targets` (arXiv 2106.09685); they start at zero. Raises UserError without such a
    layer."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), lora_dropout=0.0)
    with in_one_line("LoRA"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network.model = get_peft_model(network.model, config)


def merge_lora(network: MaskedLM) -> None:
    """Add the low-rank updates, if there are any, to the weights that they update."""
    if is_lora(network):
        network.model = network.model.merge_and_unload()


def is_lora(network: MaskedLM) -> bool:
    return hasattr(network.model, "merge_and_unload")
