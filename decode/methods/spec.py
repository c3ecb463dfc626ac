"""Methods as they are written, and the decoders that they mean: a system's name with options, over drafters by kind.

specdiff:gamma=16:steps=4        a method: a name, and options after colons
specdiff:steps=1/2/4             several ways, the fastest of which each round takes, by what was measured
--sweep gamma=4,8 steps=1,2      every combination of them, for the methods that have these options
--drafter a,diffusion=b          drafters by kind; a bare folder says itself what it is
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.common.errors import UserError, nearest
from decode.method_names import written
from decode.methods.registry import SYSTEMS, System

if TYPE_CHECKING:
    pass

COMMON = ("verifier", "controller")
"""Options of every system that drafts: the verifier, and who chooses how many tokens are drafted."""
CONTROLLERS = ("fixed", "adl", "cost")
"""Always gamma; DiffuSpec's adaptive draft length; the length of the most tokens a second."""


@dataclass(frozen=True)
class Method:
    """A system with options: `name` as it is written and reported."""

    name: str
    system: System
    options: Mapping[str, Any]
    ways: tuple[Method, ...] = ()
    """The method in each of the ways that its options leave open; none: they leave nothing open."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of drafters that it is made of."""
        return (*self.system.needs, *self.system.also_needs(self.system.filled(self.given)))

    @property
    def branches(self) -> bool:
        """Whether drafts of it may branch, in any of its ways."""
        return any(self.system.branches(self.system.filled(way.options)) for way in self.ways or (self,))

    @property
    def given(self) -> Mapping[str, Any]:
        """All options that it says something of, those too that it leaves open."""
        return self.ways[0].options if self.ways else self.options


def read_method(text: str) -> Method:
    """`name:key=value:…`.

    Raises:
        UserError: an unknown name or key, or a value of another kind.
    """
    name, *words = text.split(":")
    if name not in SYSTEMS:
        raise UserError(f"unknown method {name!r}{nearest(name, SYSTEMS)}")
    system, options = SYSTEMS[name], dict[str, Any]()
    for word in words:
        key, equals, value = word.partition("=")
        known = sorted(keys_of(system))
        if not equals or key not in known:
            what = f"option {key!r}" if equals else f"{word!r} is not key=value"
            raise UserError(f"method {text!r}: unknown {what}{nearest(key, known)}")
        if key in options:
            raise UserError(f"method {text!r}: {key} is given twice")
        options[key] = value
    several = {k: v.split("/") for k, v in options.items() if "/" in v and _number(system, k)}
    ways = [read_method(written(name, options | way)) for way in _every(several)] if several else []
    read = {k: _value(text, system, k, v) for k, v in options.items() if k not in several}
    return Method(text, system, read, tuple(ways))


def listing() -> str:
    """Every system with what it is made of and its options, for the help."""
    lines = ["methods, each with its options behind colons (specdiff:gamma=16:steps=4):"]
    for name, system in SYSTEMS.items():
        needs = f" (needs {', '.join(system.needs)})" if system.needs else ""
        options = [f"{k}={_shown(p.default)}" for k, p in system.options.items()]
        lines += [f"  {name}: {system.says}{needs}", *([f"      {', '.join(options)}"] if options else [])]
    return "\n".join(
        [*lines, f"  all that draft: verifier=auto, controller={'|'.join(CONTROLLERS)} (of duo: cost)"]
    )


