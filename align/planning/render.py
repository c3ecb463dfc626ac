"""A plan as text."""

from __future__ import annotations

from align.planning.memory import StageMemory
from align.planning.plan import GIB, TrainingPlan


def format_count(number: float) -> str:
    """A number with k, M, G or T."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_bytes(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.0f} MiB"


def render(plan: TrainingPlan) -> str:
    recipe, target, drafter, text = plan.recipe, plan.target, plan.drafter, plan.text
    parts = format_count
    lines = [
        f"{recipe.name}: {target.spec} ({target.architecture}) on {plan.hardware.count} × "
        f"{plan.hardware.title}",
        "",
        f"target     {parts(target.parameters)} parameters, {target.num_layers} layers, "
        f"{target.vocab_size:,} tokens, "
        "context "
        f"{target.context_limit:,}{'' if target.has_weights else '; its weights are not here'}",
        f"drafter    {parts(drafter.parameters)} parameters, {parts(drafter.trained)} of them "
        "trained "
        f"({drafter.kind}, drafts of {drafter.drafted})",
        f"text       {text.samples:,} samples ({text.written:,} are there), {parts(text.total)} "
        "tokens, "
        f"{text.rows(recipe.data.length):,} rows of {recipe.data.length}",
        f"           {text.tokens:.0f} tokens per sample ({text.source}), {text.kept:.0%} of "
        "written samples are kept",
        f"training   {recipe.trainer.max_steps:,} steps of {recipe.trainer.batch_size} rows: "
        f"{parts(plan.tokens_seen)} text tokens",
        "",
        f"{'':<11}{'memory per device':>18}{'time':>10}   most of the memory",
        *(_render_stage(plan, stage) for stage in plan.stages),
        "",
        *_render_tau(plan),
        f"time       {_format_total(plan)}",
        *(f"note: {note}" for note in plan.notes),
        "",
        *([f"DOES NOT FIT: {line}" for line in plan.misfits] or ["everything fits in memory"]),
    ]
    return "\n".join(lines)


def _render_stage(plan: TrainingPlan, stage: StageMemory) -> str:
    seconds = "?" if plan.seconds is None else format_seconds(getattr(plan.seconds, stage.stage))
    largest = sorted(stage.parts.items(), key=lambda pair: -pair[1])[:3]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    return f"{stage.stage:<11}{format_bytes(stage.bytes):>18}{seconds:>10}   {parts}"


def _format_total(plan: TrainingPlan) -> str:
    if plan.seconds is None:
        return "unknown: a pilot on the device itself measures it"
    total = plan.seconds.writing + plan.seconds.training
    return f"{format_seconds(total)} in all, measured here on a few samples and steps"


def _render_tau(plan: TrainingPlan) -> list[str]:
    if not plan.tau:
        return [f"expected τ unknown: no run of drafter.kind={plan.drafter.kind} was measured"]
    names = {"greedy": "greedy", "sampling": "temperature 1"}
    shown = [
        f"{names[how]} {t.value:.2f} [{t.low:.2f}, {t.high:.2f}]" for how, t in plan.tau.items()
    ]
    known = next(iter(plan.tau.values()))
    lines = [
        f"expected τ {'; '.join(shown)} (95% band, from {known.runs} runs of this kind of "
        f"{known.of})"
    ]
    return lines + ([f"           a guess: {known.guess}"] if known.guess else [])
