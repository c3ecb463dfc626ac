"""Reading methods: a system's name with options, and the drafters by kind that they need.

specdiff:gamma=16:steps=4        a method: a name, and options after colons
specdiff:steps=1/2/4             a method with variants; each round uses the fastest, as measured so far
--sweep gamma=4,8 steps=1,2      every combination of these values, for the methods that have the options
--drafter a,diffusion=b          drafters by kind; the files of a bare folder say its kind
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from align.common.errors import UserError, nearest
from align.common.files import expanded
from decode.method_names import VERIFIERS, written
from decode.methods.options import in_methods
from decode.methods.registry import ANY, COMMON, SYSTEMS, System

CONTROLLERS = ("fixed", "adl", "cost")
"""Draft lengths: always gamma; DiffuSpec's adaptive one; the one with the most tokens a second."""


@dataclass(frozen=True)
class Method:
    """A system with options: `name` as it is written and reported."""

    name: str
    system: System
    options: Mapping[str, Any]
    variants: tuple[Method, ...] = ()
    """The method under each choice of options with several values; empty where every option has one."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of drafters that it is made of."""
        return (*self.system.needs, *self.system.also_needs(self.system.filled(self.given)))

    @property
    def branches(self) -> bool:
        """Whether drafts of it may branch, in any of its variants."""
        return any(self.system.branches(self.system.filled(m.options)) for m in self.variants or (self,))

    @property
    def given(self) -> Mapping[str, Any]:
        """All options that were written, those with several values too."""
        return self.variants[0].options if self.variants else self.options

    def with_options(self, options: Mapping[str, Any]) -> Method:
        """The method under the same name, with these options changed."""
        variants = tuple(variant.with_options(options) for variant in self.variants)
        return replace(self, options={**self.options, **options}, variants=variants)

    def with_defaults(self, options: Mapping[str, Any]) -> Method:
        """The method under the same name, with those of these options that its system has where none was written."""
        known = {*self.system.keys, *COMMON} - self.given.keys()
        return self.with_options({key: value for key, value in options.items() if key in known})


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
        known = sorted(system.keys)
        if not equals or key not in known:
            what = f"option {key!r}" if equals else f"{word!r} is not key=value"
            raise UserError(
                f"method {text!r}: unknown {what}{nearest(in_methods(key), known) or f': {name} has none'}"
            )
        if key in options:
            raise UserError(f"method {text!r}: {key} is given twice")
        options[key] = value
    several = {k: v.split("/") for k, v in options.items() if "/" in v and _number(system, k)}
    variants = [read_method(written(name, options | one)) for one in _every(several)] if several else []
    read = {k: _value(text, system, k, v) for k, v in options.items() if k not in several}
    return Method(text, system, read, tuple(variants))


def read_names(text: str) -> list[str]:
    """The methods of a comma list as they are written, `all` among them.

    Raises:
        UserError: an unknown one, or an option that it does not have.
    """
    names, known = [name.strip() for name in text.split(",") if name.strip()], [*SYSTEMS, "all"]
    for name in names:
        if name.partition(":")[0] not in known:
            raise UserError(f"--methods: unknown method {name!r}{nearest(name, known)}")
        if name != "all":
            read_method(name)
    return names


def listing() -> str:
    """Every system with the drafters that it needs and its options, for the help."""
    lines = ["methods, each with its options behind colons (specdiff:gamma=16:steps=4):"]
    for name, system in SYSTEMS.items():
        needs = f" (needs {', '.join(system.needs)})" if system.needs and ANY not in system.needs else ""
        options = [f"{k}={_shown(p.default)}" for k, p in system.options.items() if k not in COMMON]
        lines += [f"  {name}: {system.says}{needs}", *([f"      {', '.join(options)}"] if options else [])]
    return "\n".join(
        [
            *lines,
            f"  all that draft: verifier=auto, controller={'|'.join(CONTROLLERS)} (of duo: cost), "
            "copying=false (of combined: true): where the text repeats itself, copy instead of drafting",
        ]
    )


