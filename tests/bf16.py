"""Tiny random models in bf16, an architecture of each mechanism: is p as near to fp32 as the model's own bf16, and why do outputs part?

python -m tests.bf16              # some forty architectures, two minutes
python -m tests.bf16 mixtral      # these

Columns. *p*: mean total variation of p, through the cache in pieces, to the model's own bf16 in one call. *its own*: of that to fp32 over the
same weights. *ours to fp32*: of p to that. *identical*, *ties*, *bugs*: greedy outputs with drafts (copies, a block drafter's chains, its
trees where they may branch) against plain decoding, as `decode.verification.divergence` judges them.
"""

from __future__ import annotations

import copy
import sys

import torch
import transformers

from align.common.errors import UserError, cli, nearest
from align.common.text import say
from align.target.debug import debug_model
from align.target.model import Target
from align.target.proof import proven
from decode.drafters.block import BlockProposer
from decode.drafters.lookup import LookupDrafter
from decode.engine.decoder import Decoder
from tests.compared import Plain, same
from tests.target_drafters import trained_drafter
from tests.target_models import WINDOW, some_text, tiny_model
from tests.targets import NAMES, NEW, PIECES, prompt

KINDS = """
llama mistral gemma3_text gpt_oss gemma2 gemma3n_text gemma4_text bloom mpt falcon_alibi gpt2 opt gpt_neo phi glm4 cohere roformer git
mixtral qwen3_moe olmoe phimoe dbrx llama4_text deepseek_v3 longcat_flash jetmoe granitemoe deepseek_v32 minimax_m3_vl_text
mamba2 falcon_mamba lfm2 qwen3_next kimi_linear minimax jamba zamba2 granitemoehybrid zaya inkling_text qwen4_exp_text
"""
HEAD = "| architecture | attention | p | its own | ours to fp32 | identical | ties | bugs |\n|---|---|---|---|---|---|---|---|"


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    if unknown := [name for name in names if name not in NAMES.split()]:
        raise UserError(
            f"{unknown[0]!r} is no architecture of these models{nearest(unknown[0], NAMES.split())}"
        )
    say(HEAD)
    for name in names or KINDS.split():
        say(row(name))


def row(name: str) -> str:
    """One line of the table, or why there is none."""
    tokenizer = debug_model("Llama")[1]
    own = tiny_model(name, len(tokenizer)).bfloat16()
    try:
        target = proven(copy.deepcopy(own), tokenizer, name)
    except UserError as error:
        return f"| {name} | refused: {error} |" + " |" * 6
    near = " | ".join(f"{x:.3f}" for x in distances(target, own))
    return f"| {name} | {target.attention} | {near} | {' | '.join(map(str, judged(target)))} |"


@torch.no_grad()
def distances(target: Target, own: transformers.PreTrainedModel) -> tuple[float, float, float]:
    """Mean total variation of p to the model's own, of that to fp32, of p to fp32."""
    exact, found = copy.deepcopy(own).float(), []
    for seed in range(8):
        tokens = some_text(target, 2 * WINDOW + 10, seed)
        cache = target.new_cache(1, tokens.shape[1])
        ours = [target.forward(part, cache=cache).logits_BLV for part in tokens.split(PIECES, dim=1)]
        logits = [torch.cat([x for x in ours if x is not None], 1), own(tokens).logits, exact(tokens).logits]
        p, theirs, wide = (x[..., : logits[1].shape[-1]].double().softmax(-1) for x in logits)
        found.append(
            [float((a - b).abs().sum(-1).mean() / 2) for a, b in ((p, theirs), (theirs, wide), (p, wide))]
        )
    one, two, three = torch.tensor(found).mean(0).tolist()
    return one, two, three


def judged(target: Target) -> tuple[int, int, int]:
    """How many greedy outputs with drafts are plain decoding's, how many part at a tie, how many otherwise."""
    prompts = [prompt(target, seed) for seed in range(8)]
    plain = Plain(Decoder(target), prompts, NEW, None)
    texts = [p + plain.output(i) for i, p in enumerate(prompts)]
    drafters: list[BlockProposer | LookupDrafter] = [LookupDrafter(4)]
    for context in ("taps", "shared_kv"):
        try:
            with torch.autocast("cpu", torch.bfloat16):  # as training runs it
                drafter = trained_drafter(target, texts, context).bfloat16()
        except UserError:
            continue
        drafters += [BlockProposer(drafter, tree_nodes=n) for n in ((0,) if target.chains_only else (0, 6))]
    checks = [same(plain, Decoder(target, drafter)) for drafter in drafters]
    identical, ties, bugs = (sum(getattr(c, key) for c in checks) for key in ("identical", "ties", "bugs"))
    return identical, ties, bugs


if __name__ == "__main__":
    cli(lambda: main(sys.argv[1:]))()
