"""Every system by name: which trained drafters it is made of, its options, the verifier that goes with it.

    specdiff:gamma=16:steps=4        a method: a name, and options after colons
    --sweep gamma=4,8 steps=1,2      every combination of them, for the methods that have these options

The options are the keyword arguments of the functions below, which is where their names, defaults and kinds come from.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.errors import UserError, nearest

if TYPE_CHECKING:
    from align.drafters.block import BlockDrafter
    from align.drafters.diffusion import DiffusionDrafter
    from align.target import Target
    from decode.controllers import Controller
    from decode.decoder import Decoder
    from decode.drafters.base import Drafter

ROLES = ("block", "variable_prefix", "diffusion", "autoregressive")
"""What a trained drafter may be in a system: a block drafter, D²SD's second one, a standalone diffusion drafter, a causal
language model."""


@dataclass
class Parts:
    """The target, and the trained drafters at hand, by role."""

    target: Target
    drafters: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> BlockDrafter:
        return self.drafters["block"]

    @property
    def variable_prefix(self) -> BlockDrafter:
        return self.drafters["variable_prefix"]

    @property
    def diffusion(self) -> DiffusionDrafter:
        return self.drafters["diffusion"]

    @property
    def autoregressive(self) -> Target:
        return self.drafters["autoregressive"]


# ---- the systems; gamma is the number of tokens drafted ahead ----


def _compiled(parts: Parts) -> None:
    """plain decoding through torch.compile"""


def _lookup(parts: Parts, gamma: int = 8, longest: int = 3) -> Drafter:
    """prompt lookup: copies what followed the text's ending before"""
    from decode.drafters.lookup import LookupDrafter

    return LookupDrafter(gamma, longest)


def _retrieval(
    parts: Parts, gamma: int = 8, shortest: int = 2, nodes: int = 0, corpus: str | None = None
) -> Drafter:
    """what most often followed the longest ending that occurred before, in the text or in a corpus file"""
    from decode.corpus import read_corpus
    from decode.drafters.retrieval import RetrievalDrafter
    from decode.suffixes import Datastore

    store = None if corpus is None else Datastore(read_corpus(corpus, parts.target))
    return RetrievalDrafter(gamma, shortest, nodes, store)


def _block(parts: Parts, gamma: int | None = None) -> Drafter:
    """the block drafter, a chain"""
    from decode.drafters.block import BlockProposer

    return BlockProposer(parts.block, gamma, 0)


def _block_tree(parts: Parts, gamma: int | None = None, nodes: int = 5) -> Drafter:
    """the block drafter, a tree of its likeliest paths"""
    from decode.drafters.block import BlockProposer

    return BlockProposer(parts.block, gamma, nodes)


def _specdiff(
    parts: Parts,
    gamma: int | None = None,
    steps: int = 1,
    order: str = "left_to_right",
    hot_start: bool = False,
    nodes: int = 0,
) -> Drafter:
    """SpecDiff: masks after the text, unmasked in some steps"""
    from decode.drafters.diffusion import DiffusionProposer

    return DiffusionProposer(parts.diffusion, gamma, steps, order, hot_start, nodes)


def _specdiff2(
    parts: Parts,
    gamma: int | None = None,
    candidates: int = 8,
    draft_temperature: float | None = None,
    keep_q: bool = False,
) -> Drafter:
    """SpecDiff-2: several drafts of one step, the target's p picks one"""
    from decode.drafters.candidates import CandidatesDrafter

    return CandidatesDrafter(parts.diffusion, gamma, candidates, draft_temperature, keep_q)


def _diffuspec(
    parts: Parts,
    gamma: int | None = None,
    path_search: bool = True,
    adaptive_length: bool = True,
    corpus: str | None = None,
) -> Drafter:
    """DiffuSpec: a path through one step's candidates that an n-gram model finds plausible, as long as it pays"""
    from decode.corpus import read_corpus
    from decode.drafters.diffuspec import DiffuSpecDrafter

    texts = () if corpus is None else read_corpus(corpus, parts.target)
    return DiffuSpecDrafter(
        parts.diffusion, gamma, path_search=path_search, adaptive_length=adaptive_length, corpus=texts
    )


