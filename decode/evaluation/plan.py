"""The methods to measure, and a decoder for each, all sharing one target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from decode.cli import target_options
from decode.engine.decoder import Decoder
from decode.evaluation.config import DEFAULT_METHODS, EvalConfig
from decode.systems.construction import assemble
from decode.systems.drafter_folders import drafters_by_kind, drafters_for
from decode.systems.opening import open_drafters
from decode.systems.parsing import (
    Method,
    Sweep,
    check_drafters,
    first_kind,
    read_method,
    sweep_methods,
)
from decode.systems.registry import ANY, PLAIN, SYSTEMS
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.names import DEFAULT_TARGET


@dataclass(frozen=True)
class EvalPlan:
    """The target's name, the drafters' folders by kind (the first one given first), and the methods
    by name (plain decoding first)."""

    target: str
    drafters: Mapping[str, str]
    methods: Mapping[str, Method]


def make_plan(config: EvalConfig, say: Callable[[str], object]) -> tuple[EvalPlan, list[str]]:
    """The plan for these options, and a line for each method of `all` that lacks its drafter. `say`
    receives notes. Raises UserError: a drafter of the wrong kind, a sweep of what no method has, or
    an option that no method reads."""
    target = DEFAULT_TARGET if config.target is None else config.target
    drafters = drafters_by_kind(drafters_for(config.drafters, target), say)
    left_out: list[str] = []
    if config.methods is not None:
        methods, left_out = config.methods.expand(drafters)
    else:
        usable = [name for name in DEFAULT_METHODS if drafters or ANY not in SYSTEMS[name].needs]
        methods = [read_method(name) for name in usable]
        if not drafters:
            say(
                f"note: no drafter is shipped for {target} and none is given (--drafter): "
                "measuring lookup only"
            )
    sweep = Sweep() if config.tune else config.sweep
    methods = sweep_methods([read_method(PLAIN), *methods], sweep)
    check_drafters(methods, drafters)
    options = _options_of_any(methods, config)
    chosen = {m.name: m.with_defaults(options) if ANY in m.needs else m for m in methods}
    first = {name: chosen[name] for name in DEFAULT_METHODS if name in chosen}
    used = {first_kind(drafters, kind) for method in methods for kind in method.needs}
    folders = {kind: folder for kind, folder in drafters.items() if kind in used}
    if config.training_data and not folders:
        raise UserError("--training-data is of a drafter, and no method uses one (--drafter)")
    return EvalPlan(target, folders, first | chosen), left_out


def _options_of_any(methods: Sequence[Method], config: EvalConfig) -> dict[str, object]:
    """The command's drafting options for `drafter` and `combined`, except the draft tokens, which
    every method reads. Raises UserError where neither is measured."""
    options = dict(config.drafting.given)
    options.pop("draft_tokens", None)
    unread = [*options, *(["drafter_tokenizer"] if config.drafter_tokenizer else [])]
    if unread and not any(ANY in method.needs for method in methods):
        raise UserError(
            f"--{unread[0].replace('_', '-')} applies only to the methods drafter and combined, "
            "and neither is measured; give other methods their options after colons "
            "(specdiff:steps=2)"
        )
    return options


def make_decoders(
    config: EvalConfig, plan: EvalPlan
) -> tuple[dict[str, Decoder], dict[str, UserError]]:
    """A decoder for each method, all on one target; and for each method that can't be built,
    why."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(plan.target, decoding=True, **target_options(config))
    methods = [*plan.methods.values()]
    opened = open_drafters(methods, plan.drafters, target, config.drafter_tokenizer)
    opened.engine, opened.paced = config.engine, True
    decoders: dict[str, Decoder] = {}
    refused: dict[str, UserError] = {}
    for name, method in plan.methods.items():
        try:
            decoder = assemble(method, opened, config.drafting.draft_tokens)
            decoder.verifier_for(config.sampling)
            if decoder.drafter is not None:
                # only a draft shows how siblings are drawn, which a verifier may refuse
                tokens = [*decoder.target.eos_ids[:1], 1, 2, 1, 2]
                decoder.generate(tokens, 3, sampling=config.sampling, adapt=False)
            decoders[name] = decoder
        except UserError as error:
            refused[name] = UserError(f"method {name!r}: {error}")
    return decoders, refused


def make_all_decoders(config: EvalConfig, plan: EvalPlan) -> tuple[dict[str, Decoder], list[str]]:
    """The decoders, and a line for each method of `all` or of a sweep that can't be built. Raises
    UserError: a method that was named itself can't be built, or none can."""
    decoders, refused = make_decoders(config, plan)
    asked = config.methods
    named = [name for name in refused if asked is not None and asked.names(name)]
    optional = bool(config.sweep.words) or (asked is not None and asked.has_all)
    if refused and (named or not optional or set(decoders) == {PLAIN}):
        raise refused[next(iter(named or refused))]
    return decoders, [str(error) for error in refused.values()]
