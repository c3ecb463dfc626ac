"""`decode.eval` without its command line: from options to a measured folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from align.common.errors import UserError
from decode.method_names import PLAIN
from decode.methods.spec import Method

if TYPE_CHECKING:
    pass

from argparse import Namespace
from typing import TYPE_CHECKING

from decode.benchmark.folder import check_early
from decode.benchmark.plan import (
    buildable,
    checked_names,
    corpora_of,
    decoders_of,
    methods_of,
    target_and_drafters,
    used_drafters,
)
from decode.benchmark.tuning import SUITE as TUNING_SUITE
from decode.benchmark.tuning import settings_to_try
from decode.methods.drafter_spec import given_drafters
from decode.reporting.summary import plural
from decode.suites.registry import prompts_of, resolve

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder
    from decode.speculation.sampling import Sampling


def evaluate(options: Any, console: Console, command: str = "") -> tuple[dict[str, Any], Path]:
    """Measure what the options ask for; returns the summary and the folder that holds it.

    Raises:
        UserError: an input that can't be used, before anything is measured.
    """
    names = checked_names(options.methods)
    suites = () if options.prompts else resolve(options.suite or "builtin")
    if options.tune and TUNING_SUITE in {suite.name for suite, _ in suites}:
        raise UserError(
            f"--tune chooses on the prompts of {TUNING_SUITE}: measure on others (--suite mtbench, or --prompts FILE)"
        )
    check_early(options.out, options)
    given_drafters(options.drafter)
    from decode.benchmark.session import begin
    from decode.speculation.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_p, options.top_k, seed=options.seed)
    spec, drafters = target_and_drafters(options, console)
    methods, left_out = methods_of(names, [] if options.tune else options.sweep, drafters)
    _check_read(methods, options)
    loaded, skipped = prompts_of(options)
    skipped += left_out
    for suite in loaded:
        console.print(suite.describe(), markup=False, highlight=False)
    _say_left_out(skipped, console)
    drafters = used_drafters(methods, drafters)
    if options.tune is None:
        decoders, lines = buildable(spec, drafters, methods, options, sampling)
        methods = {name: methods[name] for name in decoders}
        _say_left_out(lines, console)
        skipped += lines
    else:
        methods, decoders, options = _tuned(spec, drafters, methods, sampling, options, console, command)
    corpora = corpora_of(methods.values())
    measurement = begin(options, decoders, loaded, skipped, sampling, drafters, corpora, console, command)
    return measurement.finish()


def _tuned(
    spec: str,
    drafters: dict[str, str],
    asked: dict[str, Method | None],
    sampling: Sampling,
    options: Any,
    console: Console,
    command: str,
) -> tuple[dict[str, Method | None], dict[str, Decoder], Any]:
    """Every method that was asked for in its best setting, the decoders, and the options of the measurement that follows."""
    from decode.benchmark.session import begin
    from decode.wrappers.adaptive import SwitchingDrafter

    fixed = ("gamma",) if options.draft_tokens else ()
    trying = settings_to_try([m for m in asked.values() if m], options.sweep, fixed)
    every: dict[str, Method | None] = {name: None for name, m in asked.items() if m is None}
    every |= {m.name: m for made in trying.values() for m in made}
    refused: dict[str, UserError] = {}
    decoders = decoders_of(spec, drafters, every, options, sampling, refused)
    groups = {name: [m.name for m in made if m.name in decoders] for name, made in trying.items()}
    for name, made in trying.items():
        if not groups[name]:
            raise refused[made[0].name]
    if refused:
        note = f"not in the race, as these drafters or options don't go together: {', '.join(refused)}"
        console.print(note, markup=False, highlight=False)
    won = {name: made[0] for name, made in groups.items()}
    lines = []
    if several := {name: made for name, made in groups.items() if len(made) > 1}:
        own = {"suite": TUNING_SUITE, "prompts": None, "data_dir": None, "limit": options.tune, "repeats": 1}
        own |= {"out": options.out and options.out / "tuning", "no_hf_check": True, "race": True}
        local = Namespace(**vars(options) | own)
        racing = {name: decoders[name] for name in (PLAIN, *(n for made in several.values() for n in made))}
        suites, skipped = prompts_of(local)
        corpora = corpora_of(every.values())
        race = begin(local, racing, suites, skipped, sampling, drafters, corpora, console, command)
        won |= race.race(several)
        on = f"{plural(len(race.tasks), 'prompt')} of {TUNING_SUITE}"
        lines = [f"{won[name]}, of {plural(len(made), 'setting')} on {on}" for name, made in several.items()]
    best = {won.get(name, name): every[won.get(name, name)] for name in asked}
    for name in best:
        if isinstance(drafter := decoders[name].drafter, SwitchingDrafter):
            drafter.reset()
    left = Namespace(**vars(options) | {"sweep": [], "tuned": lines})
    return best, {name: decoders[name] for name in best}, left


def _say_left_out(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(f"left out: {line}", markup=False, highlight=False, soft_wrap=True)


_OF_THE_DRAFTER: dict[str, Any] = {
    "tree_nodes": None,
    "drafter_tokenizer": None,
    "steps": 1,
    "order": "left_to_right",
    "verifier": "auto",
}
"""Options of `drafter` and `combined` alone, with their defaults."""


def _check_read(methods: dict[str, Method | None], options: Any) -> None:
    """Raises UserError for an option of `drafter` and `combined` where neither is measured."""
    if {"drafter", "combined"} & methods.keys():
        return
    for key, default in _OF_THE_DRAFTER.items():
        if getattr(options, key) != default:
            raise UserError(
                f"--{key.replace('_', '-')} is read by the methods drafter and combined, and neither is measured here: systems take "
                "their options behind colons (specdiff:steps=2:order=random:nodes=0:verifier=hybrid)"
            )
