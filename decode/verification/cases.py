"""The cases that `decode.verify` checks: one drafter with several options, or methods by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from decode.cli import target_options
from decode.engine.decoder import Decoder
from decode.systems.construction import build
from decode.systems.drafter_folders import (
    BLOCKS,
    drafters_by_kind,
    drafters_for,
    kind_of,
    read_drafters,
    shipped_for,
)
from decode.systems.opening import OpenDrafters, open_drafters
from decode.systems.parsing import Method, read_method, read_methods
from decode.systems.registry import DIFFUSION, LOOKUP, ORDERS, SYSTEMS
from decode.verification.pair import VerifyConfig, unverifiable
from specalign.common.errors import UserError, nearest
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET


@dataclass(frozen=True)
class Case:
    """A method under test."""

    name: str
    method: Method
    verifier: str = "auto"


@dataclass
class Cases:
    """All cases of a run: those `compared` run at temperature 0 and coupled, those `drawn` sample,
    each with its verifier. drafters: folders by role. tokenizer: of the first one, where it is not
    the target's. engine: its name in `parsing.ENGINES`."""

    target: Target
    drafters: Mapping[str, str]
    compared: Sequence[Case]
    drawn: Sequence[Case]
    tokenizer: str | None = None
    engine: str = "eager"

    @cached_property
    def _opened(self) -> OpenDrafters:
        methods = [case.method for case in (*self.compared, *self.drawn)]
        return open_drafters(methods, self.drafters, self.target, self.tokenizer)

    @property
    def captured(self) -> bool:
        """Whether the captured engine runs them."""
        on_gpu = self.target.device.type == "cuda"
        return self.engine == "captured" or (self.engine == "auto" and on_gpu)

    def plain(self) -> Decoder:
        """Plain decoding."""
        return self._build(read_method("plain"))

    def open(self, case: Case, verifier: str | None = None) -> Decoder:
        """The decoder of a case; `verifier` replaces the case's own."""
        return self._build(case.method.with_options(verifier=verifier or case.verifier))

    def _build(self, method: Method) -> Decoder:
        return build(method, replace(self._opened, engine=self.engine, paced=True))


def cases_of(config: VerifyConfig, say: Callable[[str], object]) -> tuple[Cases, str]:
    """The cases of a run, and the drafters as the verdict names them. `say` gets a line for each
    method that is left out. Raises UserError for a drafter that can't be opened, or a method that
    can't be verified."""
    spec = config.target or DEFAULT_TARGET
    if config.methods is None:
        name = config.drafter or shipped_for(spec) or LOOKUP
        drafters = {} if name == LOOKUP else {kind_of(name): name}
    else:
        drafters = drafters_by_kind(drafters_for(read_drafters(config.drafter), spec))
        name = ", ".join(f"{role}={folder}" for role, folder in drafters.items()) or "none"
    target = load_target(spec, **target_options(config))
    if config.methods is None:
        cases = _of_a_drafter(name, drafters, config.drafter_tokenizer, target)
    else:
        cases = of_methods(config.methods, drafters, target, say)
    cases.engine = config.engine
    return cases, name


_CHAIN, _TREE, _COPIES = "drafter:tree_nodes=0", "drafter:tree_nodes=5", "drafter:copying=true"
_IN_ORDER = {f"2 steps, {order}": f"drafter:steps=2:order={order}" for order in ORDERS[1:]}
_OF_BLOCKS = (
    {"chain": _CHAIN, "tree": _TREE, "tree, with copies": f"{_TREE}:copying=true"},
    [
        ("chain", "token", _CHAIN),
        ("chain", "block", _CHAIN),
        ("tree", "point_mass", _TREE),
        *(("drawn tree", v, _TREE) for v in ("recursive", "traversal", "k_seq")),
        ("chain with copies", "token", _COPIES),
    ],
)
"""Of block drafters: name → the method whose outputs are compared; and name, verifier and the
method whose tokens are tested."""
_OF_DIFFUSION = (
    {"1 step": "drafter", "2 steps": "drafter:steps=2", **_IN_ORDER, "with copies": _COPIES},
    [
        ("1 step", "token", "drafter"),
        ("1 step", "block", "drafter"),
        ("2 steps", "block", "drafter:steps=2"),
        *((name, "hybrid", text) for name, text in _IN_ORDER.items()),
        ("with copies", "token", _COPIES),
    ],
)


def _of_a_drafter(
    drafter: str, drafters: Mapping[str, str], tokenizer: str | None, target: Target
) -> Cases:
    """The options under which a drafter of its kind is used."""
    method = "drafter" if drafters else LOOKUP
    compared, drawn = {drafter: method}, [(drafter, "point_mass", method)]
    if any(kind in drafters for kind in BLOCKS):
        compared, drawn = _OF_BLOCKS
    elif DIFFUSION in drafters and tokenizer is None:
        compared, drawn = _OF_DIFFUSION
    several = [Case(name, read_method(text)) for name, text in compared.items()]
    counted = [Case(name, read_method(text), verifier) for name, verifier, text in drawn]
    if target.chains_only:
        several = [case for case in several if not case.method.branches]
        counted = [case for case in counted if not case.method.branches]
    return Cases(target, drafters, several, counted, tokenizer)


def of_methods(
    names: str, drafters: Mapping[str, str], target: Target, say: Callable[[str], object]
) -> Cases:
    """The cases of methods by name, `all` among them, each with the verifier that `decode.eval`
    gives it. Raises UserError for a method named itself that can't be verified; of `all`, `say`
    gets a line for each one."""
    asked = read_methods(names)
    chosen, left_out = asked.expand(drafters)
    reasons = {method: unverifiable(method) for method in chosen}
    left_out += [reason for reason in reasons.values() if reason]
    each = [Case(x.name, x, x.verifier) for x, reason in reasons.items() if reason is None]
    cases = Cases(target, drafters, each, each)
    verified = []
    for case in each:
        try:
            cases.open(case)
            verified.append(case)
        except UserError as error:
            if asked.names(case.name):
                raise
            left_out.append(str(error))
    if not verified:
        raise UserError(f"--methods={names!r} names nothing to verify{nearest('', SYSTEMS)}")
    for line in left_out:
        say(f"skipped: {line}")
    cases.compared = [Case(case.name, case.method) for case in verified]
    cases.drawn = verified
    return cases


def drafts_so(drafter: Any, how: str) -> bool:
    """Whether a drafter, or one that it wraps, drafts in this way
    (`decode.proposers.base.Drafter`)."""
    while drafter is not None and not getattr(drafter, how, False):
        drafter = getattr(drafter, "inner", None)
    return drafter is not None
