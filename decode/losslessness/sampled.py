"""Texts drawn with a drafter, tested token by token against the target's own distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from align.common.text import plural
from decode.drafters.base import Request
from decode.engine import engine
from decode.engine.decoder import Decoder
from decode.engine.engine import Call, Engine
from decode.losslessness.cases import VerifyConfig
from decode.losslessness.compared import Planted
from decode.losslessness.conditionals import Tally
from decode.losslessness.options import together
from decode.losslessness.verdict import Check
from decode.speculation.sampling import Sampling
from decode.speculation.verification import Outcome, Round
from decode.wrappers.recorded import RecordedDrafter

SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.5": {"temperature": 0.5},
    "T=0.1": {"temperature": 0.1},
    "T=1.5, top-p, penalties": {
        "temperature": 1.5, "top_p": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5,
    },
}  # fmt: skip
"""The settings under which texts are sampled, by name."""


LENGTH = 24
"""Tokens of a sampled text; more where the first token, a whole draft and two more tokens need more."""


SAMPLES_TOGETHER = 16
"""Sampled texts in one target call where `align.kernels` sets no smaller number; greedy and coupled outputs are decoded one at a
time."""


PORTION = 48
"""Sampled texts whose drafts are in memory at one time."""


@contextmanager
def _watched(seen: set[bytes], repeated: list[str]) -> Iterator[None]:
    """Adds to `repeated` for each round, of any text, whose drafts or whose verification begin with random numbers with
    which others began. Every round draws some, and no two texts have one seed, so a right engine has none. One such round in a text is
    little for statistics to see.

    Args:
        seen: what the generators were at such places.
        repeated: where a state came again, "drafts" or "verification".
    """
    begin, verify = Engine.begin_round, engine.verify_rounds
    last: dict[int, bytes] = {}

    def note(one: Round | Request, drafted: bool) -> None:
        if one.noise is not None:
            return  # then nothing is drawn
        state = hashlib.sha256(one.generator.get_state().numpy().tobytes()).digest()
        drew_nothing = drafted and last.get(id(one.generator)) == state  # drafts may
        if state in seen and not drew_nothing:
            repeated.append("verification" if drafted else "drafts")
        seen.add(state)
        last[id(one.generator)] = state

    def begun(self: Engine) -> Call:
        note(self.request, False)
        return begin(self)

    def verified(rounds: Sequence[Round]) -> list[Outcome]:
        for one in rounds:
            note(one, True)
        return verify(rounds)

    Engine.begin_round, engine.verify_rounds = begun, verified  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.begin_round, engine.verify_rounds = begin, verify  # type: ignore[method-assign]


def sampled_texts(
    method: str,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    config: VerifyConfig,
    alpha: float,
    bug: Planted = nullcontext,
) -> Check:
    """Test sampled texts under each of `SETTINGS`, token by token, against the target's own distribution. A bug may be planted
    while they are drawn."""
    target, drafter = decoder.target, decoder.drafter
    length = max(LENGTH, drafter.draft_tokens + 3) if drafter is not None else LENGTH
    settings = {name: Sampling(**options) for name, options in SETTINGS.items()}
    places = [(p, name) for name in settings for p in range(len(prompts))]
    texts = [
        (*places[i % len(places)], (config.seed + 1_000_003 * (i + 1)) % 2**63) for i in range(config.samples)
    ]
    tally, accepted, drafted = Tally(), 0, 0
    seen, repeated = set[bytes](), list[str]()
    for start in range(0, len(texts), PORTION):
        part = texts[start : start + PORTION]
        recorded = None if drafter is None else RecordedDrafter(drafter)
        with _watched(seen, repeated), bug():
            outs = Decoder(target, recorded, decoder.verifier).generate_batch(
                [prompts[p] for p, _, _ in part],
                batch_size=together(decoder) if target.fused else SAMPLES_TOGETHER,
                max_new_tokens=length,
                sampling=[replace(settings[name], seed=seed) for _, name, seed in part],
            )
        rounds = [[] for _ in part] if recorded is None else [s.rounds for s in recorded.sessions]
        for p, name in dict.fromkeys((p, name) for p, name, _ in part):
            own = [i for i, text in enumerate(part) if text[:2] == (p, name)]
            tally.add(
                target, prompts[p], [outs[i] for i in own], [rounds[i] for i in own], settings[name], name
            )
        accepted += sum(sum(out.accepted) for out in outs)
        drafted += sum(sum(out.nodes) for out in outs)
    statistic, group, worst = tally.worst()
    least, least_whole = tally.least("all", alpha), tally.least("whole", alpha)
    figures = {
        "drafted": drafted, "accepted": accepted, "tokens": tally.tokens("all"), "whole": tally.tokens("whole"),
        "impossible": tally.impossible, "repeated": len(repeated), "worst": [statistic, group], "p": worst.p_value, "comparisons": len(tally.sums),
        "sees": least, "sees_whole": least_whole if least_whole < 1 else None,
    }  # fmt: skip
    passed = not repeated and tally.passed(alpha)
    return Check("sampled", method, passed, config.samples, figures, in_words(figures, drafter is not None))


def in_words(figures: Mapping[str, Any], drafts: bool) -> str:
    """What the figures of `sampled_texts` say; `drafts`: whether there is a drafter."""
    (statistic, group), drafted = figures["worst"], figures["drafted"]
    words = [f"{figures['tokens']} tokens"]
    if figures["impossible"]:
        words.append(f"{figures['impossible']} of them have no probability under the target")
    if figures["repeated"]:
        words.append(f"{plural(figures['repeated'], 'round')} drawn with random numbers of an earlier one")
    words.append(f"least likely: {statistic!r} of {_GROUPS.get(group, group)}, p {figures['p']:.2g}")
    if drafts:
        accepted = f"{figures['accepted']} of {drafted} drafts accepted"
        words.append(accepted if drafted else "NOTHING DRAFTED, nothing shown")
    words.append(f"sees a shift of {figures['sees']:.2f} per token")
    if drafted:
        sees = figures["sees_whole"]
        whole = "none" if sees is None else f"one of {sees:.2f}"
        words.append(f"{whole} after a whole draft ({figures['whole']} tokens)")
    return "; ".join(words)


_GROUPS = {"all": "all tokens", "whole": "tokens after a whole draft"}
