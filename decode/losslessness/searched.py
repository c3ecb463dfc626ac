"""Settings of `decode.losslessness.settings` that are found by looking: temperatures just below and above the one at which a text
turns, seeds that show values which leave out little, a bonus for tokens of the text that shows when the drafts of the same round are not counted, penalties that show when they
are applied twice, stop strings that end at one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from align.target.model import Target
from decode.losslessness.conditionals import logits_of
from decode.losslessness.law import Setting, Written, choice, noise, write, write_all
from decode.speculation.sampling import Sampling

NEW = 12
"""Tokens of a text."""
COLD = ((0.04, 0.08), (0.1, 0.2), (0.25, 0.6))
"""Where temperatures are looked for at which a text turns."""
APART = 1.1
"""The colder temperature is this much below it, the warmer one this much above."""
SEEDS = 200
"""Tried to find one."""
BONUSES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (-8.0, -5.0, -12.0),
    "repetition_penalty": (0.5, 0.3, 0.7),
}
"""Tried for the sake of the tokens of a round, each with `TRIED` seeds, until `ENOUGH` places show it."""
IN_A_ROUND = " in a round"
TRIED, ENOUGH = 8, 2
USUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top-p, usual": ({"top_p": 0.95}, {}),
    "top-p, wide": ({"top_p": 0.98}, {}),
    "min-p, usual": ({"min_p": 0.05}, {}),
    "min-p, strong": ({"min_p": 0.2}, {}),
    "top-k, wide": ({"top_k": 100}, {}),
    "repetition penalty, usual": ({"repetition_penalty": 1.1, "temperature": 0.3}, {"temperature": 0.3}),
    "presence penalty, strong": ({"presence_penalty": 1.8}, {"presence_penalty": 1.0}),
    "usual temperature": ({"temperature": 0.7}, {"temperature": 1.0}),
}
"""Values as requests have them, which change little, and what an engine might take in their place: `TRIED` seeds are looked at for a
text that shows the difference."""
ROOTS = (1, 6, 9)
"""Places of a text at which a round of scripted drafts begins: the token before them is no draft of theirs."""


def crossing(target: Target, prompt: list[int], seed: int) -> Iterator[Setting]:
    """Two stop strings that end at one token, the later one listed first; and a banned token that would come in the round of
    scripted drafts in which the minimum length is reached."""
    hot = Sampling(1.5, seed=seed)
    said = write(target, prompt, Setting("", hot, NEW, ends=()))
    text, tokens = said.text, said.tokens
    inner = [i for i in range(len(text) // 2, len(text) - 1) if text.find(text[i : i + 6]) == i]
    if inner:
        at = inner[0]
        stops = text[at : at + 6], text[at - 1 : at + 6]
        yield Setting("stop strings, one in another", hot, NEW, stops, ends=())
    fresh = [i for i in range(2, NEW) if i not in ROOTS and tokens[i] not in (*tokens[:i], *target.eos_ids)]
    if fresh:
        least = fresh[0]
        chosen = replace(hot, banned=(tokens[least],), min_new_tokens=least)
        yield Setting("banned tokens, minimum length", chosen, NEW)


def twice(target: Target, prompt: list[int], seed: int) -> Setting:
    """Recorded gaps under penalties that would give another text if they were applied twice."""
    once = [
        Sampling(1.5, repetition_penalty=0.8, presence_penalty=-1.5, seed=(seed + i) % 2**63)
        for i in range(TRIED)
    ]
    again = [replace(s, repetition_penalty=0.8**2, presence_penalty=-3.0) for s in once]
    settings = [Setting("gaps", s, NEW, gaps=True) for s in (*once, *again)]
    texts = [text.tokens for text in write_all(target, [(prompt, setting) for setting in settings])]
    differ = [sum(a != b for a, b in zip(texts[i], texts[i + TRIED], strict=False)) for i in range(TRIED)]
    return settings[differ.index(max(differ))]


def usual(target: Target, prompt: list[int], seed: int) -> Iterator[Setting]:
    """Of each of `USUAL` the seed whose text most differs from the other value's."""
    hot = [Sampling(1.5, seed=(seed + i) % 2**63) for i in range(TRIED)]
    others = list({str(other): other for _, other in USUAL.values()}.values())
    kinds = [*(("", other) for other in others), *((name, own) for name, (own, _) in USUAL.items())]
    settings = [Setting(name, replace(s, **values), NEW) for name, values in kinds for s in hot]
    texts = [text.tokens for text in write_all(target, [(prompt, setting) for setting in settings])]
    for number, (_, other) in enumerate(USUAL.values(), len(others)):
        start, its = TRIED * number, TRIED * others.index(other)
        differ = [
            sum(a != b for a, b in zip(texts[its + i], texts[start + i], strict=False)) for i in range(TRIED)
        ]
        yield settings[start + differ.index(max(differ))]


