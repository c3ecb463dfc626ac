"""The checks of every option of a request (`decode.losslessness.settings`): a drafter's texts against those written without drafts
and without the engine.

Greedy and coupled outputs are compared token by token: a request alone, where only that can have the option, the others in one
batch. Verifiers that draw by themselves are asked for texts under options that leave few tokens: each token has to be one of them,
and another seed has to give another text. So a few tokens are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from align.kernels.linear import MOST_ROWS
from align.target.model import Target
from decode.engine import engine
from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.losslessness.conditionals import logits_of
from decode.losslessness.conditionals import outside as outside_of
from decode.losslessness.divergence import TIE, dtype_limit, examine
from decode.losslessness.law import Setting, Written, as_asked, choice, law, scores, write
from decode.losslessness.settings import Options, talk
from decode.losslessness.verdict import Check
from decode.speculation.sampling import Sampling

IMPOSSIBLE = -1e4
"""Stands for −∞ where differences are taken."""
UNLIKELY = 1e-6
"""A text that two seeds repeat with a lower probability is a bug, and so is a token among those that have so little together."""
FAR = 2**32 * 3**3 * 5**4 * 7 * 11 * 13
"""Between two seeds that are the same modulo every small number, power of two or of ten."""

Decoders = Callable[[Sequence[Setting]], Decoder]
"""The settings of requests → what answers them: greedy, or coupled where one of them draws."""


def same_options(
    method: str,
    options: Options,
    decoders: Decoders,
    settings: Sequence[Setting],
    bug: Any = nullcontext,
    name: str = "options, exact",
) -> Check:
    """Compare greedy and coupled outputs of a method, a request at a time, with what each setting asks for, while a bug may be
    planted."""
    tally = _Tally(options)
    for setting in settings:
        decoder = decoders([setting])
        with bug():
            expected = options.text(setting) if bug is nullcontext else write_again(options, setting)
            if setting.interrupted and _swallowed(decoder, options, setting, expected.text):
                tally.fail(setting)
            pieces: list[str] = []
            out = _answer(decoder, options, setting, pieces.append)
            tally.add(setting, expected, out)
        if "".join(pieces) != expected.text:
            tally.fail(setting)
    return tally.check(name, method, settings)


def batch_options(
    method: str,
    options: Options,
    decoders: Decoders,
    bug: Any = nullcontext,
    name: str = "options, batch",
    size: int | None = None,
) -> Check:
    """The same for the requests of a batch: each with settings of its own, then all of one setting, with the seeds that follow,
    given as a whole and by the names of its fields; then prompts as plain text.

    Args:
        size: requests of one target call; None: as many as are fast.
    """
    tally = _Tally(options)
    groups = options.together, options.alike, options.alike, options.raw
    for settings, named in zip(groups, (False, False, True, False), strict=True):
        decoder, first = decoders(settings), settings[0]
        own: dict[str, Any] = {
            "sampling": [s.sampling for s in settings],
            "max_new_tokens": [s.new for s in settings],
        }
        if settings is options.alike:
            asked = vars(first.sampling) if named else {"sampling": first.sampling}
            own = {**asked, "max_new_tokens": first.new, "stop": list(first.stop)}
        expected = [options.text(s) for s in settings]
        prompts: list[Any] = [s.raw or options.tokens(s) for s in settings]
        own["raw"] = bool(first.raw)
        with bug():
            outs = decoder.generate_batch(prompts, batch_size=size or together(decoder), **own)
        for setting, text, out in zip(settings, expected, outs, strict=True):
            tally.add(setting, text, out)
    return tally.check(name, method, [*options.together, *options.alike, *options.raw])


def together(decoder: Decoder) -> int:
    """Requests of one target call: as many as `align.kernels` takes, and some to follow them."""
    nodes = 0 if decoder.drafter is None else decoder.drafter.draft_nodes
    return max(2, min(6, MOST_ROWS // (nodes + 1)))


def write_again(options: Options, setting: Setting) -> Written:
    """The text that a setting asks for, not from memory: a bug may be planted in what writes it."""
    return write(options.target, options.tokens(setting), setting)


class _Tally:
    """Which settings were not answered as asked."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.wrong: list[str] = []
        self.ties = self.drafted = 0

    def fail(self, setting: Setting) -> None:
        if setting.name not in self.wrong:
            self.wrong.append(setting.name)

    def add(self, setting: Setting, expected: Written, out: Generation) -> None:
        """An answer, and what it has to be."""
        self.drafted += sum(out.nodes)
        found = _judged(self.options, setting, expected, out)
        if found is not None and found.kind == TIE:
            self.ties += 1
        elif (
            found is not None
            or (out.finish, out.text) != (expected.finish, expected.text)
            or out.prompt_tokens != len(self.options.tokens(setting))
            or not _same_gaps(self.options.target, setting, expected, out)
        ):
            self.fail(setting)

    def check(self, name: str, method: str, settings: Sequence[Setting]) -> Check:
        more = f"; {self.ties} rounding ties" if self.ties else ""
        return _said(name, method, settings, self.wrong, self.drafted, more)


