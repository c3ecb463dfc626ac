"""The methods of a measurement, by the names that were asked for, and a decoder for each, all on one target."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from align.common.errors import UserError, nearest
from decode.method_names import PLAIN
from decode.methods.build import build, open_parts
from decode.methods.drafter_spec import drafters_by_role, role_of
from decode.methods.registry import SYSTEMS
from decode.methods.spec import Method, check_parts, read_method, swept, with_all

if TYPE_CHECKING:
    from align.target.model import Target
    from decode.engine.decoder import Decoder
    from decode.speculation.sampling import Sampling

METHODS = (PLAIN, "lookup", "drafter", "combined")
"""The default ones: `drafter` is the drafter given, as it decodes by itself; `combined` has lookup in front of it where the
text repeats itself. All others are decode/methods/registry.py's."""


def target_and_drafters(options: Any, console: Console) -> tuple[str, dict[str, str]]:
    """The target's spec and the drafters' folders by kind, the first one first; none where none was given and none is shipped
    for this target.
    """
    from align.target.loading import DEFAULT_TARGET
    from decode.methods.drafter_spec import DEFAULT_DRAFTER

    spec = options.target or DEFAULT_TARGET
    shipped = None
    if spec == DEFAULT_TARGET and (DEFAULT_DRAFTER / "config.json").is_file():
        shipped = str(DEFAULT_DRAFTER)
    found = drafters_by_role(options.drafter, shipped)
    second = found.get("variable_prefix")
    if second and role_of(second) != "variable_prefix":
        note = f"note: {second} does not say that it was trained to go on from a drafted prefix (recipe=smollm2_variable_prefix)"
        console.print(note, markup=False, highlight=False)
    if not found and options.methods is None:
        note = f"note: no --drafter given and none is shipped for {spec}: lookup alone is measured"
        console.print(note, markup=False, highlight=False)
    return spec, found


def checked_names(text: str | None) -> list[str] | None:
    """The methods of a comma list as they are written, `all` among them; None: none were named. Loads nothing.

    Raises:
        UserError: no method, an unknown one, or an option that it does not have.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"--methods={text!r} names no method{nearest('', METHODS)}")
    known = [*METHODS, *SYSTEMS, "all"]
    for name in names:
        first, colon, _ = name.partition(":")
        if first not in known:
            raise UserError(f"--methods: unknown method {name!r}{nearest(name, known)}")
        if first in ("drafter", "combined") and colon:
            raise UserError(
                f"--methods={name}: {first} takes its options from --draft-tokens, --tree-nodes, --steps, --order and "
                "--verifier; systems take theirs behind colons (block:gamma=2)"
            )
        if name not in (*METHODS, "all"):
            read_method(name)
    return names


def methods_of(
    names: Sequence[str] | None, sweep: Sequence[str], drafters: dict[str, str]
) -> tuple[dict[str, Method | None], list[str]]:
    """The methods by name, plain first and the default ones in their order (None: those that `decode.load` makes), and a line
    for each that `all` leaves out for want of a drafter. `names`: of `checked_names`.

    Raises:
        UserError: a drafter that is not there, or a sweep of what no method has.
    """
    if names is None:
        names = [m for m in METHODS if m in (PLAIN, "lookup") or drafters]
    names, left_out = with_all(names, drafters)
    for name in ("drafter", "combined"):
        if name in names and not drafters:
            raise UserError(f"--methods={name} needs --drafter FOLDER: none is shipped for this target")
    ours = (PLAIN, "drafter", "combined")
    systems = swept([read_method(name) for name in names if name not in ours], sweep)
    check_parts(systems, drafters)
    found: dict[str, Method | None] = {PLAIN: None}
    found |= {m.name: m for m in systems if m.name == "lookup"}
    found |= {name: None for name in ("drafter", "combined") if name in names}
    return found | {m.name: m for m in systems}, left_out


def corpora_of(methods: Iterable[Method | None]) -> list[str]:
    """The files that methods read."""
    return sorted({m.given["corpus"] for m in methods if m and m.given.get("corpus")})


def used_drafters(methods: dict[str, Method | None], drafters: dict[str, str]) -> dict[str, str]:
    """The drafters that a figure may depend on."""
    roles = {role for m in methods.values() if m for role in m.needs}
    first = next(iter(drafters), None) if {"drafter", "combined"} & methods.keys() else None
    return {role: folder for role, folder in drafters.items() if role in roles or role == first}


def decoders_of(
    spec: str,
    drafters: dict[str, str],
    methods: dict[str, Method | None],
    options: Any,
    sampling: Sampling,
    refused: dict[str, UserError],
) -> dict[str, Decoder]:
    """One decoder per method, all on the same target; `refused` takes those that can't be built."""
    import torch

    from decode.methods.load import load

    if options.threads is not None:
        most = 4 * (os.cpu_count() or 1)  # far beyond the cores OpenMP ends the process without a word
        if options.threads > most:
            raise UserError(f"--threads={options.threads}: at most {most} on this machine")
        torch.set_num_threads(options.threads)
    own = {name: getattr(options, name) for name in ("verifier", "steps", "order", "drafter_tokenizer")}
    common = {"dtype": options.dtype, "device": options.device, "draft_tokens": options.draft_tokens}
    decoders: dict[str, Decoder] = {}
    target: str | Target = spec
    for name in ("combined", "drafter", PLAIN):  # a wrong folder is refused before the target is loaded
        if name in methods:
            drafter, special = (None, {}) if name == PLAIN else (next(iter(drafters.values())), own)
            decoders[name] = load(
                target,
                drafter,
                tree_nodes=options.tree_nodes,
                copying=name == "combined",
                **common,
                **special,
            )
            target = decoders[name].target
    parts = open_parts([m for m in methods.values() if m], drafters, decoders[PLAIN].target)
    for name, method in methods.items():
        if method is None:
            continue
        try:
            made = build(method, parts, options.draft_tokens)
        except UserError as error:
            refused[name] = error
            continue
        try:
            _try(made, sampling)
        except UserError as error:
            refused[name] = UserError(f"method {name!r}: {error}")
        else:
            decoders[name] = made
    return {name: decoders[name] for name in methods if name in decoders}


def _try(decoder: Decoder, sampling: Sampling) -> None:
    """Two tokens: a verifier learns only from a draft how its siblings were drawn.

    Raises:
        UserError: the verifier would change the output of such drafts.
    """
    from decode.wrappers.adaptive import SwitchingDrafter

    decoder.verifier_for(sampling)
    if decoder.drafter is not None:
        decoder.generate([*decoder.target.eos_ids[:1], 1, 2, 1, 2], max_new_tokens=3, sampling=sampling)
    if isinstance(decoder.drafter, SwitchingDrafter):
        decoder.drafter.reset()


def buildable(
    spec: str, drafters: dict[str, str], methods: dict[str, Method | None], options: Any, sampling: Sampling
) -> tuple[dict[str, Decoder], list[str]]:
    """The decoders; and a line for each that came out of `all` or of a sweep and can't be made of these drafters.

    Raises:
        UserError: one that was asked for by its name can't be built, or nothing is left.
    """
    asked = [name.strip() for name in (options.methods or "").split(",")]
    refused: dict[str, UserError] = {}
    decoders = decoders_of(spec, drafters, methods, options, sampling, refused)
    named = [name for name in refused if name in asked]
    if refused and (named or (not options.sweep and "all" not in asked) or set(decoders) == {PLAIN}):
        raise refused[next(iter(named or refused))]
    return decoders, [str(error) for error in refused.values()]
