"""The requests that are decoded and checked: every request option, every stopping condition, long
contexts and long texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from decode.engine.decoder import Decoder
from decode.engine.detokenizer import UNFINISHED
from decode.engine.engine import PREFILL_CHUNK
from decode.speculation.sampling import Sampling
from specalign.common.schema import JsonObject
from specalign.lm.model import Target

SHORT = 8  # tokens of a prompt, counted from its end, that most requests continue
LONG, PAST_WINDOW, LONGEST = 320, 40, 2048
"""The least length of the long prompt, which exceeds the largest window of attention by at least so
many tokens, up to the longest."""
LONG_TEXT = 64  # tokens of the long text
TOGETHER = 5  # requests in one target forward
TWO_TOKENS = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1)
"""A prompt of two tokens in which every three of them occur. In a text of two tokens long paths are
accepted, and whatever it ends with can be copied."""
CHUNK = 96  # tokens of a prompt in one forward pass of the long contexts, so that there are several
MOST_HALVES = 128  # half characters of a vocabulary among which two are sought that are one
EVEN = 10.0  # a temperature at which tokens of very different probabilities occur


@dataclass(frozen=True)
class Asked:
    """A request: what `Decoder.generate` is asked for. eos, context: in place of the target's
    own."""

    prompt: tuple[int, ...]
    sampling: Sampling
    new: int
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] | None = None
    context: int | None = None


@dataclass(frozen=True)
class RequestBatch:
    """Requests that are decoded together, `size` in one forward pass, `chunk` tokens of a
    prompt."""

    name: str
    decoder: Decoder
    asked: tuple[Asked, ...]
    size: int = TOGETHER
    chunk: int = PREFILL_CHUNK


def settings(seed: int, common: Sequence[int]) -> list[Sampling]:
    """Every request option with at least two values, and all options together. `common`: tokens
    that the target generates often."""
    values: dict[str, Sequence[Any]] = {
        "temperature": (0.3, 1.7), "top_k": (4, 50), "top_p": (0.5, 0.9), "min_p": (0.02, 0.3),
        "repetition_penalty": (1.4, 0.8), "presence_penalty": (0.8, -0.6),
        "banned": (tuple(common[:1]), tuple(common[:3])), "min_new_tokens": (3, 7),
    }  # fmt: skip
    together = {
        "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.4, "banned": tuple(common[1:2]), "min_new_tokens": 5,
    }  # fmt: skip
    options: list[JsonObject] = [{}, *({name: x} for name in values for x in values[name])]
    options += [{**together, "temperature": 0.6}, {**together, "temperature": 1.3, "top_p": 0.8}]
    first: JsonObject = {"temperature": 1.0}
    return [Sampling(**{**first, "seed": seed + i, **one}) for i, one in enumerate(options)]


class Requests:
    """The batches of a run. `short`: the ends of the prompts; `common`: tokens of greedy texts, the
    most frequent first; `letters`: two tokens that are drafted often."""

    def __init__(self, target: Target, prompts: list[list[int]]) -> None:
        self.target, self.prompts = target, prompts
        self.short = [tuple(prompt[-SHORT:]) for prompt in sorted(prompts, key=len)]
        self.common: list[int] = []
        self.letters: list[int] = []

    def batches(
        self, decoders: Mapping[str, Decoder], compared: Sequence[str], plain: Decoder
    ) -> Iterator[RequestBatch]:
        """All batches. compared: the names of those that are decoded greedily and coupled, too."""
        every = settings(1000, self.common)
        cold = [replace(one, temperature=0.0) for one in every[len(every) // 2 :: 2]]
        for number, (name, decoder) in enumerate(decoders.items()):
            # every option with the first one; after that each takes a part
            chosen = every if number == 0 else every[number % 4 :: 4] + every[-1:]
            yield RequestBatch(f"{name}: sampled", decoder, self.at(chosen))
            yield RequestBatch(f"{name}: two tokens", decoder, self.of_letters(2000))
            greedy, coupled = (Decoder(self.target, decoder.drafter, x) for x in ("auto", "gumbel"))
            if name in compared:
                yield RequestBatch(f"{name}: greedy", greedy, self.at(cold))
                both = (*self.at(every[1::5]), *self.of_letters(2000))
                yield RequestBatch(f"{name}: coupled", coupled, both)
            if number == 0:
                yield self._long_context(f"{name}: coupled", coupled, Sampling(1.0, seed=7))
                long = Asked(self.short[0], every[-1], LONG_TEXT)
                yield RequestBatch(f"{name}: long text", decoder, (long,), 1)
            if name == compared[-1]:
                yield self._long_context(name, greedy, Sampling())
                yield RequestBatch(f"{name}: ends", greedy, tuple(self.ends(plain)))

    def at(self, chosen: Sequence[Sampling]) -> tuple[Asked, ...]:
        """A request at each of the settings."""
        asked = []
        for i, sampling in enumerate(chosen):
            prompt = self.short[i % len(self.short)]
            if i % 3 == 1:
                prompt = prompt[-4:] * 2  # something to copy
            eos = tuple(self.common[:2]) if sampling.min_new_tokens else None
            new = max(8 + 3 * (i % 3), sampling.min_new_tokens + 1)
            asked.append(Asked(prompt, sampling, new, eos=eos))
        return tuple(asked)

    def of_letters(self, seed: int) -> tuple[Asked, ...]:
        """Requests whose texts consist of two tokens: one setting and consecutive seeds."""
        prompt = tuple(self.letters[i] for i in TWO_TOKENS)
        own = self._of_tokens(self.letters, 1.0, seed)
        return tuple(Asked(prompt, replace(own, seed=seed + i), 14) for i in range(3))

    def _of_tokens(self, tokens: Sequence[int], temperature: float, seed: int) -> Sampling:
        """Settings under which a text consists of these tokens alone."""
        banned = tuple(i for i in range(self.target.vocab_size) if i not in tokens)
        return Sampling(temperature, seed=seed, banned=banned)

    def _long_context(self, name: str, decoder: Decoder, sampling: Sampling) -> RequestBatch:
        """The longest prompt, or if it is short, all of them again and again; and its second
        half."""
        names = ("sliding_window", "attention_chunk_size")
        window = max(getattr(self.target.config, name, None) or 0 for name in names)
        room = max(LONG, min(window + PAST_WINDOW, LONGEST))
        room = min(room, self.target.context_limit - 16)
        long = max(self.prompts, key=len)
        if len(long) < room:
            together = sum(self.prompts, [])
            long = (together * (1 + room // len(together)))[:room]
        asked = tuple(Asked(tuple(x), sampling, 10) for x in (long, long[-len(long) // 2 :]))
        return RequestBatch(f"{name}: long context", decoder, asked, 2, CHUNK)

    def ends(self, plain: Decoder) -> Iterator[Asked]:
        """Requests that end in every way, at every place of a block."""
        tokenizer, size = self.target.tokenizer, self.target.vocab_size
        greedy = Asked(self.short[0], Sampling(), 12)
        text = plain.generate(list(greedy.prompt), max_new_tokens=12).tokens
        unused = next(i for i in range(size - 1, 0, -1) if i not in text)
        words = self.target.detokenize(text)
        stops = (words[12:15] or "x", "never there", words[6:9] or "y")
        yield from (replace(greedy, new=new) for new in (5, 3, 2, 1))
        yield from (replace(greedy, context=len(greedy.prompt) + room) for room in (1, 3, 6))
        yield from (replace(greedy, eos=(token,)) for token in text[1:6])
        yield from (replace(greedy, eos=(unused, token, text[-1])) for token in text[1:4])
        starts = range(1, min(len(words) - 4, 20), 5)
        yield from (replace(greedy, stop=(words[at : at + 4],)) for at in starts)
        yield replace(greedy, stop=stops)
        for special in [i for i in tokenizer.all_special_ids if i < size][:1]:
            own = self._of_tokens([special, *self.letters], 1.0, 3)
            name = str(tokenizer.convert_ids_to_tokens(special))
            yield replace(greedy, sampling=own, stop=(name,), eos=())
        yield from self.half_characters()

    def half_characters(self) -> Iterator[Asked]:
        """Texts of the two halves of a character: rounds, and requests, end between them. In pairs:
        every second request of a batch is streamed."""
        decode = self.target.detokenize
        every = (i for i in range(self.target.vocab_size) if decode([i]) == UNFINISHED)
        for halves in product(islice(every, MOST_HALVES), repeat=2):
            character = decode(list(halves))
            if len(character) != 1 or character == UNFINISHED:
                continue
            own = self._of_tokens(halves, EVEN, 0)
            for new in range(3, 9):
                for seed in (new, new + 100):
                    yield Asked(halves * 3, replace(own, seed=seed), new, eos=())
            return


def drafts_so(drafter: Any, how: str) -> bool:
    """Whether a drafter, or one that it wraps, drafts in this way
    (`decode.proposers.base.Proposer`)."""
    while drafter is not None and not getattr(drafter, how, False):
        drafter = getattr(drafter, "inner", None)
    return drafter is not None
