"""Every option of `Sampling` and of `Decoder.generate`, one at a time and all together, against texts and supports that are written
without the engine (`decode.losslessness.law`).

Greedy and coupled outputs are compared token by token. Verifiers that draw by themselves are asked for texts under options that
leave few tokens: each token has to be one of them, and another seed has to give another text. So a few tokens are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from align.target.model import Target
from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.losslessness.conditionals import logits_of
from decode.losslessness.conditionals import outside as outside_of
from decode.losslessness.divergence import TIE, examine
from decode.losslessness.law import Setting, Written, as_asked, choice, law, scores, write
from decode.losslessness.verdict import Check
from decode.reporting.records import Divergence
from decode.speculation.sampling import Sampling

NEW = 12
"""Tokens of a text."""
FEW = 8
"""Tokens of a text whose settings leave few possible."""
RAW = "The best way to begin is"
IMPOSSIBLE = -1e4
"""Stands for −∞ where differences are taken."""
UNLIKELY = 1e-6
"""A text that two seeds repeat with a lower probability is a bug."""


class Options:
    """The settings of one prompt, and the texts that they ask for, each written when it is first needed."""

    def __init__(self, target: Target, prompt: list[int], seed: int) -> None:
        self.target, self.prompt = target, prompt
        said = write(target, prompt, Setting("", Sampling(), NEW, ends=())).tokens
        self.exact = _exact(target, prompt, said, (seed + 77_003) % 2**63)
        self.drawn = _drawn(said, (seed + 91_009) % 2**63)
        self._written: dict[str, Written] = {}

    def text(self, setting: Setting) -> Written:
        if setting.name not in self._written:
            self._written[setting.name] = write(self.target, self.tokens(setting), setting)
        return self._written[setting.name]

    def tokens(self, setting: Setting) -> list[int]:
        """The prompt, in tokens."""
        return self.target.text_tokens(setting.raw) if setting.raw else self.prompt


def _exact(target: Target, prompt: list[int], said: list[int], seed: int) -> list[Setting]:
    """The settings of greedy and of coupled outputs, each so that dropping the option changes the text. `said`: the plain greedy
    text."""
    text = target.decode(said)
    stop = text[len(text) // 2 :][:3] or text[:1]
    late = max(i for i, token in enumerate(said) if token not in said[:i])
    hot = partial(Sampling, 2.0, seed=seed)
    everything = Sampling(
        1.2, 0.95, 50, 1.3, seed, 0.02, 0.5, banned=tuple({*said[:2]}), min_new_tokens=NEW // 2
    )  # fmt: skip
    greedy = [
        Setting("repetition penalty", Sampling(repetition_penalty=2.0), NEW),
        # a bonus shows within three tokens, a penalty only where the text repeats itself
        Setting("presence penalty", Sampling(presence_penalty=-30.0), NEW),
        Setting("banned tokens", Sampling(banned=tuple(sorted(set(said)))), NEW),
        Setting("end of text", Sampling(), NEW, ends=(said[late],)),
        Setting("minimum length", Sampling(min_new_tokens=NEW - 3), NEW, ends=tuple(sorted(set(said)))),
        Setting("length", Sampling(), NEW // 2 + 1, ends=()),
        Setting("context", Sampling(), NEW, ends=(), context=len(prompt) + NEW // 2),
        Setting("raw prompt", Sampling(), 4, raw=RAW),
    ]
    greedy += [Setting("stop string", Sampling(), NEW, (stop,), ends=())] if stop else []
    return [
        *greedy,
        Setting("temperature, seed", hot(), NEW),
        Setting("top-k", hot(top_k=2), NEW),
        Setting("top-p", hot(top_p=0.5), NEW),
        Setting("min-p", hot(min_p=0.5), NEW),
        Setting("all together", everything, NEW),
    ]


def _drawn(said: list[int], seed: int) -> list[Setting]:
    """The settings under which few tokens are possible, and so few texts are needed; and one for two seeds, under which every token is."""
    hot = partial(Sampling, 3.0, seed=seed)
    usual = tuple(sorted(set(said)))
    return [
        Setting("seed", hot(), FEW),
        Setting("top-k", hot(top_k=2), FEW),
        Setting("top-p", hot(top_p=0.3), FEW),
        Setting("min-p", hot(min_p=0.6), FEW),
        Setting("banned tokens", Sampling(0.3, banned=usual, seed=seed), FEW),
        Setting("minimum length", Sampling(0.3, min_new_tokens=FEW - 2, seed=seed), FEW, ends=usual),
    ]


def same_options(
    method: str,
    options: Options,
    greedy: Decoder,
    coupled: Decoder,
    bug: Any = nullcontext,
    only: str | None = None,
) -> Check:
    """Compare greedy and coupled outputs of a method with what each setting asks for, while a bug may be planted. `only`: the name
    of one setting."""
    settings = [s for s in options.exact if only is None or s.name == only]
    wrong, ties, drafted = [], 0, 0
    for setting in settings:
        decoder = greedy if setting.sampling.greedy else coupled
        with bug():
            expected = options.text(setting) if bug is nullcontext else write_again(options, setting)
            out, streamed = _answer(decoder, options, setting)
            found = _judged(options, setting, expected, out)
        drafted += sum(out.nodes)
        ended = (out.finish, out.text, streamed) == (expected.finish, expected.text, expected.text)
        if found is not None and found.kind == TIE:
            ties += 1
        elif found is not None or not ended or out.prompt_tokens != len(options.tokens(setting)):
            wrong.append(setting.name)
    return _said(
        "options, exact", method, settings, wrong, drafted, f"; {ties} rounding ties" if ties else ""
    )


def write_again(options: Options, setting: Setting) -> Written:
    """The text that a setting asks for, not from memory: a bug may be planted in what writes it."""
    return write(options.target, options.tokens(setting), setting)


def _said(
    name: str, method: str, settings: Sequence[Setting], wrong: list[str], drafted: int, more: str = ""
) -> Check:
    names = ", ".join(s.name for s in settings)
    words = f"{len(settings) - len(wrong)} of {len(settings)} as asked ({names}){more}"
    words += f"; NOT as asked: {', '.join(wrong)}" if wrong else ""
    words += "" if drafted else "; NOTHING DRAFTED, nothing shown"
    return Check(name, method, not wrong, len(settings), {"drafted": drafted, "wrong": wrong}, words)


def _answer(decoder: Decoder, options: Options, setting: Setting) -> tuple[Generation, str]:
    """The engine's answer, and the text that it streamed."""
    pieces: list[str] = []
    with as_asked(options.target, setting):
        out = decoder.generate(
            setting.raw or options.prompt,
            max_new_tokens=setting.new,
            sampling=setting.sampling,
            stop=setting.stop,
            stream=pieces.append,
            raw=bool(setting.raw),
        )
    return out, "".join(pieces)