def _shown(default: Any) -> str:
    """A default as it is typed; "" where it is the drafter's own, or none."""
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _every(values: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination of one value for each key."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _number(system: System, key: str) -> bool:
    """Whether the option is a number and may have several values."""
    return key not in COMMON and str(system.options[key].annotation).startswith(("int", "float"))


_COMMON_KINDS = {"verifier": "str", "controller": "str", "copying": "bool"}


def _value(text: str, system: System, key: str, value: str) -> Any:
    """A word converted to the kind that the option's annotation says."""
    kind = _COMMON_KINDS.get(key) or str(system.options[key].annotation)
    if value == "none" and "None" in kind:
        return None
    if key == "controller" and value not in CONTROLLERS:
        raise UserError(f"method {text!r}: controller={value!r} is unknown{nearest(value, CONTROLLERS)}")
    if key == "verifier" and value not in ("auto", *VERIFIERS):
        known = nearest(value, ("auto", *VERIFIERS))
        raise UserError(f"method {text!r}: verifier={value!r} is unknown{known}")
    if key == "corpus" and not expanded(value).is_file():
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
    """Each method once for every combination of the `key=v1,v2,…` that are options of its system. A combination that does the same
    as an earlier one is left out.

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
    known = {key for m in methods for key in m.system.keys}
    for key in values:
        if key not in known:
            raise UserError(f"--sweep: no method here has the option {key!r}{nearest(key, sorted(known))}")
        owners = [m for m in methods if key in m.system.keys]
        if all(key in m.given for m in owners):
            raise UserError(f"--sweep: {owners[0].name} says {key} itself; leave it out there to sweep it")
    found: dict[str, Method] = {}
    for method in methods:
        free = method.system.keys - {*method.given}
        for options in _every({k: v for k, v in values.items() if k in free}):
            made = read_method(written(method.name, options))
            found.setdefault(_program(made), made)
    return list(found.values())


def _program(method: Method) -> str:
    """A name shared by methods that do the same: a draft takes no more steps than it has tokens."""
    gamma, steps = (method.options.get(key) for key in ("gamma", "steps"))
    options = dict(method.options)
    if gamma and steps:
        options["steps"] = min(steps, gamma)
    return f"{method.system.name} {sorted(options.items())}" if not method.variants else method.name


def role_in(drafters: Mapping[str, Any], role: str) -> str:
    """The role of the given drafter that serves as `role`: for `ANY` that of the first one."""
    return next(iter(drafters), ANY) if role == ANY else role


def lacking(needs: Sequence[str], drafters: Mapping[str, Any]) -> str | None:
    """The first kind of drafter that is needed and not given."""
    return next((role for role in needs if role_in(drafters, role) not in drafters), None)


def with_all(names: Sequence[str], drafters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names, with `all` replaced by every system whose drafters are given, and a line for each system that lacks one."""
    if "all" not in names:
        return list(names), []
    every = {name: system for name, system in SYSTEMS.items() if system.in_all}
    missing = {name: role for name, system in every.items() if (role := lacking(system.needs, drafters))}
    lines = [
        f"{name}: no drafter of the kind {role} (--drafter {role}=FOLDER)" for name, role in missing.items()
    ]
    named = [name for name in names if name != "all"]
    return [*named, *(name for name in every if name not in missing)], lines


def check_parts(methods: Sequence[Method], drafters: Mapping[str, Any], python: bool = False) -> None:
    """Raises UserError for the first method whose drafter is not there. `python`: it is told as an argument of `decode.load`."""
    for method in methods:
        role = lacking(method.needs, drafters)
        folder = "FOLDER" if role == ANY else f"{role}=FOLDER"
        asked = f"drafter={folder!r}" if python else f"--drafter {folder}"
        if role == ANY:
            name = f"method={method.name!r}" if python else f"--methods={method.name}"
            raise UserError(f"{name} needs {asked}: none is shipped for this target")
        if role:
            raise UserError(
                f"method {method.name!r} needs a drafter of the kind {role}: {asked}"
                + (f" (given: {', '.join(drafters)})" if drafters else "")
            )