def _d2sd(parts: Parts, gamma: int | None = None, boundaries: int = 4) -> Drafter:
    """D²SD: a second block drafter behind the first's likeliest mistakes, one tree"""
    from decode.drafters.d2sd import D2SDDrafter

    return D2SDDrafter(parts.block, parts.variable_prefix, boundaries, gamma)


def _tolerator(parts: Parts, gamma: int | None = None, steps: int = 1, rounds: int = 2) -> Drafter:
    """Tolerator: drafts filled in, masked again in part and refined"""
    from decode.drafters.tolerator import ToleratorDrafter

    return ToleratorDrafter(parts.diffusion, gamma, steps, rounds)


def _specdec(parts: Parts, gamma: int | None = None) -> Drafter:
    """SpecDec's relaxed verification over a diffusion draft: LOSSY"""
    from decode.drafters.diffusion import DiffusionProposer

    return DiffusionProposer(parts.diffusion, gamma)


def _autoregressive(parts: Parts, gamma: int = 4) -> Drafter:
    """standard speculative decoding with a smaller causal language model"""
    from decode.drafters.autoregressive import AutoregressiveDrafter

    return AutoregressiveDrafter(parts.autoregressive, gamma)


def _hierarchical(parts: Parts, gamma: int = 4, inner: str = "retrieval") -> Drafter:
    """hierarchical: the smaller model's own drafts are sped up by a cheaper drafter, verified in between"""
    from decode.drafters.hierarchical import HierarchicalDrafter

    if inner not in ("lookup", "retrieval", "diffusion"):
        raise UserError(f"inner={inner!r} is unknown{nearest(inner, ('lookup', 'retrieval', 'diffusion'))}")
    if inner == "diffusion":
        if "diffusion" not in parts.drafters:
            raise UserError("inner=diffusion needs a drafter of that kind: --drafter diffusion=FOLDER")
        cheap = _specdiff(parts)
    else:
        cheap = _lookup(parts) if inner == "lookup" else _retrieval(parts)
    return HierarchicalDrafter(parts.autoregressive, cheap, gamma)


def _double(parts: Parts, gamma: int = 4, corpus: str | None = None) -> Drafter:
    """Double: retrieval for drafter and target, the next draft made while the target verifies"""
    from decode.drafters.beside import BesideDrafter
    from decode.drafters.overlapped import OverlappedDrafter

    return BesideDrafter(
        OverlappedDrafter(_hierarchical(parts, gamma + 1)), _retrieval(parts, gamma, corpus=corpus)
    )


def _duo(parts: Parts, gamma: int = 8, device: str | None = None) -> Drafter:
    """DuoDecoding: the smaller model on a device of its own, ahead of the target, as long a draft as pays"""
    from align.target import load_target
    from decode.drafters.adaptive import AdaptiveDrafter
    from decode.drafters.autoregressive import AutoregressiveDrafter
    from decode.drafters.overlapped import OverlappedDrafter

    model = parts.autoregressive
    if device is not None and device != str(model.device):
        model = load_target(model.spec, dtype=str(model.dtype).removeprefix("torch."), device=device)
    return AdaptiveDrafter(OverlappedDrafter(AutoregressiveDrafter(model, gamma + 1)))


Make = Callable[..., "Drafter | None"]


@dataclass(frozen=True)
class System:
    """One of them. `needs`: roles; `verifier`: at temperatures above 0, where it is not `auto`; `target`: what becomes of the
    target before it decodes."""

    name: str
    make: Make
    needs: tuple[str, ...] = ()
    verifier: str = "auto"
    target: Callable[[Target], Target] | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return {k: v for k, v in inspect.signature(self.make).parameters.items() if k != "parts"}

    @property
    def says(self) -> str:
        return inspect.getdoc(self.make) or ""


def _through_compile(target: Target) -> Target:
    from align.target import compiled

    print(
        "compiled: torch.compile is at work on the target, minutes for a deep one",
        file=sys.stderr,
        flush=True,
    )
    return compiled(target)


SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        System("compiled", _compiled, target=_through_compile),
        System("lookup", _lookup),
        System("retrieval", _retrieval),
        System("autoregressive", _autoregressive, ("autoregressive",)),
        System("block", _block, ("block",)),
        System("block_tree", _block_tree, ("block",)),
        System("specdiff", _specdiff, ("diffusion",)),
        System("specdiff2", _specdiff2, ("diffusion",), "self_selection"),
        System("diffuspec", _diffuspec, ("diffusion",)),
        System("d2sd", _d2sd, ("block", "variable_prefix")),
        System("hierarchical", _hierarchical, ("autoregressive",)),
        System("double", _double, ("autoregressive",)),
        System("duo", _duo, ("autoregressive",)),
        System("tolerator", _tolerator, ("diffusion",)),
        System("specdec_lossy", _specdec, ("diffusion",), "lossy_top_beta"),
    )
}

COMMON = {"verifier": "auto", "controller": "fixed"}
"""Options of every system: the verifier, and who chooses how many tokens are drafted."""
CONTROLLERS = ("fixed", "adl", "cost")
"""Always gamma; DiffuSpec's adaptive draft length; the length of the most tokens a second."""


@dataclass(frozen=True)
class Method:
    """A system with options: `name` as it is written and reported."""

    name: str
    system: System
    options: Mapping[str, Any]


def read_method(text: str) -> Method:
    """`name:key=value:…`.

    Raises:
        UserError: an unknown name or key, or a value of another kind.
    """
    name, *words = text.split(":")
    if name not in SYSTEMS:
        raise UserError(f"--methods: unknown method {name!r}{nearest(name, SYSTEMS)}")
    system, options = SYSTEMS[name], dict[str, Any]()
    for word in words:
        key, equals, value = word.partition("=")
        known = [*system.options, *COMMON]
        if not equals or key not in known:
            what = f"option {key!r}" if equals else f"{word!r} is not key=value"
            raise UserError(f"--methods {text}: unknown {what}{nearest(key, known)}")
        if key in options:
            raise UserError(f"--methods {text}: {key} is given twice")
        options[key] = _value(text, system, key, value)
    return Method(text, system, options)


def _value(text: str, system: System, key: str, value: str) -> Any:
    """A word as the option's kind, which its annotation says."""
    kind = "str" if key in COMMON else str(system.options[key].annotation)
    if value == "none" and "None" in kind:
        return None
    if key == "controller" and value not in CONTROLLERS:
        raise UserError(f"--methods {text}: controller={value!r} is unknown{nearest(value, CONTROLLERS)}")
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                value.lower()
            ]
        if kind.startswith("int"):
            return int(value)
        return float(value) if kind.startswith("float") else value
    except (KeyError, ValueError):
        what = {"bool": "true or false", "int": "a whole number", "floa": "a number"}[kind[:4].strip(" |")]
        raise UserError(f"--methods {text}: {key}={value!r} must be {what}") from None


def swept(methods: Sequence[Method], sweep: Sequence[str]) -> list[Method]:
    """Each method once for every combination of the `key=v1,v2,…` that its system has options for.

    Raises:
        UserError: a malformed word, or a key that no method has.
    """
    values: dict[str, list[str]] = {}
    for word in sweep:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise UserError(f"--sweep: {word!r} is not key=value,value,…")
        values[key] = [v for v in text.split(",") if v]
    known = {key for m in methods for key in (*m.system.options, *COMMON)}
    for key in values:
        if key not in known:
            raise UserError(f"--sweep: no method here has the option {key!r}{nearest(key, sorted(known))}")
    found: dict[str, Method] = {}
    for method in methods:
        own = [k for k in values if k in (*method.system.options, *COMMON) and k not in method.options]
        for combination in itertools.product(*(values[k] for k in own)):
            words = [f"{k}={v}" for k, v in zip(own, combination, strict=True)]
            made = read_method(":".join([method.name, *words]))
            found[made.name] = made
    return list(found.values())


