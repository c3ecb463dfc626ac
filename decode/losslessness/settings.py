"""What `decode.verify` asks for: every option of a request, one at a time and all together, each so that dropping it changes the
text, or one of its values; and the texts that have to come (`decode.losslessness.law`), which no drafter and no engine has written.

Some are found by looking (`decode.losslessness.searched`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from align.target.model import Target
from decode.losslessness.conditionals import logits_of
from decode.losslessness.law import Setting, Written, write, write_all
from decode.losslessness.searched import (
    DEEP,
    HOT,
    IN_A_ROUND,
    NEW,
    after_an_interruption,
    at_length,
    at_the_edge,
    cold,
    crossing,
    in_a_round,
    twice,
    usual,
)
from decode.speculation.sampling import Sampling

FEW = 6
"""Tokens of a text whose settings leave few possible."""
SHORT = 24
"""Tokens of a prompt's end that texts continue: reading prompts would take most of the time."""
LONG, LONG_NEW = 540, 16
"""Tokens in front of a text in a long context, less where the target's is shorter; tokens of that text."""
LONGER, LONGER_NEW = 2110, 4
"""The same of one prompt that is read in several pieces, where these are the engine's own; tokens of that text."""
OLD = 6
"""Tokens at the beginning of that prompt which a repetition penalty has to remember."""
FAR_SEED = 2**60 + 1
"""Added to one seed: the sum is longer than 32 bits, and than what a floating-point number holds."""
RAW = ("The best way to begin is", "Once, in a town by the sea,")
TALK = (
    ("system", "Answer in one line."),
    ("user", "Name a colour."),
    ("assistant", "Red."),
    ("user", "One more."),
)
NEVER = "\u2603\u2603"
"""A string that no text holds."""


class Options:
    """The settings, and the texts that they ask for, written when the first is needed.

    Args:
        prompts: in tokens; the ends of the first three are continued, and a long one is made of all.
        piece: tokens of a piece in which the engine reads the longest prompt, which has `LONG` tokens then; 0 = the engine's own, of
            `LONGER`, whose reading takes long.
    """

    def __init__(self, target: Target, prompts: Sequence[list[int]], seed: int, piece: int = 0) -> None:
        self.target, self.prompts = target, [prompt[-SHORT:] for prompt in prompts[:3]]
        self.prompt = self.prompts[0]
        self.said = said = write(target, self.prompt, Setting("", Sampling(), NEW, ends=()))
        own, other = ((seed + offset) % 2**63 for offset in (77_003, 91_009))
        lengthy = at_length(target, self.prompt, said, own)
        self._written = {setting.name: text for setting, text in lengthy}
        self.exact = [*_greedy(target, self.prompt, said), *_coupled(target, self.prompt, said, own)]
        self.exact += [setting for setting, _ in lengthy]
        self.raw = [Setting(f"raw prompt {i}", Sampling(), 4, raw=raw) for i, raw in enumerate(RAW)]
        self.together = [s for s in self.exact if _shared(s)] + self._others(own)
        self.alike = _alike(target, self.prompts, own)
        self.drawn = _drawn(said.tokens, other)
        self.long = _long(target, prompts, own, piece)

    @property
    def alone(self) -> list[Setting]:
        """The settings that requests of one batch can't have beside others, and all options together. What shows in scripted drafts
        alone is left out."""
        chosen = [s for s in self.exact if not _shared(s) or s.name == "all together"]
        return [s for s in chosen if not s.name.endswith(IN_A_ROUND) and s.drafts != DEEP]

    def text(self, setting: Setting) -> Written:
        """What a setting asks for."""
        if setting.name not in self._written:
            others = *self.exact, *self.together, *self.alike, *self.raw
            group = self.long if setting in self.long else others
            settings = list({s.name: s for s in group if s.name not in self._written}.values())
            texts = write_all(self.target, [(self.tokens(s), s) for s in settings])
            self._written |= {s.name: text for s, text in zip(settings, texts, strict=True)}
        return self._written[setting.name]

    def tokens(self, setting: Setting) -> list[int]:
        """The prompt, in tokens."""
        if setting.messages:
            return self.target.chat_tokens(talk(setting))
        return self.target.text_tokens(setting.raw) if setting.raw else list(setting.prompt or self.prompt)

    def _others(self, seed: int) -> list[Setting]:
        """Requests that differ from those of `exact` in prompt, length or seed."""
        last = tuple(self.prompts[-1][1:])
        another = Setting("another seed", Sampling(2.0, seed=(seed + 1) % 2**63), NEW)
        # beside requests that draw alike and ban nothing: what they write
        banned = tuple(sorted({*write(self.target, self.prompt, another).tokens}))
        return [
            another,
            Setting("banned tokens beside others", replace(another.sampling, seed=(seed + 3) % 2**63, banned=banned), NEW),
            Setting("another prompt", Sampling(), NEW - 3, prompt=last),
            Setting("another prompt, seed", Sampling(1.0, seed=(seed + 2) % 2**63), NEW, prompt=last, drafts=DEEP),
        ]  # fmt: skip