def _judged(options: Options, setting: Setting, expected: Written, out: Generation) -> Divergence | None:
    """The first different token, a rounding tie or a bug."""
    target, prompt = options.target, options.tokens(setting)
    ends = target.eos_ids if setting.ends is None else setting.ends

    def score(z_V: Tensor, index: int) -> Tensor:
        return choice(z_V, prompt, expected.tokens[:index], setting, ends).nan_to_num(neginf=IMPOSSIBLE)

    return examine(target, prompt, expected.tokens, out.tokens, out.drafted, out.accepted, out.trees, score)


def drawn_options(method: str, options: Options, decoder: Decoder, bug: Any = nullcontext) -> Check:
    """Draw texts under each setting of `Options.drawn`, with a method's own verifier: is every token one that the setting allows,
    and does another seed give another text?"""
    target, prompt, wrong, drafted = options.target, options.prompt, [], 0
    for setting in options.drawn:
        with as_asked(target, setting), bug():
            twice = [0, 1] if setting.name == "seed" else [0]
            outs = [
                decoder.generate(
                    prompt,
                    max_new_tokens=setting.new,
                    sampling=replace(setting.sampling, seed=(setting.sampling.seed + i) % 2**63),
                )
                for i in twice
            ]
        drafted += sum(sum(out.nodes) for out in outs)
        with as_asked(target, setting):
            seen = [_seen(target, prompt, out, setting.sampling) for out in outs]
        wrong += [setting.name] if any(outside for outside, _ in seen) else []
        if len(outs) == 2 and outs[0].tokens == outs[1].tokens and seen[0][1] < UNLIKELY:
            wrong.append(setting.name)
    return _said("options, drawn", method, options.drawn, wrong, drafted)


def _seen(target: Target, prompt: list[int], out: Generation, sampling: Sampling) -> tuple[int, float]:
    """How many tokens of a text the settings do not allow, and the text's probability."""
    (logits_LV,) = logits_of(target, prompt, [out])
    tokens_L = torch.tensor(out.tokens, device=target.device)
    z_LV = scores(logits_LV, prompt, out.tokens, sampling, target.eos_ids)
    p_LV = law(z_LV, sampling)
    return outside_of(z_LV, p_LV, tokens_L), float(p_LV.gather(1, tokens_L[:, None]).prod())
