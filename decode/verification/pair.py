"""The options of `decode.verify`, and what it compares with plain decoding: one drafter under
several options, or methods by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from decode.systems.drafter_folders import (
    BLOCKS,
    check_methods,
    check_there,
    drafters_by_kind,
    drafters_for,
    kind_of,
    read_drafters,
    shipped_for,
)
from decode.systems.parsing import Method, check_drafters, read_method, read_methods
from decode.systems.registry import LOSSY, ORDERS, SYSTEMS
from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject
from specalign.lm.names import check_given
from specalign.suites.prompt import Prompt
from specalign.suites.registry import prompts_of

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder
    from decode.systems.construction import OpenDrafters
    from specalign.lm.model import Target

LIMIT, NEW_TOKENS = 4, 32
"""For a verdict within 90 seconds on two cores with the shipped pair."""


@dataclass(frozen=True)
class VerifyConfig:
    """The options of `decode.verify`, which its --help explains."""

    target: str | None = None
    drafter: str | None = None
    methods: str | None = None
    drafter_tokenizer: str | None = None
    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    limit: int = LIMIT
    max_new_tokens: int = NEW_TOKENS
    self_test: bool = False
    dtype: str = "float32"
    device: str = "auto"
    trust_remote_code: bool = False
    template_kwargs: JsonObject = field(default_factory=dict)
    system: str | None = None
    out: Path = Path("runs/verify")


@dataclass(frozen=True)
class Case:
    """A method under test."""

    name: str
    method: Method
    verifier: str = "auto"


@dataclass
class Cases:
    """All cases of a run.

    Args:
        target: the model that plain decoding runs.
        drafters: folders by role. tokenizer: of the first one, where it is not the target's.
        compared: cases that run at temperature 0 and coupled.
        drawn: cases that sample, each with its verifier.
    """

    target: Target
    drafters: Mapping[str, str]
    compared: Sequence[Case]
    drawn: Sequence[Case]
    tokenizer: str | None = None

    @cached_property
    def _opened(self) -> OpenDrafters:
        from decode.systems.construction import open_drafters

        methods = [case.method for case in (*self.compared, *self.drawn)]
        return open_drafters(methods, self.drafters, self.target, self.tokenizer)

    def open(self, case: Case, verifier: str | None = None) -> Decoder:
        """The decoder of a case; `verifier` replaces the case's own."""
        from decode.systems.construction import build

        return build(case.method.with_options(verifier=verifier or case.verifier), self._opened)


def check(config: VerifyConfig) -> list[Prompt]:
    """The prompts. Checks whatever can be checked before torch is imported.

    Raises:
        UserError: a misspelt method, a drafter that is not there, or no prompts.
    """
    if config.methods is not None:
        if config.drafter_tokenizer:
            raise UserError("--drafter-tokenizer belongs to --drafter alone, not to --methods")
        methods = read_methods(config.methods).methods
        for method in methods:
            if reason := _unverifiable(method):
                raise UserError(reason)
        check_methods(methods, read_drafters(config.drafter), config.target)
    elif config.drafter == "none":
        raise UserError(
            "--drafter=none drafts nothing, so there is nothing to verify: name a drafter, or "
            "lookup"
        )
    elif config.drafter is not None:
        check_there(config.drafter)
    check_given(config.target, config.device)
    suite = config.suite or (None if config.prompts else "mtbench")
    loaded, _ = prompts_of(
        suite, config.prompts, config.data_dir, config.limit, config.prompts_column
    )
    return [prompt for one in loaded for prompt in one.prompts]


def cases_of(config: VerifyConfig, say: Callable[[str], object]) -> tuple[Cases, str]:
    """The cases of a run, and the drafters as the verdict names them. `say` gets a line for each
    method that is left out.

    Raises:
        UserError: a drafter that is not there or can't be opened, or a method that there is nothing
            to verify of.
    """
    from specalign.lm.loading import load_target
    from specalign.lm.names import DEFAULT_TARGET

    spec = DEFAULT_TARGET if config.target is None else config.target
    shipped = shipped_for(spec)

    def open_target() -> Target:
        return load_target(
            spec,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
            template_kwargs=config.template_kwargs,
            system=config.system,
        )

    if config.methods is None:
        drafter = config.drafter or shipped or "lookup"
        return of_a_drafter(drafter, config.drafter_tokenizer, open_target), drafter
    drafters = drafters_by_kind(drafters_for(read_drafters(config.drafter), spec))
    cases = of_methods(config.methods, drafters, open_target, say)
    return cases, ", ".join(f"{role}={folder}" for role, folder in drafters.items()) or "none"