def build(method: Method, parts: Parts, gamma: int | None = None) -> Decoder:
    """The method's decoder. `gamma`: of a method that says none itself.

    Raises:
        UserError: a part that is not there, a value out of range.
    """
    from decode.decoder import Decoder
    from decode.drafters.adaptive import AdaptiveDrafter

    system = method.system
    check_parts([method], parts.drafters)
    options = {k: v for k, v in method.options.items() if k not in COMMON}
    if gamma is not None and "gamma" in system.options:
        options = {"gamma": gamma, **options}
    try:
        drafter = system.make(parts, **options)
        target = parts.target if system.target is None else system.target(parts.target)
    except UserError as error:
        raise UserError(f"method {method.name!r}: {error}") from None
    if drafter is not None and (make := _controller(method, drafter.draft_tokens)):
        drafter = AdaptiveDrafter(drafter, make)
    return Decoder(target, drafter, method.options.get("verifier", system.verifier))


def _controller(method: Method, most: int) -> Callable[[], Controller] | None:
    from decode.controllers import AdaptiveLength, CostAware

    match method.options.get("controller"):
        case "cost":
            return CostAware
        case "adl":  # as published, 20 to 30 by 10, for drafts of another length
            return lambda: AdaptiveLength(-(-2 * most // 3), most, most / 3, 0.5)
    return None


def read_drafters(text: str | None, default: str | None = None) -> list[tuple[str | None, str]]:
    """`FOLDER` or `role=FOLDER`, in a comma list, as (role or None, folder)."""
    found: list[tuple[str | None, str]] = []
    for word in (text or default or "").split(","):
        role, equals, folder = word.strip().partition("=")
        if not word.strip():
            continue
        if equals and role not in ROLES:
            raise UserError(f"--drafter: unknown kind {role!r}{nearest(role, ROLES)}")
        found.append((role, folder) if equals else (None, role))
    return found


def drafters_by_role(text: str | None, default: str | None = None) -> dict[str, str]:
    """The folders of `read_drafters` by role, the first one first; a bare folder's role by its files.

    Raises:
        UserError: two of one role, or a name that is no folder's.
    """
    found: dict[str, str] = {}
    for role, folder in read_drafters(text, default):
        if folder in ("lookup", "none"):
            raise UserError(f"--drafter={folder!r}: name a drafter's folder; lookup and plain are --methods")
        role = role or role_of(folder)
        if role in found:
            raise UserError(
                f"--drafter: {found[role]} and {folder} are both of the kind {role}: say which with KIND=FOLDER"
            )
        found[role] = folder
    return found


def open_parts(methods: Sequence[Method], drafters: Mapping[str, str], target: Target) -> Parts:
    """The drafters that these methods are made of, each opened once.

    Raises:
        UserError: one that is not given, or can't be opened.
    """
    from decode.decoder import open_part

    check_parts(methods, drafters)
    roles = dict.fromkeys(role for method in methods for role in method.system.needs)
    return Parts(target, {role: open_part(drafters[role], role, target) for role in roles})


def check_parts(methods: Sequence[Method], drafters: Mapping[str, Any]) -> None:
    """Raises UserError for the first method whose drafter is not there."""
    for method in methods:
        for role in method.system.needs:
            if role not in drafters:
                raise UserError(
                    f"method {method.name!r} needs a drafter of the kind {role}: --drafter {role}=FOLDER"
                )


def open_method(text: str, target: Target, drafters: str | None = None) -> Decoder:
    """`name:key=value:…` over drafters given as for `--drafter`."""
    method = read_method(text)
    return build(method, open_parts([method], drafters_by_role(drafters), target))


def role_of(folder: str) -> str:
    """What a drafter in a folder is, by its config.json: a block drafter, a causal language model, or a standalone diffusion
    drafter, which anything else is taken for."""
    from align.drafters.families import FAMILIES
    from align.target import read_config

    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        return "diffusion"
    values = read_config(path)
    if values.get("model_type") == "block_drafter":
        return "block"
    record = path / "drafter.json"
    if record.is_file() and '"kind": "autoregressive"' not in record.read_text(errors="replace"):
        return "diffusion"
    architecture = str((values.get("architectures") or [""])[0])
    masked = {name for family in FAMILIES.values() for name in family.architectures}
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel")) and architecture not in masked
    return "autoregressive" if causal else "diffusion"