def cold(target: Target, prompt: list[int], said: Written, seed: int) -> Iterator[Setting]:
    """Of each range of `COLD` two temperatures between which the text turns: both would give one text if the temperature were
    raised, lowered or rounded across that place."""
    logits_LV = next(iter(logits_of(target, prompt, [said])))
    best_L2 = logits_LV.topk(2).values
    at = int((best_L2[:, 0] - best_L2[:, 1]).argmin())
    tried = [(seed + i) % 2**63 for i in range(SEEDS)]

    def turns(tried_seed: int, index: int) -> float:
        """The temperature above which the noise chooses another token there than the most probable one."""
        z_V, n_V = (
            logits_LV[index],
            noise(tried_seed, len(prompt) + index, target.vocab_size, logits_LV.device),
        )
        best = int(z_V.argmax())
        more_V = n_V - n_V[best]
        return float(((z_V[best] - z_V) / more_V)[more_V > 0].min()) if bool((more_V > 0).any()) else 1e9

    found = [(turns(s, at), s) for s in tried[:24]]
    for least, most in COLD:
        middle = (least * most) ** 0.5
        for s in tried[len(found) :]:
            if any(least <= t <= most for t, _ in found):
                break
            found.append((turns(s, at), s))
        turn, own = min(found, key=lambda one: max(one[0] / middle, middle / one[0]))
        found.remove((turn, own))
        for name, temperature in (("below", turn / APART), ("above", turn * APART)):
            temperature = max(temperature, 2e-3)
            yield Setting(f"temperature, {name} {middle:.2g}", Sampling(temperature, seed=own), at + 2)


def in_a_round(target: Target, prompt: list[int], seed: int) -> Iterator[Setting]:
    """Of each penalty, as a bonus, the value and seed whose text shows most often whether the token before is counted: it may be a
    draft of the same round."""
    for key, bonuses in BONUSES.items():
        name, hot, best = (
            f"{key.replace('_', ' ')} in a round",
            Sampling(1.5),
            (-1, Setting("", Sampling(), 0)),
        )
        for value in bonuses:
            tried = [
                Setting(name, replace(hot, seed=(seed + i) % 2**63, **{key: value}), NEW, ends=())
                for i in range(TRIED)
            ]
            rows: list[list[Tensor]] = [[] for _ in tried]
            asked = [(prompt, setting) for setting in tried]
            texts = write_all(target, asked, lambda i, logits_V, rows=rows: rows[i].append(logits_V))  # type: ignore[misc]
            for setting, text, logits in zip(tried, texts, rows, strict=True):
                best = max(best, (_sensitive(prompt, setting, text, logits), setting), key=lambda one: one[0])
            if best[0] >= ENOUGH:
                break
        yield best[1]


def _sensitive(prompt: list[int], setting: Setting, text: Written, logits: Sequence[Tensor]) -> int:
    """At how many places, if a scripted draft is accepted before them, the text would go on otherwise if the token before did not
    count. `logits`: (V,) of each token."""
    places = [i for i in range(2, len(text.tokens)) if i not in ROOTS]
    others = [int(_forgetful(logits[i], prompt, text.tokens[:i], setting).argmax()) for i in places]
    return sum(other != text.tokens[i] for i, other in zip(places, others, strict=True))


def _forgetful(logits_V: Tensor, prompt: list[int], tokens: list[int], setting: Setting) -> Tensor:
    """`choice` after the text without its last token, at the same place."""
    return choice(logits_V, prompt, tokens[:-1], setting, (), at=len(prompt) + len(tokens))
