"""Small masked-diffusion language models of every family, and their blocks through the cache."""

from typing import Any

import torch
from torch import Tensor

from specalign.formats.masked_lm import from_config
from specalign.models.masked_lm import MaskedLM

NO_TOKENS = torch.empty(1, 0, dtype=torch.int64)


QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "use_sliding_window": False, "rope_scaling": None, "initializer_range": 0.2,
}  # fmt: skip


DREAM = {**QWEN, "model_type": "Dream", "architectures": ["DreamModel"]}
DREAM |= {"mask_token_id": 36, "use_mrope": False}


def partly_masked(rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    drawn = torch.randint(1, 36, (rows, length), generator=torch.Generator().manual_seed(seed))
    drawn[:, 4:7] = 36
    return drawn


def masked_block_logits(
    network: MaskedLM, prefix: Tensor, block: Tensor, parts: list[int]
) -> Tensor:
    """The block's logits through the cache, the prefix taken in by parts, each with a draft that is thrown away."""
    cache, before = network.new_cache(prefix.shape[1] + block.shape[1] + 3), None
    for part in prefix.split(parts, dim=1):
        _, before = network.denoise(part, torch.full((1, 2), 5), cache, before)
    assert cache.length == prefix.shape[1]
    alone = network.denoise(NO_TOKENS, block, cache, before)[0]
    cache.length -= parts[-1]
    if network.shift:
        _, before = network.denoise(
            prefix[:, : -parts[-1]], NO_TOKENS, again := network.new_cache(12)
        )
        assert again.length == cache.length
    together = network.denoise(prefix[:, -parts[-1] :], block, cache, before)[0]
    torch.testing.assert_close(alone, together, atol=2e-5, rtol=1e-4)
    return alone


DIFFULLAMA = {**QWEN, "model_type": "llama", "mask_token_id": 36}
DIFFULLAMA |= {"architectures": ["DiscreteDiffusionModel"]}


CONFIGS: dict[str, dict[str, Any]] = {
    "dream": DREAM, "diffullama": DIFFULLAMA,
}  # fmt: skip


def small_masked_lm(name: str, **changes: Any) -> MaskedLM:
    """A family's network with random weights, norms and biases too, so that a slip can't hide."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = from_config({**CONFIGS[name], **changes})
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return network
