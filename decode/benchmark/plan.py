"""What is measured: the methods that were asked for, and a decoder for each, all on one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from align.common.errors import UserError, nearest
from decode.benchmark.config import EvalConfig
from decode.method_names import COMBINED, DRAFTER, LOOKUP, PLAIN
from decode.methods.build import build, open_parts
from decode.methods.drafter_spec import drafters_by_role, shipped_for
from decode.methods.registry import ANY, SYSTEMS
from decode.methods.spec import Method, check_parts, read_method, read_names, role_in, swept, with_all

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder

DEFAULT_METHODS = (PLAIN, LOOKUP, DRAFTER, COMBINED)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        target: its spec.
        drafters: the folders that a figure may depend on, by role; the first one given comes first.
        methods: by name, plain decoding first.
    """

    target: str
    drafters: Mapping[str, str]
    methods: Mapping[str, Method]

    @property
    def corpora(self) -> list[str]:
        """The files that methods read."""
        return sorted({m.given["corpus"] for m in self.methods.values() if m.given.get("corpus")})


def checked_names(text: str | None) -> list[str] | None:
    """`read_names` of at least one method; None where none were named. Loads nothing."""
    names = None if text is None else read_names(text)
    if names == []:
        raise UserError(f"--methods={text!r} names no method{nearest('', DEFAULT_METHODS)}")
    return names


def make_plan(config: EvalConfig, say: Callable[[str], object]) -> tuple[Plan, list[str]]:
    """The plan for these options, and a line for each method of `all` that lacks its drafter. `say` gets notes.

    Raises:
        UserError: a drafter that is not there, a sweep of what no method has, or an option that no method reads.
    """
    from align.target.names import DEFAULT_TARGET

    spec = DEFAULT_TARGET if config.target is None else config.target
    drafters = drafters_by_role(config.drafter, shipped_for(spec), say)
    if not drafters and config.methods is None:
        say(
            f"note: no drafter is shipped for {spec} and no --drafter FOLDER is given: lookup alone is measured"
        )
    names = checked_names(config.methods)
    if names is None:
        names = [m for m in DEFAULT_METHODS if drafters or ANY not in SYSTEMS[m].needs]
    names, left_out = with_all(names, drafters)
    methods = swept([read_method(n) for n in [PLAIN, *names]], [] if config.tune else config.sweep)
    check_parts(methods, drafters)
    _check_read(methods, config)
    # the command's own options of drafting belong to the systems that are made of any drafter
    of_any = config.drafting.of_a_method
    given = {m.name: m.with_defaults(of_any if ANY in m.needs else {}) for m in methods}
    first = {name: given[name] for name in DEFAULT_METHODS if name in given}
    return Plan(spec, used_drafters(given, drafters), first | given), left_out


def used_drafters(methods: Mapping[str, Method], drafters: Mapping[str, str]) -> dict[str, str]:
    """The drafters that a figure may depend on."""
    roles = {role_in(drafters, role) for m in methods.values() for role in m.needs}
    return {role: folder for role, folder in drafters.items() if role in roles}


def _check_read(methods: Sequence[Method], config: EvalConfig) -> None:
    """Raises UserError for an option of `drafter` and `combined` where neither is measured."""
    if any(ANY in method.needs for method in methods):
        return
    for key in config.drafting.given:
        if key != "draft_tokens":
            raise UserError(
                f"--{key.replace('_', '-')} is read by the methods drafter and combined, and neither is measured here: systems take "
                "their options behind colons (specdiff:steps=2:order=random:nodes=0:verifier=hybrid)"
            )


def decoders_of(config: EvalConfig, plan: Plan) -> tuple[dict[str, Decoder], dict[str, UserError]]:
    """A decoder for each method, all on one target; and for each method that can't be built, why."""
    import torch

    from align.target.loading import load_target

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(
        plan.target,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        template_kwargs=config.template_kwargs,
        system=config.system,
        decoding=True,
    )
    drafting = config.drafting
    parts = open_parts([*plan.methods.values()], plan.drafters, target, drafting.drafter_tokenizer)
    decoders: dict[str, Decoder] = {}
    refused: dict[str, UserError] = {}
    for name, method in plan.methods.items():
        try:
            decoder = build(method, parts, drafting.draft_tokens)
            _try(name, decoder, config)
            decoders[name] = decoder
        except UserError as error:
            refused[name] = error
    return decoders, refused


def _try(name: str, decoder: Decoder, config: EvalConfig) -> None:
    """Decode a few tokens: how siblings are drawn, which a verifier may refuse, is known only from a draft.

    Raises:
        UserError: with these drafts the verifier would change the output's distribution.
    """
    try:
        decoder.verifier_for(config.sampling)
        if decoder.drafter is not None:
            tokens = [*decoder.target.eos_ids[:1], 1, 2, 1, 2]
            decoder.generate(tokens, max_new_tokens=3, sampling=config.sampling)
    except UserError as error:
        raise UserError(f"method {name!r}: {error}") from None
    forget(decoder)


def forget(decoder: Decoder) -> None:
    """Discard what a method with several variants has measured of them."""
    from decode.wrappers.adaptive import SwitchingDrafter
    from decode.wrappers.copying import CopyingDrafter

    drafter = decoder.drafter
    if isinstance(drafter, CopyingDrafter):
        drafter = drafter.inner
    if isinstance(drafter, SwitchingDrafter):
        drafter.reset()


def buildable(config: EvalConfig, plan: Plan) -> tuple[dict[str, Decoder], list[str]]:
    """The decoders, and a line for each method of `all` or of a sweep that can't be built with these drafters.

    Raises:
        UserError: a method that was named itself can't be built, or none can.
    """
    asked = [name.strip() for name in (config.methods or "").split(",")]
    decoders, refused = decoders_of(config, plan)
    named = [name for name in refused if name in asked]
    if refused and (named or (not config.sweep and "all" not in asked) or set(decoders) == {PLAIN}):
        raise refused[next(iter(named or refused))]
    return decoders, [str(error) for error in refused.values()]
