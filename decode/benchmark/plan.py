"""What is measured: the methods by the names that were asked for, and a decoder for each, all on one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from align.common.errors import UserError, nearest
from decode.benchmark.config import EvalConfig
from decode.method_names import PLAIN
from decode.methods.build import build, open_parts
from decode.methods.drafter_spec import DEFAULT_DRAFTER, drafters_by_role
from decode.methods.registry import ANY, SYSTEMS
from decode.methods.spec import Method, check_parts, read_method, role_in, swept, with_all

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder

DEFAULT_METHODS = (PLAIN, "lookup", "drafter", "combined")


@dataclass(frozen=True)
class Plan:
    """Args:
    target: its spec.
    drafters: folders that a figure may depend on, by role, the first one given first.
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
    """The methods of a comma list as they are written, `all` among them; None: none were named. Loads nothing.

    Raises:
        UserError: no method, an unknown one, or an option that it does not have.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*SYSTEMS, "all"]
    if not names:
        raise UserError(f"--methods={text!r} names no method{nearest('', DEFAULT_METHODS)}")
    for name in names:
        if name.partition(":")[0] not in known:
            raise UserError(f"--methods: unknown method {name!r}{nearest(name, known)}")
        if name != "all":
            read_method(name)
    return names


def make_plan(config: EvalConfig, say: Callable[[str], object]) -> tuple[Plan, list[str]]:
    """What these options ask for, and a line for each method that `all` leaves out for want of a drafter. `say` gets notes.

    Raises:
        UserError: a drafter that is not there, a sweep of what no method has, or an option that no method reads.
    """
    from align.target.loading import DEFAULT_TARGET

    spec = DEFAULT_TARGET if config.target is None else config.target
    shipped = spec == DEFAULT_TARGET and (DEFAULT_DRAFTER / "config.json").is_file()
    drafters = drafters_by_role(config.drafter, str(DEFAULT_DRAFTER) if shipped else None, say)
    if not drafters and config.methods is None:
        say(f"note: no --drafter given and none is shipped for {spec}: lookup alone is measured")
    names = checked_names(config.methods)
    if names is None:
        names = [m for m in DEFAULT_METHODS if drafters or ANY not in SYSTEMS[m].needs]
    names, left_out = with_all(names, drafters)
    methods = swept([read_method(n) for n in [PLAIN, *names]], [] if config.tune else config.sweep)
    check_parts(methods, drafters)
    _check_read(methods, config)
    given = {m.name: m.with_defaults(_options_of(m, config)) for m in methods}
    first = {name: given[name] for name in DEFAULT_METHODS if name in given}
    return Plan(spec, used_drafters(given, drafters), first | given), left_out


def _options_of(method: Method, config: EvalConfig) -> Mapping[str, object]:
    """The command's own options of drafting, which a system takes that is made of any drafter."""
    return config.drafting.of_a_method if ANY in method.needs else {}


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
    """One decoder per method, all on the same target; and why, for each that can't be built."""
    import torch

    from align.target.loading import load_target

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(
        plan.target,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
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
    """Two tokens: a verifier learns only from a draft how its siblings were drawn.

    Raises:
        UserError: the verifier would change the output of such drafts.
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
    """A method that measures its variants begins anew."""
    from decode.wrappers.adaptive import SwitchingDrafter
    from decode.wrappers.copying import CopyingDrafter

    drafter = decoder.drafter
    if isinstance(drafter, CopyingDrafter):
        drafter = drafter.inner
    if isinstance(drafter, SwitchingDrafter):
        drafter.reset()


def buildable(config: EvalConfig, plan: Plan) -> tuple[dict[str, Decoder], list[str]]:
    """The decoders; and a line for each that came out of `all` or of a sweep and can't be made of these drafters.

    Raises:
        UserError: one that was asked for by its name can't be built, or nothing is left.
    """
    asked = [name.strip() for name in (config.methods or "").split(",")]
    decoders, refused = decoders_of(config, plan)
    named = [name for name in refused if name in asked]
    if refused and (named or (not config.sweep and "all" not in asked) or set(decoders) == {PLAIN}):
        raise refused[next(iter(named or refused))]
    return decoders, [str(error) for error in refused.values()]