def of_a_drafter(drafter: str, tokenizer: str | None, open_target: Callable[[], Target]) -> Cases:
    """The cases of one drafter: the options under which a drafter of its kind is used.

    Raises:
        UserError: no drafter.
    """
    role = "lookup" if drafter == "lookup" else kind_of(drafter)
    method = "lookup" if drafter == "lookup" else "drafter"
    compared, drawn = {drafter: method}, [(drafter, "point_mass", method)]
    if role in BLOCKS:
        compared, drawn = _BLOCK
    elif role == "diffusion" and tokenizer is None:
        compared, drawn = _DIFFUSION
    target = open_target()
    one = [Case(name, read_method(text)) for name, text in compared.items()]
    counted = [Case(name, read_method(text), verifier) for name, verifier, text in drawn]
    if target.chains_only:
        one = [case for case in one if not case.method.branches]
        counted = [case for case in counted if not case.method.branches]
    return Cases(target, {} if drafter == "lookup" else {role: drafter}, one, counted, tokenizer)


_CHAIN, _TREE, _COPIES = "drafter:nodes=0", "drafter:nodes=5", "drafter:copying=true"
_BLOCK = (
    {"chain": _CHAIN, "tree": _TREE, "tree, with copies": f"{_TREE}:copying=true"},
    [
        ("chain", "token", _CHAIN),
        ("chain", "block", _CHAIN),
        ("tree", "point_mass", _TREE),
        *(("drawn tree", v, "drafter:nodes=5") for v in ("recursive", "traversal", "k_seq")),
        ("chain with copies", "token", _COPIES),
    ],
)
"""Of block drafters: name → the method whose outputs are compared; and name, verifier and the
method whose tokens are tested."""
_IN_ORDER = {f"2 steps, {order}": f"drafter:steps=2:order={order}" for order in ORDERS[1:]}
_DIFFUSION = (
    {"1 step": "drafter", "2 steps": "drafter:steps=2", **_IN_ORDER, "with copies": _COPIES},
    [
        ("1 step", "token", "drafter"),
        ("1 step", "block", "drafter"),
        ("2 steps", "block", "drafter:steps=2"),
        *((name, "hybrid", text) for name, text in _IN_ORDER.items()),
        ("with copies", "token", _COPIES),
    ],
)


def of_methods(
    names: str,
    drafters: dict[str, str],
    open_target: Callable[[], Target],
    say: Callable[[str], object],
) -> Cases:
    """The cases of methods by name, `all` among them, each with the verifier that `decode.eval`
    gives it. `say` gets a line for each method that is left out.

    Raises:
        UserError: an unknown method, a drafter that is not there, or one that changes the
            distribution on purpose.
    """
    asked = read_methods(names)
    chosen, left_out = asked.expand(drafters)

    def keep(methods: list[Method], why: Callable[[Method], str | None]) -> list[Method]:
        """Those without a reason against them."""
        kept = []
        for method in methods:
            reason = why(method)
            if reason is None:
                kept.append(method)
            elif asked.names(method.name):
                raise UserError(reason)
            else:
                left_out.append(reason)
        return kept

    def unbuildable(method: Method) -> str | None:
        """Why it can't decode with this target and these drafters, or None."""
        try:
            cases.open(Case(method.name, method, method.verifier))
        except UserError as error:
            return str(error)
        return None

    methods = keep([*{method.name: method for method in chosen}.values()], _unverifiable)
    check_drafters(methods, drafters)
    cases = Cases(open_target(), drafters, [Case(m.name, m) for m in methods], [])
    methods = keep(methods, unbuildable)
    if not methods:
        raise UserError(f"--methods={names!r} names nothing to verify{nearest('', SYSTEMS)}")
    for line in left_out:
        say(f"left out: {line}")
    cases.compared = [Case(m.name, m) for m in methods]
    cases.drawn = [Case(m.name, m, m.verifier) for m in methods]
    return cases


def _unverifiable(method: Method) -> str | None:
    """Why there is nothing to verify, in an error that names the method, or None."""
    if not method.system.drafts:
        return f"method {method.name!r}: it drafts nothing"
    if method.verifier.startswith(LOSSY):
        return f"method {method.name!r}: it changes the output's distribution on purpose"
    return None
