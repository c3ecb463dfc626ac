"""The speculators package's layout of DFlash, which vLLM reads too. Fill-in blocks, no Markov
head."""

from __future__ import annotations

from shlex import join

import torch

from decode.exporting import qwen3
from decode.exporting.base import Format
from decode.exporting.folder import Exported
from decode.exporting.serving import ServedTarget, Snippet, vllm_line
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig


def make_speculators(drafter: BlockDrafter) -> Exported:
    """The folder of the speculators package. Raises UserError if it can't hold the drafter."""
    qwen3.check_fits(drafter, "speculators", layout="fill_in")
    c, target = drafter.config, drafter.target
    inner = qwen3.qwen3_config(drafter)
    architectures = getattr(target.config, "architectures", None) or [type(target.model).__name__]
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": drafter.draft_size,
        "block_size": c.rows,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],  # 0 is the embedding
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # else vLLM runs every layer causally
        "dtype": inner.pop("dtype"),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.block_size}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": c.target, "architectures": list(architectures)},
        },
    }
    made = Exported(config, qwen3.published_tensors(drafter))
    qwen3.add_draft_vocabulary(made, drafter)
    if drafter.draft_vocab is not None:
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[drafter.draft_vocab.cpu()] = True
        made.tensors["t2d"] = known
    qwen3.add_scaled_embedding(made, drafter)
    return made


def serve_speculators(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    """vLLM's line, and the short one if the target's name in config.json opens it."""
    if config.hidden_act != "silu":
        return []
    snippets = [vllm_line("dflash", target, folder, config.block_size)]
    if config.target == target.name:
        line = join(["vllm", "serve", folder, *target.vllm_options])
        snippets.append(
            Snippet("vLLM, which reads the target's name in the folder", "bash", (line,))
        )
    return snippets


SPECULATORS = Format("speculators", make_speculators, serve_speculators, library="speculators")