def talk(setting: Setting) -> list[dict[str, str]]:
    """The conversation of a setting."""
    return [{"role": role, "content": content} for role, content in setting.messages]


def _shared(setting: Setting) -> bool:
    """Whether requests of one batch can have the setting beside others."""
    own = setting.stop, setting.raw, setting.messages, setting.gaps, setting.ends is not None, setting.context
    return not any((*own, setting.named, setting.interrupted))


def _greedy(target: Target, prompt: list[int], said: Written) -> list[Setting]:
    """`said`: the plain greedy text."""
    tokens, text, size = said.tokens, said.text, target.vocab_size
    first_V = next(iter(logits_of(target, prompt, [said])))[0]
    best = [int(i) for i in first_V.topk(4).indices]
    banned = dict.fromkeys([best[1], *tokens[1:], *best])  # dropping any of the best changes the first token
    late = max(i for i, token in enumerate(tokens) if token not in tokens[:i])
    unused = [i for i in range(size) if i not in tokens]
    ends = (unused[0], tokens[late], unused[-1])
    early, later = text[len(text) // 2 :][:3] or text[:1], text[2 * len(text) // 3 :][:3]
    greedy = [
        Setting("repetition penalty", Sampling(repetition_penalty=2.0), NEW),
        # a bonus shows within three tokens, a penalty only where the text repeats itself
        Setting("presence penalty", Sampling(presence_penalty=-30.0), NEW),
        Setting("banned tokens", Sampling(banned=tuple(banned)), NEW),
        Setting("end of text", Sampling(), NEW, ends=ends),
        Setting("minimum length", Sampling(min_new_tokens=NEW - 3), NEW, ends=tuple(sorted(set(tokens)))),
        Setting("length", Sampling(), NEW // 2 + 1, ends=()),
        Setting("context", Sampling(), NEW, ends=(), context=len(prompt) + NEW // 2),
        Setting("raw prompt", Sampling(), 4, raw=RAW[0]),
        Setting("conversation", Sampling(), 4, messages=TALK),
    ]
    if early:
        greedy.append(Setting("stop string", Sampling(), NEW, (early,), ends=()))
        stops = NEVER, *([later] if later else []), early, NEVER[0] + "x"
        greedy.append(Setting("stop strings", Sampling(), NEW, stops, ends=()))
    return greedy


def _coupled(target: Target, prompt: list[int], said: Written, seed: int) -> list[Setting]:
    hot = partial(Sampling, 2.0, seed=seed)
    everything = Sampling(
        1.2, 0.95, 50, 1.3, seed, 0.02, 0.5, banned=tuple({*said.tokens[:2]}), min_new_tokens=NEW // 2
    )  # fmt: skip
    return [
        Setting("temperature, seed", hot(), NEW),
        # lowered to a temperature of a usual kind it gives another text
        Setting("hot, seed", Sampling(HOT, seed=(seed + FAR_SEED) % 2**63), NEW),
        Setting("top-k", hot(top_k=2), NEW),
        Setting("top-k, one", hot(top_k=1), NEW),
        Setting("top-k, top-p", hot(top_k=20, top_p=0.5), NEW),
        Setting("top-p", hot(top_p=0.5), NEW),
        Setting("min-p", hot(min_p=0.5), NEW),
        Setting("all together", everything, NEW),
        Setting("all together, gaps", everything, NEW, gaps=True),
        Setting("all together, by name", everything, NEW, named=True),
        after_an_interruption(target, prompt, seed),
        *usual(target, prompt, seed),
        *at_the_edge(target, prompt, seed),
        *crossing(target, prompt, seed),
        twice(target, prompt, seed),
        *cold(target, prompt, said, seed),
        *in_a_round(target, prompt, seed),
    ]


def _alike(target: Target, prompts: Sequence[list[int]], seed: int) -> list[Setting]:
    """Three requests of one `Sampling`, with the seeds that `generate_batch` gives them, and one list of stop strings: the first of
    them in no text, another one in the last."""
    three = [prompts[0], prompts[0], prompts[-1]]
    settings = [
        Setting(f"request {i} of one setting", Sampling(1.5, seed=(seed + 7 + i) % 2**63), NEW, prompt=tuple(own))
        for i, own in enumerate(three)
    ]  # fmt: skip
    texts = [text.text for text in write_all(target, list(zip(three, settings, strict=True)))]
    stops = tuple(text[len(text) // 2 :][:3] for text in texts[1:] if text)
    return [replace(setting, stop=(NEVER, *(s for s in stops if s))) for setting in settings]


def _drawn(said: list[int], seed: int) -> list[Setting]:
    """The settings under which few tokens are possible, and so few texts are needed; and one for several seeds, under which every
    token is."""
    hot = partial(Sampling, 3.0, seed=seed)
    usual = tuple(sorted(set(said)))
    return [
        Setting("seed", hot(), FEW),
        Setting("top-k", hot(top_k=2), FEW),
        Setting("top-k, one", hot(top_k=1), FEW),
        Setting("top-p", hot(top_p=0.3), FEW),
        Setting("min-p", hot(min_p=0.6), FEW),
        Setting("banned tokens", Sampling(0.3, banned=usual, seed=seed), FEW),
        Setting("cold", Sampling(0.05, seed=seed), FEW),
        Setting("minimum length", Sampling(0.3, min_new_tokens=FEW - 2, seed=seed), FEW, ends=usual),
    ]


def _long(target: Target, prompts: Sequence[list[int]], seed: int, piece: int) -> list[Setting]:
    """A greedy and a coupled text after several hundred tokens; and one after a prompt that is read in pieces, in which the best
    tokens are those that only its beginning holds: without them the repetition penalty favours others."""
    every = [token for prompt in prompts for token in prompt]
    length = max(1, min(LONG, target.context_limit - LONG_NEW))
    prompt = tuple((every * (length // len(every) + 1))[:length])
    return [
        Setting("long context", Sampling(), LONG_NEW, ends=(), prompt=prompt, gaps=True),
        Setting("long context, seed", Sampling(1.0, seed=seed), LONG_NEW, ends=(), prompt=prompt, gaps=True),
        *_longer(target, every, prompts[0][-SHORT:], piece),
    ]


def _longer(target: Target, every: list[int], end: list[int], piece: int) -> Iterator[Setting]:
    """None where the context is so short that no prompt is read in pieces."""
    if target.context_limit < 4 * SHORT:
        return
    said = write(target, end, Setting("", Sampling(), 1, ends=()))
    ranked = next(iter(logits_of(target, end, [said])))[0].argsort(descending=True).tolist()
    length = max(1, min(LONG if piece else LONGER, target.context_limit - LONGER_NEW) - OLD - len(end))
    middle = (every * (length // len(every) + 1))[:length]
    common = tuple(sorted({*middle, *end}))
    fresh = [token for token in ranked if token not in common]
    old = fresh[OLD : 2 * OLD]  # never the very best ones, which would come without the penalty too
    sampling = Sampling(repetition_penalty=0.1, banned=common)
    prompt = (*old, *middle, *end)
    yield Setting("long prompt", sampling, LONGER_NEW, ends=(), prompt=prompt, gaps=True, piece=piece or None)