def _same_gaps(target: Target, setting: Setting, expected: Written, out: Generation) -> bool:
    if not setting.gaps:
        return out.top2_gaps is None
    if out.top2_gaps is None or len(out.top2_gaps) != len(out.tokens):
        return False
    size = max(1.0, *(gap for gap in expected.gaps if gap < -IMPOSSIBLE))
    most = 8 * dtype_limit(target.dtype, torch.tensor([size]))
    return all(abs(a - b) <= most or a == b for a, b in zip(expected.gaps, out.top2_gaps, strict=True))


def _said(
    name: str, method: str, settings: Sequence[Setting], wrong: list[str], drafted: int, more: str = ""
) -> Check:
    words = f"{len(settings) - len(wrong)} of {len(settings)} as asked{more}"
    words += f"; NOT as asked: {', '.join(wrong)}" if wrong else ""
    words += "" if drafted else "; NOTHING DRAFTED, nothing shown"
    figures = {"drafted": drafted, "wrong": wrong, "settings": [s.name for s in settings]}
    return Check(name, method, not wrong, len(settings), figures, words)


@contextmanager
def in_pieces(size: int | None) -> Iterator[None]:
    """Inside this context the engine reads prompts in pieces of so many tokens; None = of its own."""
    own = engine.PREFILL_CHUNK
    engine.PREFILL_CHUNK = size or own
    try:
        yield
    finally:
        engine.PREFILL_CHUNK = own


def _answer(
    decoder: Decoder, options: Options, setting: Setting, stream: Callable[[str], object]
) -> Generation:
    """The engine's answer. `stream` gets the pieces of its text."""
    with as_asked(options.target, setting), in_pieces(setting.piece):
        return decoder.generate(
            setting.raw or talk(setting) or options.tokens(setting),
            max_new_tokens=setting.new,
            **(vars(setting.sampling) if setting.named else {"sampling": setting.sampling}),
            stop=setting.stop[0] if len(setting.stop) == 1 else setting.stop,
            stream=stream,
            record_gaps=setting.gaps,
            raw=bool(setting.raw),
        )


class _Interruption(Exception):
    """What a user's own `stream` raises."""


def _swallowed(decoder: Decoder, options: Options, setting: Setting, text: str) -> bool:
    """Whether an exception that `stream` raises once two thirds of the text are there does not reach who asked for it."""
    held = _Interruption()
    pieces: list[str] = []

    def stream(piece: str) -> None:
        pieces.append(piece)
        if 3 * len("".join(pieces)) >= 2 * len(text):
            raise held

    try:
        _answer(decoder, options, setting, stream)
    except _Interruption as error:
        return error is not held
    return bool(text)


def _judged(options: Options, setting: Setting, expected: Written, out: Generation) -> Any:
    """The first different token, a rounding tie or a bug; None = no difference."""
    target, prompt = options.target, options.tokens(setting)
    ends = target.eos_ids if setting.ends is None else setting.ends

    def score(z_V: Tensor, index: int) -> Tensor:
        return choice(z_V, prompt, expected.tokens[:index], setting, ends).nan_to_num(neginf=IMPOSSIBLE)

    calls = out.drafted, out.accepted, out.trees
    return examine(target, prompt, expected.tokens, out.tokens, *calls, score, alone=False)


