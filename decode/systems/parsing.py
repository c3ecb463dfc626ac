"""Parses methods.

specdiff:draft_tokens=16:steps=4          a method: a system's name, and options after colons
--methods a,b:key=value,all               several, or every system whose drafters are given
--sweep draft_tokens=4,8 steps=1,2        every combination, for the methods that have the options
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decode.systems.registry import ANY, SYSTEMS, System
from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject

ENGINES = ("auto", "eager", "captured", "compiled")


def check_engine(name: str) -> None:
    """Raises UserError for no engine."""
    if name not in ENGINES:
        raise UserError(f"engine={name!r} is unknown{nearest(name, ENGINES)}")


@dataclass(frozen=True)
class Method:
    """A system with its options, under the name that is reported; `given`: those typed."""

    name: str
    system: System
    given: frozenset[str] = frozenset()

    @property
    def needs(self) -> tuple[str, ...]:
        """The kinds of its drafters."""
        return self.system.needs

    @property
    def branches(self) -> bool:
        return self.system.branches

    @property
    def verifier(self) -> str:
        return self.system.verifier_name

    @property
    def open_options(self) -> set[str]:
        """The options that its system has and that were not typed."""
        return self.system.limits().keys() - self.given

    def typed(self, option: str) -> Any:
        """The value of an option that was typed; None otherwise."""
        return getattr(self.system, option) if option in self.given else None

    def with_options(self, **options: Any) -> Method:
        """The method under the same name, with these options changed. Raises UserError for one out
        of range."""
        return replace(self, system=replace(self.system, **options))

    def with_defaults(self, options: Mapping[str, Any]) -> Method:
        """The method with those of these options that it leaves open."""
        known = self.open_options
        return self.with_options(**{k: v for k, v in options.items() if k in known})


def format_method(name: str, options: Mapping[str, object]) -> str:
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])


def read_method(text: str) -> Method:
    """The method that `name:key=value:…` stands for. Raises UserError for an unknown name or
    option, or a value that the option does not take."""
    name, *words = text.split(":")
    if name not in SYSTEMS:
        raise UserError(f"unknown method {name!r}{nearest(name, SYSTEMS)}")
    limits = SYSTEMS[name].limits()
    values: JsonObject = {}
    try:
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key not in limits:
                hint = nearest(key, limits) if limits else f": {name} has none"
                raise UserError(f"unknown option {key!r}{hint}")
            if key in values:
                raise UserError(f"{key} is given twice")
            values[key] = limits[key].parse(key, value)
        return Method(text, SYSTEMS[name](**values), frozenset(values))
    except UserError as error:
        raise UserError(f"method {text!r}: {error}") from None


@dataclass(frozen=True)
class MethodList:
    """The option --methods: methods in their order, and whether `all` is among them."""

    methods: tuple[Method, ...]
    has_all: bool = False

    def names(self, name: str) -> bool:
        """Whether a method was named itself."""
        return any(method.name == name for method in self.methods)

    def expand(self, drafters: Mapping[str, Any]) -> tuple[list[Method], list[str]]:
        """The methods, with `all` replaced by every system whose drafters are given, and a line for
        each one that lacks its drafter."""
        methods, missing = list(self.methods), []
        for name, system in SYSTEMS.items():
            if self.has_all and system.in_all:
                kind = find_missing(system.needs, drafters)
                if kind is None:
                    methods.append(read_method(name))
                else:
                    missing.append(f"{name}: no drafter of kind {kind} (--drafter {kind}=FOLDER)")
        return methods, missing


def read_methods(text: str) -> MethodList:
    """The methods of a comma list. Raises UserError for no method, or an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*SYSTEMS, "all"]
    for name in names or [""]:
        if name.partition(":")[0] not in known:
            raise UserError(f"--methods: unknown method {name!r}{nearest(name, known)}")
    return MethodList(tuple(read_method(name) for name in names if name != "all"), "all" in names)


@dataclass(frozen=True)
class Sweep:
    """The option --sweep: the values of each option, as they were typed."""

    words: tuple[str, ...] = ()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self, methods: Sequence[Method]) -> None:
        """Raises UserError for an option that no method has open."""
        known = {key for method in methods for key in method.open_options}
        for key in self.values:
            if key not in known:
                hint = nearest(key, known)
                raise UserError(f"--sweep: no method here leaves the option {key!r} open{hint}")

    def of(self, method: Method) -> list[Method]:
        """The method once for each combination of values of the options that it leaves open."""
        keys = [key for key in self.values if key in method.open_options]
        if not keys:
            return [method]
        combinations = itertools.product(*(self.values[key] for key in keys))
        choices = [dict(zip(keys, values, strict=True)) for values in combinations]
        return [read_method(format_method(method.name, choice)) for choice in choices]


def read_sweep(words: Sequence[str]) -> Sweep:
    """The sweep that `key=v1,v2,… …` stands for. Raises UserError for a malformed word."""
    values: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        found = [value for value in text.split(",") if value]
        if not found or key in values:
            raise UserError(f"--sweep: {word!r} is not key=value,value,…, or its key is repeated")
        values[key] = found
    return Sweep(tuple(words), values)


def sweep_methods(methods: Sequence[Method], sweep: Sweep) -> list[Method]:
    """Every method under every combination of the swept values, without those that do the same as
    an earlier one."""
    if not sweep.values:
        return list({method.name: method for method in methods}.values())
    sweep.check(methods)
    found: dict[System, Method] = {}
    for swept in itertools.chain.from_iterable(sweep.of(method) for method in methods):
        system = swept.system
        steps, tokens = (getattr(system, key, None) for key in ("steps", "draft_tokens"))
        if steps and tokens:  # a draft takes no more steps than it has tokens
            system = swept.with_options(steps=min(steps, tokens)).system
        found.setdefault(system, swept)
    return list(found.values())


def first_kind(drafters: Mapping[str, Any], kind: str) -> str:
    """The kind of the given drafter that serves as `kind`: for `ANY` that of the first one."""
    return next(iter(drafters), ANY) if kind == ANY else kind


def find_missing(needs: Sequence[str], drafters: Mapping[str, Any]) -> str | None:
    """The first kind of drafter that is needed and not given."""
    return next((kind for kind in needs if first_kind(drafters, kind) not in drafters), None)


def check_drafters(methods: Sequence[Method], drafters: Mapping[str, Any]) -> None:
    """Raises UserError for the first method whose drafter is not given."""
    for method in methods:
        kind = find_missing(method.needs, drafters)
        if kind is not None:
            what = ", and none is shipped for this target" if kind == ANY else f" of kind {kind}"
            name = "FOLDER" if kind == ANY else f"{kind}=FOLDER"
            hint = f"(--drafter {name}; given: {', '.join(drafters) or 'none'})"
            raise UserError(f"method {method.name!r} needs a drafter{what} {hint}")
