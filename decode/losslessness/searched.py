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
from decode.engine.detokenizer import UNFINISHED
from decode.losslessness.conditionals import logits_of
from decode.losslessness.law import Setting, Written, choice, noise, write, write_all
from decode.speculation.sampling import Sampling

NEW = 12
"""Tokens of a text."""
HOT, WIDEST = 20.0, 100
"""A temperature at which the best tokens are about as probable, and how many of them the widest top-k leaves."""
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
USUAL: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "top-p, usual": ({"top_p": 0.93}, (1.0, 0.9, 0.95)),
    "top-p, wide": ({"top_p": 0.98}, (1.0, 0.95)),
    "min-p, usual": ({"min_p": 0.05}, (0.0, 0.1)),
    "min-p, strong": ({"min_p": 0.2}, (0.0, 0.1)),
    "repetition penalty, usual": ({"repetition_penalty": 1.1, "temperature": 0.3}, (1.0,)),
    "usual temperature": ({"temperature": 0.7}, (1.0,)),
    "fine temperature": ({"temperature": 0.85}, (0.8, 0.9, 1.0)),
    "fine temperature, hot": ({"temperature": 1.25}, (1.2, 1.3, 1.5)),
}
"""Values as requests have them, which change little, and what an engine might take in place of the first: none, a round number, the
nearest that it allows. Seeds are looked at, `TOGETHER` at a time and at most `SEVERAL`, for a text that shows every difference."""
TOGETHER, SEVERAL = 4, 24
AT_LENGTH, AT_LEAST = 96, 90
"""Tokens of a text that is longer than those of the other checks, and the least of one that would end earlier."""
DEEP = 10
"""Drafts of its scripts, and of one request of a batch: longer than a usual drafter's."""
LASTING, ENDING = 150, 2000
"""The most probable tokens, which do not end that text, and the next ones, which do."""
COUNTED = 40
"""Tokens of a text after which an engine may forget to count."""
SPAN = 16
"""Characters of a stop string that reaches over several tokens."""
ROOTS = (1, 6, 9)
"""Places of a text at which a round of scripted drafts begins: the token before them is no draft of theirs."""


