"""Proposers of every kind that the captured engine runs."""

from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from specalign.lm.model import Target
from tests.builders import block_network, diffusion_drafter, shallow_target, smaller_model


def make(target: Target, name: str) -> Proposer | None:
    kind, *words = name.split()
    if kind == "plain":
        return None
    if kind == "lookup":
        return LookupProposer(5)
    if kind == "copy":
        return CopyingProposer(make(target, " ".join(words)))  # type: ignore[arg-type]
    if kind == "autoregressive":
        model = smaller_model(target, 1, vocab_size=80) if words else shallow_target(1)
        return AutoregressiveProposer(model, 3)
    if kind in ("taps", "shared_kv"):
        network = block_network(target, kind, int(words[0]))
        siblings = words[2] if len(words) > 2 else None
        return BlockProposer(network, 4, int(words[1]), siblings)  # type: ignore[arg-type]
    drafter = diffusion_drafter(target, kind.replace("_full", ", full"))
    return DiffusionProposer(drafter, 3, int(words[0]), words[1])


DRAFTERS = [
    "plain", "lookup", "taps 0 0", "taps 8 5", "shared_kv 8 0", "shared_kv 0 5", "copy shared_kv 8 5",
    "shared_kv 8 6 without_replacement", "taps 0 6 iid", "autoregressive", "copy autoregressive", "ddit 1 left_to_right",
    "ddit 2 confidence", "ddit_full 2 left_to_right", "masked_lm 2 left_to_right", "masked_lm_full 1 left_to_right",
]  # fmt: skip