def _shown(default: Any) -> str:
    """A default as it is typed; one that is not there is the drafter's own, or none."""
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _every(values: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination of one value for each key."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _number(system: System, key: str) -> bool:
    """Whether the option is a number, of which there may be several."""
    return key not in COMMON and str(system.options[key].annotation).startswith(("int", "float"))


def _value(text: str, system: System, key: str, value: str) -> Any:
    """A word as the option's kind, which its annotation says."""
    kind = "str" if key in COMMON else str(system.options[key].annotation)
    if value == "none" and "None" in kind:
        return None
    if key == "controller" and value not in CONTROLLERS:
        raise UserError(f"method {text!r}: controller={value!r} is unknown{nearest(value, CONTROLLERS)}")
    if key == "verifier" and value != "auto":
        from decode.speculation.verifiers import VERIFIERS

        if value not in VERIFIERS:
            known = nearest(value, ("auto", *VERIFIERS))
            raise UserError(f"method {text!r}: verifier={value!r} is unknown{known}")
    if key == "corpus" and not Path(value).expanduser().is_file():
        raise UserError(f"method {text!r}: corpus={value!r}: no such file")
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                value.lower()
            ]
        if kind.startswith("int"):
            return int(value)
        if kind.startswith("float") and not math.isfinite(float(value)):
            raise ValueError
        return float(value) if kind.startswith("float") else value
    except (KeyError, ValueError):
        what = {"bool": "true or false", "int": "a whole number", "floa": "a number"}[kind[:4].strip(" |")]
        raise UserError(f"method {text!r}: {key}={value!r} must be {what}") from None


def swept(methods: Sequence[Method], sweep: Sequence[str]) -> list[Method]:
    """Each method once for every combination of the `key=v1,v2,…` that its system has options for, those left out that do the same
    as one before.

    Raises:
        UserError: a malformed word, or a key that no method has.
    """
    values: dict[str, list[str]] = {}
    for word in sweep:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise UserError(f"--sweep: {word!r} is not key=value,value,…")
        if key in values:
            raise UserError(f"--sweep: {key} is given twice ({key}={','.join(values[key])} and {word})")
        values[key] = [v for v in text.split(",") if v]
        if not values[key]:
            raise UserError(f"--sweep: {word!r} names no value of {key}")
    if not values:
        return list({method.name: method for method in methods}.values())
    known = {key for m in methods for key in keys_of(m.system)}
    for key in values:
        if key not in known:
            raise UserError(f"--sweep: no method here has the option {key!r}{nearest(key, sorted(known))}")
        owners = [m for m in methods if key in keys_of(m.system)]
        if all(key in m.given for m in owners):
            raise UserError(f"--sweep: {owners[0].name} says {key} itself; leave it out there to sweep it")
    found: dict[str, Method] = {}
    for method in methods:
        free = keys_of(method.system) - {*method.given}
        for options in _every({k: v for k, v in values.items() if k in free}):
            made = read_method(written(method.name, options))
            found.setdefault(_program(made), made)
    return list(found.values())


def keys_of(system: System) -> set[str]:
    """The options that it has."""
    return {*system.options, *(COMMON if system.drafts else ())}


def _program(method: Method) -> str:
    """A name that methods have in common which do the same: a draft takes at most as many steps as it has tokens."""
    gamma, steps = (method.options.get(key) for key in ("gamma", "steps"))
    options = dict(method.options)
    if gamma and steps:
        options["steps"] = min(steps, gamma)
    return f"{method.system.name} {sorted(options.items())}" if not method.ways else method.name


def lacking(needs: Sequence[str], drafters: Mapping[str, Any]) -> str | None:
    """The first kind of drafter that is needed and that is not there."""
    return next((role for role in needs if role not in drafters), None)


def with_all(names: Sequence[str], drafters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names with every system whose drafter is there in place of `all`, and a line for each that this leaves out."""
    if "all" not in names:
        return list(names), []
    missing = {name: role for name, system in SYSTEMS.items() if (role := lacking(system.needs, drafters))}
    lines = [
        f"{name}: no drafter of the kind {role} (--drafter {role}=FOLDER)" for name, role in missing.items()
    ]
    named = [name for name in names if name != "all"]
    return [*named, *(name for name in SYSTEMS if name not in missing)], lines


def check_parts(methods: Sequence[Method], drafters: Mapping[str, Any]) -> None:
    """Raises UserError for the first method whose drafter is not there."""
    for method in methods:
        if role := lacking(method.needs, drafters):
            raise UserError(
                f"method {method.name!r} needs a drafter of the kind {role}: --drafter {role}=FOLDER"
                + (f" (given: {', '.join(drafters)})" if drafters else "")
            )
