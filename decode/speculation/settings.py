"""Sampling settings. Does not import torch, so commands can reject invalid values quickly."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from specalign.common.errors import UserError
from specalign.common.schema import finite
from specalign.common.text import say_once, short

MIN_TEMPERATURE = 1e-3
MOST_NODES = 512
"""The largest draft tree per target forward pass."""
MOST_PENALTY = 100.0
"""Larger penalties leave fp32 no digits to tell the other tokens apart."""
_FLOATS = {
    "temperature": (0.0, float("inf")),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1 / MOST_PENALTY, MOST_PENALTY),
    "presence_penalty": (-MOST_PENALTY, MOST_PENALTY),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Applied in this order: repetition penalty, presence penalty, banned tokens and minimum length,
    temperature, top-k, top-p, min-p (the order of transformers' `generate`).

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 0.0
    """0 = greedy; otherwise at least 0.001."""
    top_p: float = 1.0
    """Keep the most probable tokens until their total probability reaches this; 1 = all."""
    top_k: int = 0
    """Keep only this many most probable tokens; 0 = all."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in the text (prompt included) are divided by this if positive, else
    multiplied; 1 = off."""
    seed: int | None = None
    """Seed of a request's random generator, 0 to 2**63 - 1: the same seed and settings give the
    same output, unless drafting depends on timing (the system `duo`). None: a new seed for each
    request, recorded in `Generation.seed`; batches may then draft less where that is faster."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the highest one; 0 = all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the output (not the prompt); 0 = off."""
    banned: tuple[int, ...] = ()
    """Token ids that are never generated."""
    min_new_tokens: int = 0
    """The output does not end before it has this many tokens."""

    def __post_init__(self) -> None:
        for name, (least, most) in _FLOATS.items():
            value = getattr(self, name)
            if not finite(value) or not least <= value <= most:
                raise UserError(f"{name}={value!r}: must be a number, {least:g} to {most:g}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            limits = f"must be 0 (greedy) or at least {MIN_TEMPERATURE}"
            raise UserError(f"temperature={self.temperature!r}: {limits}")
        if self.top_p == 0:
            raise UserError("top_p=0: must be above 0")
        for name in ("top_k", "seed", "min_new_tokens"):
            value = getattr(self, name)
            if name != "seed" or value is not None:
                object.__setattr__(self, name, _whole(name, value))
        if not isinstance(self.banned, list | tuple):
            raise UserError(f"banned={self.banned!r}: must be a list of token ids")
        banned = tuple(self.banned)
        if set(map(type, banned)) != {int} or min(banned) < 0:  # quick: there may be thousands
            banned = tuple(_whole("banned", i) for i in banned)
        object.__setattr__(self, "banned", banned)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def fixed_seed(self) -> int:
        """The seed, 0 where none is given: for measurements, which have to repeat."""
        return 0 if self.seed is None else self.seed

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments of a call."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None
    min_p: float
    presence_penalty: float
    banned: tuple[int, ...] | list[int]
    min_new_tokens: int


def read_sampling(sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
    """`sampling`, greedy where it is None; or the one whose fields `options` name
    (`temperature=0.7`). Raises UserError for both, or a value out of its range."""
    if sampling is not None:
        if options or not isinstance(sampling, Sampling):
            hint = "pass a decode.Sampling, or its fields as keyword arguments"
            raise UserError(f"sampling={short(sampling, 60)}: {hint}")
        return sampling
    chosen = Sampling(**options)
    unused = [
        name
        for name in ("top_p", "top_k", "min_p", "seed")
        if getattr(chosen, name) != getattr(Sampling, name)
    ]
    if chosen.greedy and unused:
        say_once(
            f"note: {', '.join(unused)} ignored: temperature=0 is greedy (temperature=1 samples)"
        )
    return chosen


def _whole(name: str, value: Any) -> int:
    """A whole number from 0 up, numpy's too, as int."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not 0 <= value < 2**63:
        raise UserError(f"{name}={value!r}: must be a whole number, 0 to 2**63 - 1")
    return int(value)
