"""Published masked-diffusion language models: one record per family with all that is needed to load
it.

Every family is a known autoregressive architecture with another attention mask and its own
parameter names. `rename` and `Family.config` map those names to transformers' own, so that no
remote code is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import PurePath
from typing import Any, Literal

from specalign.common.errors import UserError, nearest
from specalign.formats.kinds import architectures_of

BASES = ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of transformers that `masked_lm` runs: plain decoders, a head without scale or bias."""


@dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read, and what its network computes.

    mask_token_id: if neither config.json nor the tokenizer's files name one. shift: how many places
    before a token the raw logits that predict it are. block_size: of block_causal, if config.json
    has none. keys: prefixes of their parameter names and of ours, `{i}` the layer; the first match
    counts, in both directions. config: their name of a config key → ours; empty = the same names.
    """

    name: str
    hub_ids: tuple[str, ...]
    model_type: str
    architectures: tuple[str, ...]
    base: str
    mask_token_id: int
    shift: Literal[0, 1] = 0
    attention: Literal["full", "block_causal", "prefix_causal"] = "full"
    block_size: int = 0
    keys: tuple[tuple[str, str], ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)

    def ours(self, name: str) -> str:
        """transformers' name of their parameter `name`."""
        return rename(name, self.keys)

    def theirs(self, name: str) -> str:
        """Their name of transformers' parameter `name`."""
        return rename(name, tuple((ours, theirs) for theirs, ours in self.keys))

    def published_as(self, spec: str) -> bool:
        """Whether a hub id, or a folder's last part, is one of this family's."""
        names = {spec.lower(), PurePath(spec).name.lower()}
        ids = [i.lower() for i in self.hub_ids]
        return any(fnmatch(n, p) for n in names for i in ids for p in (i, PurePath(i).name))


def rename(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """`name` with the first matching prefix replaced."""
    for old, new in prefixes:
        if found := re.match(re.escape(old).replace(r"\{i\}", r"(\d+)"), name):
            return new.replace("{i}", found[1] if found.groups() else "") + name[found.end() :]
    return name


_THEIRS, _OURS = "model.transformer.blocks.{i}.", "model.layers.{i}."
_LLADA = Family(
    # config.json, names and the order of gate and up: public conversions and ports of
    # modeling_llada.py, which is OLMo's block; the rotary halves are split as Llama's are. Raw
    # logits are used at their own place (generate.py).
    name="llada",
    hub_ids=("GSAI-ML/LLaDA-8B-*", "GSAI-ML/LLaDA-1.5"),
    model_type="llada",
    architectures=("LLaDAModelLM",),
    base="LlamaForCausalLM",
    mask_token_id=126336,
    keys=(
        ("model.transformer.wte.", "model.embed_tokens."),
        ("model.transformer.ln_f.", "model.norm."),
        ("model.transformer.ff_out.", "lm_head."),
        (f"{_THEIRS}attn_norm.", f"{_OURS}input_layernorm."),
        (f"{_THEIRS}q_proj.", f"{_OURS}self_attn.q_proj."),
        (f"{_THEIRS}k_proj.", f"{_OURS}self_attn.k_proj."),
        (f"{_THEIRS}v_proj.", f"{_OURS}self_attn.v_proj."),
        (f"{_THEIRS}attn_out.", f"{_OURS}self_attn.o_proj."),
        (f"{_THEIRS}ff_norm.", f"{_OURS}post_attention_layernorm."),
        (f"{_THEIRS}ff_proj.", f"{_OURS}mlp.gate_proj."),
        (f"{_THEIRS}up_proj.", f"{_OURS}mlp.up_proj."),
        (f"{_THEIRS}ff_out.", f"{_OURS}mlp.down_proj."),
    ),
    config={
        "d_model": "hidden_size",
        "mlp_hidden_size": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "max_sequence_length": "max_position_embeddings",
        "embedding_size": "vocab_size",
        "activation_type": "hidden_act",
        "rms_norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "weight_tying": "tie_word_embeddings",
        "init_std": "initializer_range",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "pad_token_id",
    },  # fmt: skip
)
_DREAM = Family(
    # Qwen2 under its own names, biases on q, k and v; the reference repeats row 0 and drops the
    # last one (the shift).
    name="dream",
    hub_ids=("Dream-org/Dream-v0-*",),
    model_type="Dream",
    architectures=("DreamModel",),
    base="Qwen2ForCausalLM",
    mask_token_id=151666,
    shift=1,
)
_FAMILIES = (
    _LLADA,
    _DREAM,
    replace(_DREAM, name="dream-coder", hub_ids=("Dream-org/Dream-Coder-v0-*",)),
    replace(_DREAM, name="diffucoder", hub_ids=("apple/DiffuCoder-7B-*",)),
    Family(
        # Names: the wrapper takes the embedding out of the body (DiffuLLaMA's model.py). 811, an
        # existing token, is its training default. That config.json says DiscreteDiffusionModel is
        # second-hand; the hub id decides otherwise.
        name="diffullama",
        hub_ids=("diffusionfamily/diffullama*",),
        model_type="llama",
        architectures=("DiscreteDiffusionModel",),
        base="LlamaForCausalLM",
        mask_token_id=811,
        shift=1,
        keys=(("embed_tokens.", "model.embed_tokens."), ("denoise_model.", "model.")),
    ),
    Family(
        # Qwen3; config.json's block_size and mask_token_id are read by its modeling_sdar.py, whose
        # loss has no shift. 4 is the block of the ids without a suffix -b16, -b32.
        name="sdar",
        hub_ids=("JetLM/SDAR-*B-Chat*",),
        model_type="sdar",
        architectures=("SDARForCausalLM",),
        base="Qwen3ForCausalLM",
        mask_token_id=151669,
        attention="block_causal",
        block_size=4,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}


def family_of(config: Mapping[str, Any], spec: str) -> Family:
    """The family of a checkpoint, from its config.json and the hub id or folder that it came from.
    Raises UserError for an unknown family."""
    kind, named = config.get("model_type"), architectures_of(config)
    fitting = [
        f
        for f in FAMILIES.values()
        if f.model_type == kind and (f.published_as(spec) or set(f.architectures) & set(named))
    ]
    if not fitting:
        kinds = {f.model_type for f in FAMILIES.values()}
        raise UserError(
            f"{spec}: config.json has model_type={kind!r}, architectures={named}: not a "
            f"supported masked-diffusion family{nearest(str(kind), kinds)}"
        )
    return next((f for f in fitting if f.published_as(spec)), fitting[0])
