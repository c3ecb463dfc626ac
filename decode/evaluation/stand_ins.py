"""Untrained drafters of every kind, for `decode.eval --reproduce NAME --scale tiny`."""

from pathlib import Path

import torch

from decode.evaluation.config import EvalConfig
from decode.systems.drafter_folders import NamedDrafter
from decode.systems.registry import AUTOREGRESSIVE, BLOCK, DIFFUSION, VARIABLE_PREFIX
from specalign.formats.block import save_drafter
from specalign.formats.standalone import architecture, save_standalone
from specalign.lm.inspection.keys import plain_rotary
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from specalign.models.standalone import DiffusionConfig, DiffusionDrafter

_DRAFTS = 4


def make_stand_ins(config: EvalConfig, folder: Path) -> tuple[NamedDrafter, ...]:
    """Small drafters with random weights (the same in every run) in `folder`, and the target itself
    as the autoregressive one."""
    name, trusted = config.target or "debug", config.trust_remote_code
    target = load_target(name, device=config.device, trust_remote_code=trusted)
    folders = {kind: folder / kind for kind in (DIFFUSION, BLOCK, VARIABLE_PREFIX)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_standalone(_make_diffusion(target), folders[DIFFUSION])
        save_drafter(_make_block(target), folders[BLOCK])
        save_drafter(_make_block(target, prefix_decay=7), folders[VARIABLE_PREFIX])
    made = (NamedDrafter(str(path), kind) for kind, path in folders.items())
    return *made, NamedDrafter(target.spec, AUTOREGRESSIVE)


def _make_diffusion(target: Target) -> DiffusionDrafter:
    sizes = DDiTConfig(target.vocab_size + 1, 32, n_blocks=2, n_heads=2, scale_by_sigma=True)
    network = DDiT(sizes)
    config = DiffusionConfig(_DRAFTS, target.vocab_size, network=architecture(network))
    return DiffusionDrafter(network, config, target)


def _make_block(target: Target, **extra: int) -> BlockDrafter:
    width, heads, last = target.hidden_size, target.num_heads, target.num_layers - 1
    rotary = plain_rotary(width // heads, target.rope_theta).entry()
    config = BlockConfig(
        context="taps", block_size=_DRAFTS, block_layout="fill_in", hidden_act="silu",
        target_layer_ids=[last], init_layer_ids=[-1], num_target_layers=last + 1,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=target.vocab_size,
        rms_norm_eps=1e-6, rope_theta=target.rope_theta, rotary=[rotary], extra=dict(extra),
        hidden_size=width, intermediate_size=2 * width, head_dim=width // heads,
        mask_token_id=0, target=target.spec, target_sha256=target.hash,
    )  # fmt: skip
    return BlockDrafter(config, target)
