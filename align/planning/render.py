"""A plan in lines for people."""

from __future__ import annotations

from math import ceil

from align.planning.compute import rows_trained
from align.planning.memory import Need, feature_bytes
from align.planning.plan import Plan

GIB = 2**30
WORTH = 0.1
"""Of training's operations: a smaller share is not worth a line."""


def amount(number: float, unit: str = "") -> str:
    """A number with one of k, M, G, T, P."""
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            digits = 3 - len(str(int(number / size)))
            text = f"{number / size:.{max(0, digits)}f}"
            return f"{text} {name}{unit}" if unit else text + name
    return f"{number:.0f} {unit}".rstrip()


def hours(seconds: float) -> str:
    """As people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def render(plan: Plan, rate: float | None = None) -> str:
    """The whole page. `rate`: price of a device and hour."""
    r, t, d = plan.recipe, plan.target, plan.drafter
    lines = [f"{r.name}: {t.spec} ({t.architecture}) on {plan.hardware.count} × {plan.hardware.title}", ""]
    lines += [
        f"target     {amount(t.parameters)} parameters, {t.num_layers} layers, {t.vocab_size:,} tokens, context {t.context_limit:,}"
        + ("" if t.weights_here else "; its weights are not here"),
        f"drafter    {amount(d.parameters)} parameters, {amount(d.trained)} of them trained ({d.kind}, drafts of {d.drafted})",
        f"text       {plan.text.samples:,} samples, {amount(plan.text.total)} tokens, {plan.text.rows(r.data.length):,} rows of {r.data.length}"
        + (f"; {plan.text.there:,} samples are there" if plan.text.there else ""),
        f"           a sample takes {plan.text.tokens:.0f} tokens ({plan.text.source}), {plan.text.kept:.0%} of those written are kept",
        f"training   {r.trainer.max_steps:,} steps of {r.trainer.batch_size} rows: {amount(plan.tokens_seen)} text tokens",
        "",
        *_table(plan),
        "",
        f"disk       {_gib(plan.disk.bytes)}: checkpoints {_gib(plan.disk.checkpoints)}, text {_gib(plan.disk.text)}, features "
        f"{_gib(plan.disk.features)}, drafter {_gib(plan.disk.drafter)}",
        *_storing(plan),
        *_tau(plan),
        *_price(plan, rate),
    ]
    lines += [f"note: {note}" for note in plan.notes]
    lines += (
        ["", *(f"DOES NOT FIT: {m.line}" for m in plan.misfits)]
        if plan.misfits
        else ["", f"everything fits in memory; {_gib(plan.disk.bytes)} of disk are needed"]
    )
    return "\n".join(lines)


def _gib(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.0f} MiB"


def _table(plan: Plan) -> list[str]:
    """A line a stage: operations, memory of a device, time."""
    text, w, s = plan.text, plan.work, plan.seconds
    samples = (text.samples - text.there) / max(text.kept, 1e-9)
    t = plan.recipe.trainer
    rows = t.max_steps * t.batch_size
    flops = {
        "writing": samples * w.sample,
        "features": min(rows, text.rows(plan.recipe.data.length)) * w.row,
        "training": rows * (w.row + w.step_row) + t.max_steps * w.step,
    }
    found = [f"{'':<11}{'operations':>14}{'memory a device':>18}{'time':>10}   most of the memory"]
    for need in plan.needs:
        when = "?" if s is None else hours(getattr(s, need.stage))
        found.append(
            f"{need.stage:<11}{amount(flops[need.stage], 'FLOP'):>14}{_gib(need.bytes):>18}{when:>10}   {_parts(need)}"
        )
    found.append(f"{'':<11}time: {'not planned' if s is None else s.how}")
    return found


def _storing(plan: Plan) -> list[str]:
    """Whether what the target computes over a row pays on disk: it does where rows are read several times and the target's part is large."""
    t, rows = plan.recipe.trainer, plan.text.rows(plan.recipe.data.length)
    times = rows_trained(plan.recipe, plan.text)[0] / max(1, rows)
    w = plan.work
    saved = max(0.0, 1 - 1 / times) * w.row / (w.row + w.step_row + w.step / t.batch_size)
    if t.features_gb or t.keep_features_gb:
        useless = t.features_gb and times < 1.05
        return (
            ["           features are stored and no row is read twice: they save nothing"] if useless else []
        )
    if saved < WORTH:
        return []
    size = feature_bytes(plan.recipe, plan.target, plan.drafter) * rows * plan.recipe.data.length
    return [
        f"           rows are read {times:.1f} times: trainer.features_gb={ceil(size / 1e9)} would save {saved:.0%} of training's operations"
    ]


def _parts(need: Need) -> str:
    most = sorted(need.parts.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{name} {_gib(size)}" for name, size in most)


def _tau(plan: Plan) -> list[str]:
    pairs = (("greedy", plan.greedy), ("temperature 1", plan.sampling))
    found = [
        f"{name} {tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]" for name, tau in pairs if tau is not None
    ]
    if not found:
        return [f"expected τ no run of drafter.kind={plan.recipe.drafter.kind} was measured"]
    known = next(tau for _, tau in pairs if tau is not None)
    lines = [
        f"expected τ {'; '.join(found)} (95% band; rests on {known.runs} measured points of this kind, of {known.of})"
    ]
    return lines + ([f"           a guess: {known.guess}"] if known.guess else [])


def _price(plan: Plan, rate: float | None) -> list[str]:
    if plan.seconds is None:
        return []
    total = plan.seconds.writing + plan.seconds.training
    line = f"in all     {hours(total)}"
    if rate is None:
        return [line]
    device_hours = total / 3600 * plan.hardware.count
    return [f"{line}, {device_hours:.2f} device-hours at {rate:g}: {device_hours * rate:.2f}"]
