"""The requests that are decoded and checked: every request option, every stopping condition, long
contexts and long texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from decode.engine.decoder import Decoder
from decode.engine.request import PREFILL_CHUNK
from decode.speculation.settings import Sampling
from decode.verification.cases import Cases
from specalign.common.schema import JsonObject
from specalign.lm.model import Target

SHORT = 8  # tokens of a prompt, counted from its end, that most requests continue
LONG, PAST_WINDOW, LONGEST = 320, 40, 2048
"""The least length of the long prompt, which exceeds the largest window of attention by at least so
many tokens, up to the longest."""
LONG_TEXT = 64  # tokens of the long text
TOGETHER, MOST_TOGETHER = 5, 9  # requests in one target forward; in that of one batch
COPIES = 3  # requests of equal settings, for the captured engine
TWO_TOKENS = tuple(map(int, "0000100110101111000"))
"""A prompt of two tokens in which every four of them occur. In a text of two tokens long paths are
accepted, and whatever it ends with can be copied."""
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

    @property
    def ending(self) -> tuple[tuple[int, ...] | None, int | None, tuple[str, ...]]:
        """Settings shared by the requests of one call."""
        return self.eos, self.context, self.stop


@dataclass(frozen=True)
class RequestBatch:
    """Requests that are decoded together, `size` in one forward pass, `chunk` tokens of a prompt.
    Those that share a call stand next to one another. adapt: as in `Decoder.generate`."""

    name: str
    decoder: Decoder
    asked: tuple[Asked, ...]
    size: int = TOGETHER
    chunk: int = PREFILL_CHUNK
    adapt: bool | None = None

    def __post_init__(self) -> None:
        kinds = [one.ending for one in self.asked]
        ordered = sorted(self.asked, key=lambda one: kinds.index(one.ending))
        object.__setattr__(self, "asked", tuple(ordered))


def settings(seed: int, common: Sequence[int]) -> list[Sampling]:
    """Every request option at two or more values, which the seed draws, and all options together.
    `common`: tokens that the target generates often."""
    numbers = Random(seed)

    def between(least: float, most: float) -> float:
        return float(least * (most / least) ** numbers.random())

    options: list[JsonObject] = [
        {"temperature": between(0.05, 0.5)}, {}, {"temperature": between(1.3, 3.0)},
        {"top_k": round(between(1, 10))}, {"top_k": round(between(11, 300))},
        {"top_p": between(0.2, 0.7)}, {"top_p": 1 - between(0.005, 0.2)},
        {"min_p": between(0.001, 0.05)}, {"min_p": between(0.05, 0.7)},
        {"repetition_penalty": between(1.1, 4.0)}, {"repetition_penalty": between(0.5, 0.9)},
        {"presence_penalty": between(0.3, 6.0)}, {"presence_penalty": -between(0.3, 2.0)},
        {"banned": tuple(common[1:2])}, {"banned": tuple(common[:3])},
        {"min_new_tokens": 3}, {"min_new_tokens": 7},
    ]  # fmt: skip
    options += [{k: v for one in options[n::2] for k, v in one.items()} for n in (0, 1)]
    return [
        Sampling(**{"temperature": 1.0, "seed": seed + i, **one}) for i, one in enumerate(options)
    ]


class Requests:
    """The batches of a run. `short`: the ends of the prompts; `common`: tokens of greedy texts, the
    most frequent first; `letters`: two tokens that are drafted often. captured: the engine batches
    requests of equal settings alone, so there are several of each, more than run at a time."""

    def __init__(self, target: Target, prompts: list[list[int]], captured: bool = False) -> None:
        self.target, self.prompts = target, prompts
        self._copies, self._size = (COPIES, COPIES - 1) if captured else (1, TOGETHER)
        self.short = [prompt[-SHORT:] for prompt in sorted(prompts, key=len)]
        self.common: list[int] = []
        self.letters: list[int] = []

    def batches(self, cases: Cases, plain: Decoder) -> Iterator[RequestBatch]:
        """All batches."""
        for number, case in enumerate(cases.drawn):
            every = settings(1000 * (number + 1), self.common)
            # every option with the first rules by ratio; after that each method takes a part
            asked = self.at(every[number % 3 :: 3] + every[-1:])
            if number == 0:
                asked = (*self.at(every), *self.ends_of_letters(), *self.of_few_tokens(3000))
            name, decoder = f"{case.name}, {case.verifier}", cases.open(case)
            yield RequestBatch(f"{name}: sampled", decoder, asked, self._size)
            letters = self.of_letters(2000)
            if number:
                yield RequestBatch(f"{name}: two tokens", decoder, letters, self._size)
                continue
            letters = self.of_letters(2000, MOST_TOGETHER)
            yield RequestBatch(f"{name}: two tokens", decoder, letters, MOST_TOGETHER, adapt=True)
            penalised = self.at([one for one in every if one.repetition_penalty != 1][:2] * 2)
            unseeded = [replace(x, sampling=replace(x.sampling, seed=None)) for x in penalised]
            given = (decoder, tuple(unseeded), self._size)
            yield RequestBatch(f"{name}: adapting", *given, adapt=True)
        for number, case in enumerate(cases.compared):
            every = settings(100 * (number + 1), self.common)
            cold = [replace(one, temperature=0.0) for one in every[len(every) // 2 :: 2]]
            decoder = cases.open(case)
            yield RequestBatch(f"{case.name}: greedy", decoder, self.at(cold), self._size)
            if cases.captured:  # not its verifier
                continue
            both = (*self.at(every[1::5]), *self.of_letters(2000))
            yield RequestBatch(f"{case.name}: coupled", cases.open(case, "gumbel"), both)
        for case in cases.compared[-1:]:
            yield self._long_context(case.name, cases.open(case), Sampling())
            ends = tuple(self.ends(plain))
            yield RequestBatch(f"{case.name}: ends", cases.open(case), ends, self._size)
        for case in cases.drawn[:1]:
            decoder = cases.open(case, None if cases.captured else "gumbel")
            yield self._long_context(case.name, decoder, Sampling(1.0, seed=7))
            own = Sampling(1.0, seed=7, repetition_penalty=1.2, presence_penalty=0.4)
            long = Asked(tuple(self.short[0]), own, LONG_TEXT)
            name = f"{case.name}, {case.verifier}: long text"
            yield RequestBatch(name, cases.open(case), (long,), 1)

    def at(self, chosen: Sequence[Sampling]) -> tuple[Asked, ...]:
        """A request at each of the settings."""
        asked = []
        each = [(i, one, n) for i, one in enumerate(chosen) for n in range(self._copies)]
        for i, one, copy in each:
            sampling = replace(one, seed=one.fixed_seed + 100 * copy)
            prompt = self.short[(i + copy) % len(self.short)]
            if (i + copy) % 3 == 1:
                prompt = prompt[-4:] * 2  # something to copy
            eos = tuple(self.common[:2]) if sampling.min_new_tokens else None
            new = max(8 + 3 * ((i + copy) % 3), sampling.min_new_tokens + 1)
            asked.append(Asked(tuple(prompt), sampling, new, eos=eos))
        return tuple(asked)

    def of_letters(self, seed: int, count: int = 3) -> tuple[Asked, ...]:
        """Requests whose texts consist of two tokens: one setting and consecutive seeds."""
        prompt = tuple(self.letters[i] for i in TWO_TOKENS)
        own = self._of_tokens(self.letters, 1.0, seed)
        # they end one after the other, so that every number of requests runs together
        return tuple(Asked(prompt, replace(own, seed=seed + i), 11 + i) for i in range(count))

    def of_few_tokens(self, seed: int) -> tuple[Asked, ...]:
        """Texts of a few penalised tokens, whose first occurrences are accepted drafts."""
        some = [i for i in sum(self.short, self.letters) if i not in self.target.eos_ids]
        own = self._of_tokens(list(dict.fromkeys(some))[:6], EVEN, seed)
        own = replace(own, presence_penalty=3.0, repetition_penalty=1.3)
        prompt = tuple(self.letters[i] for i in TWO_TOKENS)
        return tuple(Asked(prompt, replace(own, seed=seed + i), 14) for i in range(4))

    def ends_of_letters(self) -> Iterator[Asked]:
        """Texts of two tokens, of which the second is one of several ends and may not come at first:
        both the first ones and the end are accepted drafts."""
        end, first = self.letters
        eos = (*[i for i in range(self.target.vocab_size - 2) if i not in self.letters][-2:], end)
        for least, seed in product(range(2, 8), (0, 100)):
            own = self._of_tokens(self.letters, EVEN, least + seed)
            yield Asked((*[first] * 6, end, first), replace(own, min_new_tokens=least), 12, eos=eos)

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
        chunk = max(1, (len(long) - 1) // 3)
        long = long[-3 * chunk - 1 :]  # the last token is alone in its chunk
        asked = tuple(Asked(tuple(x), sampling, 10) for x in (long, long[-len(long) // 2 :]))
        return RequestBatch(f"{name}: long context", decoder, asked, 2, chunk)

    def ends(self, plain: Decoder) -> Iterator[Asked]:
        """Requests that end in every way, at every place of a block."""
        tokenizer, size = self.target.tokenizer, self.target.vocab_size
        given = tuple(self.short[0])
        text = plain.generate(list(given), max_new_tokens=12).tokens
        unused = next(i for i in range(size - 1, 0, -1) if i not in text)
        words = self.target.detokenize(text)
        for new in (5, 3, 2, 1):
            yield Asked(given, Sampling(), new)
        for room in (1, 3, 6):
            for sampling in (Sampling(), Sampling(1.0, seed=room)):
                yield Asked(given, sampling, 12, context=len(given) + room)
        for at in range(1, min(4, len(text))):
            yield Asked(given, Sampling(), 12, eos=(unused, text[at], text[-1]))
        yield from self.ends_of_letters()
        for start in range(1, min(len(words) - 4, 20), 5):
            stop = (words[start : 4 + 2 * start],)
            yield from [Asked(given, Sampling(), 12, stop=stop)] * self._copies
        stops = (words[12:15] or "x", "never there", words[6:9] or "y")
        yield Asked(given, Sampling(), 12, stop=stops)
        for special in [i for i in tokenizer.all_special_ids if i < size][:1]:
            own = self._of_tokens([special, *self.letters], 1.0, 3)
            name = str(tokenizer.convert_ids_to_tokens(special))
            yield Asked(given, own, 12, stop=(name,), eos=())
