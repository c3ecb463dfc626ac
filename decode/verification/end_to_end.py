"""Check 6: greedy text against plain decoding's and transformers' `generate`, and the joint law of
a few sampled tokens through the whole engine, enumerated over everything that it may draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import transformers as hf
from torch import Tensor

from decode.engine.decoder import Decoder
from decode.proposers.base import common_prefix_length
from decode.speculation.sampling import Sampling
from decode.verification.proposals import every_outcome
from decode.verification.reference import Reference, law, scores
from decode.verification.verdict import Tally

Masses = dict[tuple[int, ...], float]  # the probability of every text
LENGTH = 4  # tokens of the joint law
NEGLIGIBLE, MOVED = 1e-3, 4
"""Allowed total variation of the joint law, and how many times the effect of a perturbation of one
epsilon is allowed on top."""
MOST_RUNS = 400
GENERATED = 2
"""Texts that transformers' `generate` writes, too. Of the others every token is compared with the
most probable one of a forward pass of transformers over the whole text."""


def check_greedy(
    name: str,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    new: int,
    plain: Sequence[list[int]],
    reference: Reference,
    tally: Tally,
) -> list[list[int]]:
    """Greedy texts, streamed, against plain decoding's; without these, against transformers' model
    and its `generate`. Returns them."""
    texts = []
    for i, prompt in enumerate(prompts):
        tally.place = {"prompt": i, "method": name}
        where = f"{name}, prompt {i}"
        stream = decoder.stream(prompt, max_new_tokens=new)
        text, out = "".join(stream), stream.output
        texts.append(out.tokens)
        if text != out.text:
            tally.find(f"{where}: the streamed pieces are not the text")
        if plain:
            against = {"plain decoding's": _agree(prompt, plain[i], out.tokens, reference, tally)}
        else:
            right = _is_greedy(prompt, out.tokens, reference, tally)
            against = {"those of a forward pass of transformers": right}
        if not plain and i < GENERATED:
            other = _generate(reference, prompt, new)
            right = _agree(prompt, out.tokens, other, reference, tally)
            against["those of transformers' generate"] = right
        for whose, right in against.items():
            what = f"{where}: its greedy tokens are not {whose}"
            tally.expect(f"greedy texts against {whose}", right, what)
        tally.counts["tokens drafted"] += sum(out.nodes)
        tally.counts["drafted tokens accepted"] += sum(out.accepted)
    return texts


def _agree(
    prompt: list[int], text: list[int], other: list[int], reference: Reference, tally: Tally
) -> bool:
    """Whether two greedy texts are equal, or part at a rounding tie."""
    same = common_prefix_length(text, other)
    if text == other or same == min(len(text), len(other)):
        return text == other
    return _is_greedy(prompt, other, reference, tally)


def _is_greedy(prompt: list[int], text: list[int], reference: Reference, tally: Tally) -> bool:
    """Whether each token is the most probable one, or as probable but for rounding."""
    (rows_LV,) = reference.logits([([*prompt, *text[:-1]], len(text))])
    for at, (z_V, token) in enumerate(zip(rows_LV, text, strict=True)):
        gap = float(z_V.max() - z_V[token])
        if gap > reference.rounding_limit([*prompt, *text[:at]], z_V, gap):
            return False
        tally.counts["rounding ties"] += gap > 0
    return True


@torch.no_grad()
def _generate(reference: Reference, prompt: Sequence[int], new: int) -> list[int]:
    """The greedy output of transformers' own `generate`."""
    target, model = reference.target, reference.model
    config = hf.GenerationConfig(
        max_new_tokens=min(new, target.context_limit - len(prompt)),
        do_sample=False,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=(target.eos_ids or (0,))[0],
    )
    tokens_1L = torch.tensor([list(prompt)], device=target.device)
    mask_1L = torch.ones_like(tokens_1L)
    found: Tensor = model.generate(tokens_1L, generation_config=config, attention_mask=mask_1L)
    return found[0, len(prompt) :].tolist()


def check_joint_law(
    name: str,
    decoder: Decoder,
    prompt: list[int],
    reference: Reference,
    tally: Tally,
    sampling: Sampling,
) -> None:
    """The joint law of `LENGTH` tokens. `sampling`: with a small top-k, so that there are few."""
    tally.place = {"method": name}
    eos_ids = reference.target.eos_ids

    def run() -> tuple[int, ...]:
        return tuple(decoder.generate(prompt, max_new_tokens=LENGTH, sampling=sampling).tokens)

    def follow(text: tuple[int, ...], row_V: Tensor) -> Tensor:
        return law(scores(row_V, prompt, text, sampling, eos_ids), sampling)

    runs = every_outcome(run, MOST_RUNS)
    if runs is None:
        tally.counts["joint distributions with too many outcomes"] += 1
        return
    tally.counts["runs of the engine"] += len(runs)
    found: Masses = defaultdict(float)
    for weight, tokens in runs:
        found[tokens] += weight
    wanted: Masses = {(): 1.0}
    prefixes: Masses = {}  # texts that have not ended
    for _ in range(LENGTH):
        going = {text: wanted[text] for text in wanted if not text or text[-1] not in eos_ids}
        prefixes |= going
        rows = reference.logits([([*prompt, *text], 1) for text in going])
        for text, (row_V,) in zip(going, rows, strict=True):
            mass, p_V = wanted.pop(text), follow(text, row_V)
            wanted |= {(*text, i): mass * float(p_V[i]) for i in p_V.nonzero()[:, 0].tolist()}
    away = sum(abs(found[x] - wanted.get(x, 0.0)) for x in {*found, *wanted}) / 2
    bound = NEGLIGIBLE
    for text, mass in prefixes.items() if away > NEGLIGIBLE else ():
        p_V, *others = (follow(text, row_V) for row_V in reference.perturb([*prompt, *text]))
        bound += MOVED * mass * max(float((p_V - x_V).abs().sum()) / 2 for x_V in others)
    what = f"{name}: the joint distribution of {LENGTH} tokens is not the target's"
    tally.measure(f"joint distribution of {LENGTH} tokens, total variation", away, bound, what)
