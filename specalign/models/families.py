"""Published masked-diffusion language models: one record per family with all that is needed to load
it.

Every family is a known autoregressive architecture with another attention mask, so that no remote
code is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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

    mask_token_id: if neither config.json nor the tokenizer's files name one. keys: prefixes of
    their parameter names and of ours; the first match counts, in both directions.
    """

    name: str
    hub_ids: tuple[str, ...]
    model_type: str
    architectures: tuple[str, ...]
    base: str
    mask_token_id: int
    attention: Literal["full", "prefix_causal"] = "full"
    keys: tuple[tuple[str, str], ...] = ()

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
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


_FAMILIES = (
    Family(
        # Qwen2 under its own names, biases on q, k and v; the reference repeats row 0 and drops the
        # last one (the shift).
        name="dream",
        hub_ids=("Dream-org/Dream-*", "apple/DiffuCoder-7B-*"),
        model_type="Dream",
        architectures=("DreamModel",),
        base="Qwen2ForCausalLM",
        mask_token_id=151666,
    ),
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
        keys=(("embed_tokens.", "model.embed_tokens."), ("denoise_model.", "model.")),
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
    return fitting[0]