def crossing(target: Target, prompt: list[int], seed: int) -> Iterator[Setting]:
    """Two stop strings that end at one token, the later one listed first; and a banned token that would come in the round of
    scripted drafts in which the minimum length is reached."""
    hot = Sampling(1.5, seed=seed)
    said = write(target, prompt, Setting("", hot, NEW, ends=()))
    text, tokens = said.text, said.tokens
    inner = [i for i in range(len(text) // 3, len(text) - 1) if text.find(text[i : i + SPAN]) == i]
    if inner:
        at = inner[0]
        stops = text[at : at + SPAN], text[at - 1 : at + SPAN]
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
    """Of each of `USUAL` the seed whose text shows most of the other values."""
    hot = [Sampling(1.5, seed=(seed + i) % 2**63) for i in range(SEVERAL)]
    for name, (own, others) in USUAL.items():
        key, best = next(iter(own)), (-1, Setting("", Sampling(), 0))
        tried = [Setting(name, replace(s, **own), NEW) for s in hot]
        parts = (tried[start : start + TOGETHER] for start in range(0, len(tried), TOGETHER))
        for setting, text, logits in (one for part in parts for one in _written(target, prompt, part)):
            changed: list[dict[str, Any]] = [{key: other} for other in others]
            instead = [replace(setting, sampling=replace(setting.sampling, **c)) for c in changed]
            shown = sum(_differs(prompt, other, text, logits, target.eos_ids) for other in instead)
            best = max(best, (shown, setting), key=lambda one: one[0])
            if best[0] == len(others):
                break
        yield best[1]


def at_the_edge(target: Target, prompt: list[int], seed: int) -> Iterator[Setting]:
    """The least top-k that leaves a hot text as it is, and one less: of a top-k that is one too small or one too large, or ends at a
    number below, one of them shows it. Of `TOGETHER` seeds the one with the largest."""
    hot = [Sampling(HOT, top_k=WIDEST, seed=(seed + i) % 2**63) for i in range(TOGETHER)]
    tried = [Setting("top-k, wide", sampling, NEW) for sampling in hot]
    least, widest = max(
        (
            (max(_rank(z_V, t) for z_V, t in zip(logits, text.tokens, strict=True)), setting)
            for setting, text, logits in _written(target, prompt, tried)
        ),
        key=lambda one: one[0],
    )
    for name, top_k in ((widest.name, least), ("top-k, no wider", max(1, least - 1))):
        yield replace(widest, name=name, sampling=replace(widest.sampling, top_k=top_k))


def _rank(logits_V: Tensor, token: int) -> int:
    """1 for the best token; among equals the lowest id is the better one."""
    own = logits_V[token]
    return 1 + int((logits_V > own).sum()) + int((logits_V[:token] == own).sum())


def at_length(target: Target, prompt: list[int], said: Written, seed: int) -> list[tuple[Setting, Written]]:
    """A greedy text, and one with a penalty that many tokens would end before its least length; of `TOGETHER` seeds the one whose text
    shows a weaker penalty, and whether it counts what was written late."""
    ranked = next(iter(logits_of(target, prompt, [said])))[0].argsort(descending=True).tolist()
    ends = tuple(sorted(ranked[LASTING : LASTING + ENDING]))
    sampling = Sampling(0.3, presence_penalty=1.4, min_new_tokens=AT_LEAST)
    greedy = Setting("at length", Sampling(), AT_LENGTH, ends=(), drafts=DEEP)
    drawn = [
        Setting(
            "at length, seed", replace(sampling, seed=(seed + i) % 2**63), AT_LENGTH, ends=ends, drafts=DEEP
        )
        for i in range(TOGETHER)
    ]
    (first, text, _), *written = _written(target, prompt, [greedy, *drawn])
    best: tuple[int, tuple[Setting, Written]] = -1, (first, text)
    for setting, found, logits in written:
        weaker = replace(setting, sampling=replace(setting.sampling, presence_penalty=1.0))
        late = range(COUNTED, min(AT_LEAST, len(logits)))
        again = [
            choice(logits[i], prompt, found.tokens[:COUNTED], setting, ends, len(prompt) + i) for i in late
        ]
        shown = int(_differs(prompt, weaker, found, logits, ends))
        shown += any(int(z_V.argmax()) != found.tokens[i] for i, z_V in zip(late, again, strict=True))
        best = max(best, (shown, (setting, found)), key=lambda one: one[0])
        if shown == 2:
            break
    return [(first, text), best[1]]


def after_an_interruption(target: Target, prompt: list[int], seed: int) -> Setting:
    """Of `2 * TOGETHER` seeds the one of whose text two thirds are streamed most nearly after two thirds of its tokens: then a `stream`
    may raise an exception. What such a text leaves behind would show under so strong a penalty."""
    hot = Sampling(2.0, presence_penalty=30.0)
    tried = [
        Setting("after an interruption", replace(hot, seed=(seed + i) % 2**63), NEW, interrupted=True)
        for i in range(2 * TOGETHER)
    ]

    def off(text: Written) -> int:
        early = (target.decode(text.tokens[:i]).rstrip(UNFINISHED) for i in range(1, NEW))
        reached = [i for i, part in enumerate(early, 1) if 3 * len(part) >= 2 * len(text.text)]
        return abs(2 * NEW // 3 - min(reached, default=0))

    texts = write_all(target, [(prompt, setting) for setting in tried])
    return min(zip(tried, texts, strict=True), key=lambda one: off(one[1]))[0]


def _written(
    target: Target, prompt: list[int], settings: Sequence[Setting]
) -> Iterator[tuple[Setting, Written, Sequence[Tensor]]]:
    """Settings, what they ask for, and the logits (V,) of each token of it."""
    rows: list[list[Tensor]] = [[] for _ in settings]
    texts = write_all(target, [(prompt, s) for s in settings], lambda i, logits_V: rows[i].append(logits_V))
    return zip(settings, texts, rows, strict=True)


def _differs(
    prompt: list[int], setting: Setting, text: Written, logits: Sequence[Tensor], ends: Sequence[int]
) -> bool:
    """Whether the setting asks for another text than this one, whose tokens were chosen from these logits (V,)."""
    return any(
        int(choice(z_V, prompt, text.tokens[:i], setting, ends).argmax()) != text.tokens[i]
        for i, z_V in enumerate(logits)
    )


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
            for setting, text, logits in _written(target, prompt, tried):
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
