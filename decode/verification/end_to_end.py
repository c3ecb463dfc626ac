"""Check 6: greedy text against plain decoding's and transformers' `generate`, and the joint law of
a few sampled tokens through the whole engine, enumerated over everything that it may draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from decode.engine.decoder import Decoder
from decode.speculation.sampling import Sampling
from decode.verification.divergence import BUG, examine, first_difference
from decode.verification.proposals import ReusedNumber, TooMany, every_outcome
from decode.verification.reference import Reference, law, scores
from decode.verification.tally import Tally

LENGTH = 4
"""Tokens of the joint law."""
NEGLIGIBLE, MOVED = 1e-3, 4
"""Allowed total variation of the joint law, and how many times the effect of a perturbation of one
epsilon is allowed on top."""
MOST_RUNS = 400


def generated(reference: Reference, prompt: Sequence[int], new: int) -> list[int]:
    """What transformers' own `generate` writes at temperature 0."""
    target, tokens_1L = (
        reference.target,
        torch.tensor([list(prompt)], device=reference.target.device),
    )
    config = hf.GenerationConfig(
        max_new_tokens=min(new, target.context_limit - len(prompt)), do_sample=False, eos_token_id=list(target.eos_ids) or None,
        pad_token_id=(target.eos_ids or (0,))[0],
    )  # fmt: skip
    mask = torch.ones_like(tokens_1L)
    suppressed = None if target.never_V is None else target.never_V.nonzero()[:, 0].tolist()
    if suppressed:
        config.suppress_tokens = suppressed
    with torch.no_grad():
        found: Any = reference.model.generate(
            tokens_1L, generation_config=config, attention_mask=mask
        )
    return found[0, len(prompt) :].tolist()


def check_plain(
    plain: Decoder, prompts: Sequence[list[int]], new: int, reference: Reference, tally: Tally
) -> list[list[int]]:
    """Plain greedy texts, against transformers' `generate`."""
    texts = []
    for i, prompt in enumerate(prompts):
        out = plain.generate(prompt, max_new_tokens=new)
        texts.append(out.tokens)
        wanted = generated(reference, prompt, new)
        tally.counts["greedy texts against transformers' generate"] += 1
        at = first_difference(out.tokens, wanted)
        if at is None:
            continue
        if at < min(len(wanted), len(out.tokens)):
            z_V = reference.logits([*prompt, *wanted[:at]], 1)[0]
            gap = abs(float(z_V[wanted[at]] - z_V[out.tokens[at]]))
            if gap <= reference.rounding_limit([*prompt, *wanted[:at]], z_V, gap):
                tally.counts["rounding ties"] += 1
                continue
        tally.find(
            f"prompt {i}: plain decoding and transformers' generate part at token {at}", prompt=i
        )
    return texts


def check_greedy(
    name: str,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    new: int,
    tally: Tally,
) -> None:
    """Greedy texts with drafts, against plain decoding's."""
    for i, (prompt, plain) in enumerate(zip(prompts, texts, strict=True)):
        stream = decoder.stream(prompt, max_new_tokens=new)
        text, out = "".join(stream), stream.output
        if text != out.text:
            tally.find(
                f"{name}, prompt {i}: the streamed pieces are not the text", prompt=i, method=name
            )
        tally.counts["greedy texts with drafts"] += 1
        tally.counts["tokens drafted"] += sum(out.nodes)
        tally.counts["drafted tokens accepted"] += sum(out.accepted)
        judged = examine(
            decoder.target, prompt, plain, out.tokens, out.drafted, out.accepted, out.trees
        )
        if judged is None:
            continue
        if judged.kind == BUG:
            tally.find(
                f"{name}, prompt {i}: greedy text parts from plain decoding's at token "
                f"{judged.index}",
                prompt=i,
                method=name,
            )
        else:
            tally.counts["rounding ties"] += 1


def check_joint_law(
    name: str,
    decoder: Decoder,
    prompt: list[int],
    reference: Reference,
    tally: Tally,
    sampling: Sampling,
) -> None:
    """The joint law of `LENGTH` tokens. `sampling`: with a small top-k, so that there are few."""
    try:
        runs = every_outcome(
            lambda: decoder.generate(prompt, max_new_tokens=LENGTH, sampling=sampling).tokens,
            MOST_RUNS,
        )
    except ReusedNumber:
        tally.find(f"{name}: two draws used one random number", method=name)
        return
    except TooMany:
        tally.counts["joint laws with too many outcomes"] += 1
        return
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, tokens in runs:
        found[tuple(tokens)] += weight
    wanted, rounding = _joint_law(prompt, reference, sampling)
    tally.counts["runs of the engine"] += len(runs)
    away = sum(abs(found.get(x, 0.0) - wanted.get(x, 0.0)) for x in {*found, *wanted}) / 2
    bound = NEGLIGIBLE if away <= NEGLIGIBLE else NEGLIGIBLE + rounding()
    if not tally.measure(f"joint law of {LENGTH} tokens, total variation", away, bound):
        tally.find(
            f"{name}: the joint law of {LENGTH} tokens is {away:.3g} from the target's (total "
            "variation)",
            method=name,
        )


def _joint_law(
    prompt: list[int], reference: Reference, sampling: Sampling
) -> tuple[dict[tuple[int, ...], float], Callable[[], float]]:
    """The target's joint law of `LENGTH` tokens, and how far rounding may move it (total
    variation)."""
    eos_ids = reference.target.eos_ids

    def next_law(logits_V: Tensor, text: tuple[int, ...]) -> Tensor:
        return law(scores(logits_V, prompt, text, sampling, eos_ids), sampling)

    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    prefixes: dict[tuple[int, ...], float] = {}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in wanted.items():
            if text and text[-1] in eos_ids:
                longer[text] = mass
                continue
            prefixes[text] = mass
            p_V = next_law(reference.logits([*prompt, *text], 1)[0], text)
            for token in p_V.nonzero()[:, 0].tolist():
                longer[(*text, token)] = mass * float(p_V[token])
        wanted = longer

    def rounding() -> float:
        total = 0.0
        for text, mass in prefixes.items():
            p_V, *others = (next_law(row_V, text) for row_V in reference.perturb([*prompt, *text]))
            total += mass * max(float((p_V - other_V).abs().sum()) / 2 for other_V in others)
        return MOVED * total

    return wanted, rounding
