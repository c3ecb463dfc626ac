"""Check 6: greedy text against plain decoding's and transformers' `generate`, and the joint law of
a few sampled tokens through the whole engine, enumerated over everything that it may draw."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from decode.engine.decoder import Decoder
from decode.proposers.base import common_prefix_length
from decode.speculation.settings import Sampling
from decode.verification.proposals import TooMany, every_outcome
from decode.verification.reference import Reference, law, scores
from decode.verification.verdict import Tally

LENGTH = 4  # tokens of the joint law
NEGLIGIBLE, MOVED = 1e-3, 4
"""Allowed total variation of the joint law, and how many times the effect of a perturbation of one
epsilon is allowed on top."""
MOST_RUNS = 400
GENERATED = 1
"""Texts that transformers' `generate` writes, too. Of all, every token is compared with the most
probable one of a forward pass of transformers over the whole text."""


def check_plain(
    plain: Decoder, prompts: Sequence[list[int]], new: int, reference: Reference, tally: Tally
) -> list[list[int]]:
    """Plain greedy texts, against transformers' model and its `generate`."""
    texts = [plain.generate(prompt, max_new_tokens=new).tokens for prompt in prompts]
    pairs = list(zip(prompts, texts, strict=True))
    reference.load([([*prompt, *text[:-1]], len(text)) for prompt, text in pairs])
    for i, (prompt, text) in enumerate(pairs):
        tally.place = {"prompt": i}
        right = _is_greedy(prompt, text, reference, tally)
        what = f"prompt {i}: plain decoding does not write the most probable tokens"
        tally.expect("greedy texts against a forward pass of transformers", right, what)
        if i < GENERATED:
            right = _agree(prompt, text, _generate(reference, prompt, new), reference, tally)
            what = f"prompt {i}: plain decoding and transformers' generate differ"
            tally.expect("greedy texts against transformers' generate", right, what)
    return texts


def check_greedy(
    name: str,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    new: int,
    reference: Reference,
    tally: Tally,
) -> None:
    """Greedy texts with drafts, against plain decoding's."""
    tally.place = {"method": name}
    for i, (prompt, plain) in enumerate(zip(prompts, texts, strict=True)):
        tally.place = {"prompt": i, "method": name}
        stream = decoder.stream(prompt, max_new_tokens=new, adapt=False)
        text, out = "".join(stream), stream.output
        if text != out.text:
            tally.find(f"{name}, prompt {i}: the streamed pieces are not the text")
        right = _agree(prompt, plain, out.tokens, reference, tally)
        what = f"{name}, prompt {i}: the greedy text is not plain decoding's"
        tally.expect("greedy texts with drafts", right, what)
        tally.counts["tokens drafted"] += sum(out.nodes)
        tally.counts["drafted tokens accepted"] += sum(out.accepted)


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
    rows_LV = reference.logits([*prompt, *text[:-1]], len(text))
    for at, (z_V, token) in enumerate(zip(rows_LV, text, strict=True)):
        gap = float(z_V.max() - z_V[token])
        if gap > reference.rounding_limit([*prompt, *text[:at]], z_V, gap):
            return False
        tally.counts["rounding ties"] += gap > 0
    return True


def _generate(reference: Reference, prompt: Sequence[int], new: int) -> list[int]:
    """The greedy output of transformers' own `generate`."""
    target = reference.target
    tokens_1L = torch.tensor([list(prompt)], device=target.device)
    config = hf.GenerationConfig(
        max_new_tokens=min(new, target.context_limit - len(prompt)),
        do_sample=False,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=(target.eos_ids or (0,))[0],
    )
    if target.never_V is not None and bool(target.never_V.any()):
        config.suppress_tokens = target.never_V.nonzero()[:, 0].tolist()
    model: Any = reference.model
    with torch.no_grad():
        mask = torch.ones_like(tokens_1L)
        found = model.generate(tokens_1L, generation_config=config, attention_mask=mask)
    return found[0, len(prompt) :].tolist()


def check_joint_law(
    name: str,
    decoder: Decoder,
    prompt: list[int],
    reference: Reference,
    tally: Tally,
    sampling: Sampling,
    adapt: bool = False,
) -> None:
    """The joint law of `LENGTH` tokens. `sampling`: with a small top-k, so that there are few.
    adapt: as in `Decoder.generate`; what it chooses must not depend on the clock."""
    tally.place = {"method": name}

    def run() -> tuple[int, ...]:
        return tuple(decoder.generate(prompt, LENGTH, sampling=sampling, adapt=adapt).tokens)

    try:
        runs = every_outcome(run, MOST_RUNS)
    except TooMany:
        tally.counts["joint distributions with too many outcomes"] += 1
        return
    tally.counts["runs of the engine"] += len(runs)
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, tokens in runs:
        found[tokens] += weight
    wanted, going = _joint_law(prompt, reference, sampling)
    away = sum(abs(found.get(x, 0.0) - wanted.get(x, 0.0)) for x in {*found, *wanted}) / 2
    bound = NEGLIGIBLE
    if away > NEGLIGIBLE:
        bound += MOVED * _moved(prompt, going, reference, sampling)
    what = f"{name}: the joint distribution of {LENGTH} tokens is not the target's"
    tally.measure(f"joint distribution of {LENGTH} tokens, total variation", away, bound, what)


Masses = dict[tuple[int, ...], float]


def _joint_law(
    prompt: list[int], reference: Reference, sampling: Sampling
) -> tuple[Masses, Masses]:
    """The target's joint law of `LENGTH` tokens; and the mass of each text that has not ended."""
    eos_ids = reference.target.eos_ids
    law_of: Masses = {(): 1.0}
    all_going: Masses = {}
    for _ in range(LENGTH):
        going = {text: m for text, m in law_of.items() if not text or text[-1] not in eos_ids}
        law_of = {text: m for text, m in law_of.items() if text not in going}
        all_going.update(going)
        reference.load([([*prompt, *text], 1) for text in going])
        for text, mass in going.items():
            logits_V = reference.logits([*prompt, *text], 1)[0]
            p_V = law(scores(logits_V, prompt, text, sampling, eos_ids), sampling)
            for token in p_V.nonzero()[:, 0].tolist():
                law_of[(*text, token)] = mass * float(p_V[token])
    return law_of, all_going


def _moved(prompt: list[int], going: Masses, reference: Reference, sampling: Sampling) -> float:
    """How far a perturbation of one epsilon moves the joint law, in total variation."""
    total = 0.0
    for text, mass in going.items():
        rows: list[Tensor] = reference.perturb([*prompt, *text])
        eos_ids = reference.target.eos_ids
        p_V, *others = (law(scores(z_V, prompt, text, sampling, eos_ids), sampling) for z_V in rows)
        total += mass * max(float((p_V - other_V).abs().sum()) / 2 for other_V in others)
    return total