def drawn_options(method: str, options: Options, decoder: Decoder, bug: Any = nullcontext) -> Check:
    """Draw texts under each setting of `Options.drawn`, with a method's own verifier, two alone and the others in one batch: is
    every token one that the setting allows, does another seed give another text, and is a text of the batch the one that its
    prompt, settings and seed give alone?"""
    target, prompt, wrong = options.target, options.prompt, []
    alone = [s for s in options.drawn if s.name == "seed" or s.ends is not None]
    seed = next(s for s in alone if s.name == "seed")
    others = [_with_seed(seed, more) for more in (1, 2, FAR)]
    batch = [others[0], *(s for s in options.drawn if s not in alone), seed, *others[1:]]
    alone.append(others[1])
    outs: list[tuple[Setting, Generation]] = []
    for setting in alone:
        with as_asked(target, setting), bug():
            out = decoder.generate(prompt, max_new_tokens=setting.new, sampling=setting.sampling)
        outs.append((setting, out))
    with bug():
        found = decoder.generate_batch(
            [prompt] * len(batch),
            batch_size=together(decoder),
            max_new_tokens=[s.new for s in batch],
            sampling=[s.sampling for s in batch],
        )
    outs += zip(batch, found, strict=True)
    logits = logits_of(target, prompt, [out for _, out in outs])
    free: list[tuple[list[int], float]] = []
    for (setting, out), logits_LV in zip(outs, logits, strict=True):
        with as_asked(target, setting):
            outside, probability = _seen(target, prompt, out, setting.sampling, logits_LV)
        if outside:
            wrong.append(setting.name)
        if setting.name == seed.name:
            free.append((out.tokens, probability))
    one, two, *rest = free  # seed and others[1] alone, others[0], seed again, others[1] again, others[2]
    if any(a[0] == b[0] and a[1] < UNLIKELY for a, b in combinations([one, two, rest[0], rest[3]], 2)):
        wrong.append(seed.name)
    # either might fall on another side of a draw by rounding, but not both
    twins = [out for setting, out in outs if setting in (seed, others[1])]
    if all(_parted(a, b) for a, b in zip(twins[:2], twins[2:], strict=True)):
        wrong.append("alone and in a batch")
    drafted = sum(sum(out.nodes) for _, out in outs)
    return _said("options, drawn", method, options.drawn, list(dict.fromkeys(wrong)), drafted)


def _parted(one: Generation, other: Generation) -> bool:
    """Whether texts part, where as much was drafted for both: a drafter may look at the clock."""
    end = 1
    if one.tokens[:end] != other.tokens[:end]:
        return True
    for (drafted, accepted), (its, also) in zip(
        zip(one.drafted, one.accepted, strict=True),
        zip(other.drafted, other.accepted, strict=True),
        strict=False,
    ):
        if drafted != its:
            return False
        end += 1 + accepted
        if accepted != also or one.tokens[:end] != other.tokens[:end]:
            return True
    return False


def _with_seed(setting: Setting, more: int) -> Setting:
    seed = (setting.sampling.seed + more) % 2**63
    return replace(setting, sampling=replace(setting.sampling, seed=seed))


def _seen(
    target: Target, prompt: list[int], out: Generation, sampling: Sampling, logits_LV: Tensor
) -> tuple[int, float]:
    """How many tokens of a text the settings do not allow, or almost never, and the text's probability."""
    tokens_L1 = torch.tensor(out.tokens, device=target.device)[:, None]
    z_LV = scores(logits_LV, prompt, out.tokens, sampling, target.eos_ids)
    p_LV = law(z_LV, sampling)
    p_L1 = p_LV.gather(1, tokens_L1)
    rare = (p_LV.masked_fill(p_LV > p_L1, 0.0).sum(1) < UNLIKELY) & (p_L1[:, 0] > 0)
    return outside_of(z_LV, p_LV, tokens_L1[:, 0]) + int(rare.sum()), float(p_L1.prod())
