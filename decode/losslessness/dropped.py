"""Bugs of `decode.verify --self-test`: every option of `decode.losslessness.options`, dropped by the engine, dropped by the verifiers
that draw by themselves, and dropped by the reference alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from decode.engine import decoder
from decode.engine.engine import Engine
from decode.losslessness import options
from decode.losslessness.law import Setting
from decode.losslessness.planted import BY_RATIO, Bug, sampled_otherwise, verified
from decode.losslessness.searched import NEW
from decode.speculation.sampling import Sampling

Plant = tuple[Any, str, Callable[[Any], Any]]

_OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": ("temperature, seed", {"temperature": 1.0}),
    "seed": ("temperature, seed", {"seed": 0}),
    "top-k": ("top-k", {"top_k": 0}),
    "top-p": ("top-p", {"top_p": 1.0}),
    "min-p": ("min-p", {"min_p": 0.0}),
    "repetition penalty": ("repetition penalty", {"repetition_penalty": 1.0}),
    "presence penalty": ("presence penalty", {"presence_penalty": 0.0}),
    "banned tokens": ("banned tokens", {"banned": ()}),
    "minimum length": ("minimum length", {"min_new_tokens": 0}),
}
"""Each option of `Sampling` → the setting that has it, and its value when it is off."""
_REQUEST: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ()},
    "length": {"new": NEW},
    "context": {"context": None},
    "end of text": {"ends": ()},
}
"""Each option of a request → what a `Setting` without it has."""


def engine_asked(change: Callable[[Sampling], Sampling]) -> Plant:
    """An engine that changes the `Sampling` that it was asked for."""

    def broken(right: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Engine, target: Any, prompt: Any, new: int, sampling: Any, *rest: Any) -> None:
            right(self, target, prompt, new, change(sampling), *rest)

        return begin

    return Engine, "__init__", broken


def engine_with(**off: Any) -> Plant:
    """An engine that is given other values of `Sampling`, at temperature 0 those alone that greedy decoding has."""
    return engine_asked(lambda sampling: replace(sampling, **off))


def engine_after(change: Callable[[Engine], object]) -> Plant:
    """An engine that is changed once it is made."""

    def broken(right: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Engine, *given: Any) -> None:
            right(self, *given)
            change(self)

        return begin

    return Engine, "__init__", broken


def _reference_with(change: Callable[[Setting], Setting]) -> Plant:
    return options, "write", lambda right: lambda target, prompt, s: right(target, prompt, change(s))


def _without_sampling(off: dict[str, Any]) -> Callable[[Setting], Setting]:
    return lambda s: replace(s, sampling=replace(s.sampling, **off))


def _without_request(off: dict[str, Any]) -> Callable[[Setting], Setting]:
    return lambda s: replace(s, **off)


_ENGINE: dict[str, Plant] = {
    "stop string": engine_after(lambda e: setattr(e.text, "stops", ())),
    "length": engine_after(lambda e: setattr(e, "limit", e.limit + 1)),
    "context": engine_after(lambda e: setattr(e, "limit", NEW)),
    "end of text": engine_after(lambda e: setattr(e, "eos", frozenset())),
}


def _bug(name: str, by: str, plant: Plant, setting: str) -> Bug:
    return Bug(f"{name}: dropped by the {by}", "options", plant, setting=setting)


DROPPED = (
    *(_bug(name, "engine", engine_with(**off), setting) for name, (setting, off) in _OFF.items()),
    *(_bug(name, "engine", plant, name) for name, plant in _ENGINE.items()),
    Bug(
        "raw prompt: dropped by the engine",
        "options",
        (decoder, "prompt_tokens", lambda right: lambda target, prompt, raw: right(target, prompt)),
        setting="raw prompt",
        chat=True,
    ),
    *(
        _bug(name, "reference", _reference_with(_without_sampling(off)), setting)
        for name, (setting, off) in _OFF.items()
    ),
    *(_bug(name, "reference", _reference_with(_without_request(off)), name) for name, off in _REQUEST.items()),
    *(
        Bug(f"{name}: not in the p that drafts are compared with", "options drawn", plant, BY_RATIO)
        for name, plant in {
            "top-k": verified(sampled_otherwise(top_k=0)),
            "top-p": verified(sampled_otherwise(top_p=1.0)),
            "min-p": verified(sampled_otherwise(min_p=0.0)),
        }.items()
    ),
    Bug(
        "banned tokens, minimum length: not in the p that drafts are compared with",
        "rounds",
        verified(lambda one: one._replace(before=one.before._replace(barred=None))),
        BY_RATIO,
    ),
    Bug("seed: not in what is drawn", "options drawn", engine_with(seed=0)),
)  # fmt: skip
