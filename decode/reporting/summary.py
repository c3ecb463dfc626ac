"""The summary of a measurement, made from run.json and the records, and its verdict in plain words. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from align.common.text import plural as plural
from decode.method_names import MAIN, PLAIN, TITLES
from decode.reporting.records import Record, Run
from decode.reporting.statistics import (
    FEWEST,
    Estimate,
    acceptance,
    counts,
    decode_time,
    paired_ratio,
    tau,
    tau_macro,
    times,
    whole_time,
)

BUG = "BUG"
_MOST_SENTENCES = 5
"""Up to so many methods have a sentence each in the verdict; the table has all of them."""
STEADY = 2.0
"""Plain decoding's slowest prompt takes less than this times the seconds per token of its fastest one on an idle machine: 1.4 and
1.5 over MT-Bench, 4 to 10 beside another process."""


def summarise(run: Run, records: Sequence[Record]) -> dict[str, Any]:
    """Figures per suite and method, over all suites, and where they come from.

    `suites[SUITE][METHOD]` and `overall[METHOD]` hold `speedup`, `speedup_lo`, `speedup_hi`, `tau`, `tau_lo`, `tau_hi`,
    `tokens_per_s`, `prompts`, `identical` and more (`method_figures`).
    """
    methods = [m for m in run.settings["methods"] if any(r.method == m for r in records)]
    greedy = run.settings["temperature"] == 0
    seed = int(run.settings.get("seed", 0))

    def figures(rows: Sequence[Record]) -> dict[str, Any]:
        return {m: method_figures(rows, m, greedy, seed) for m in methods}

    suites = dict.fromkeys(record.suite for record in records)
    return {
        "overall": figures(records),
        "suites": {suite: figures([r for r in records if r.suite == suite]) for suite in suites},
        "bugs": sum(r.divergence is not None and r.divergence.kind == BUG for r in records),
        "sources": run.suites,
        "skipped": run.skipped,
        "settings": run.settings,
        "target_hash": run.settings.get("target_hash"),
        "drafter_hash": run.settings.get("drafter_hash"),
        "baseline": run.baseline,
        "machine": run.machine,
        "plain_spread": plain_spread(records),
        "load_average": load_range([r.load for r in records if r.load is not None]),
        "versions": run.versions,
        "git_commit": run.git_commit,
        "command": run.command,
        "started": run.started,
        "records": len(records),
    }


def method_figures(records: Sequence[Record], method: str, greedy: bool, seed: int = 0) -> dict[str, Any]:
    """The figures of one method over some records, compared with plain decoding over the same prompts.

    `identical` counts prompts of which every repeat gave plain decoding's tokens; None when sampling.
    """
    rows = [record for record in records if record.method == method]
    seconds, calls = sum(r.seconds for r in rows), sum(r.calls for r in rows)
    draft_seconds = sum(r.draft_seconds for r in rows)
    plain, mine, counted = times(records, PLAIN), times(records, method), counts(records, method)
    ratios = [plain[key] / mine[key] for key in plain.keys() & mine.keys()]
    whole = paired_ratio(times(records, PLAIN, whole_time), times(records, method, whole_time), seed)
    prompts = {(r.suite, r.prompt) for r in rows}
    different = {(r.suite, r.prompt) for r in rows if not r.identical}
    kinds = Counter(r.divergence.kind for r in rows if r.divergence is not None)

    def per_call(total: float) -> float | None:
        return total / calls if calls else None

    return {
        "verifier": ", ".join(sorted({r.verifier for r in rows if r.verifier})) or None,
        "lossy": any(r.lossy for r in rows),
        **spread("speedup", paired_ratio(plain, mine, seed)),
        **spread("speedup_with_prefill", whole),
        "speedup_median": float(np.median(ratios)) if ratios else None,
        **spread("tau", tau(counted, seed)),
        "tau_macro": tau_macro(counted),
        "mean_accepted": per_call(sum(sum(r.accepted) for r in rows)),
        "mean_drafted": per_call(sum(sum(r.nodes or r.drafted) for r in rows)),
        "tokens_per_s": sum(r.committed for r in rows) / seconds if seconds > 0 else None,
        "prompts": len(prompts),
        "identical": len(prompts - different) if greedy else None,
        "rounding_ties": kinds.total() - kinds[BUG] if greedy else None,
        "bugs": kinds[BUG] if greedy else None,
        "new_tokens": sum(r.new_tokens for r in rows),
        "calls": calls,
        "draft_ms": per_call(1000 * draft_seconds),
        "verify_ms": per_call(1000 * sum(r.verify_seconds for r in rows)),
        "draft_share": draft_seconds / seconds if seconds > 0 else None,
        "finish": dict(Counter(r.finish for r in rows)),
        "acceptance": [asdict(a) for a in acceptance(rows)],
    }


def spread(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """An estimate as figures of a summary: `name`, `name_lo`, `name_hi`."""
    if estimate is None:
        return {name: None, f"{name}_lo": None, f"{name}_hi": None}
    return {name: estimate.value, f"{name}_lo": estimate.lo, f"{name}_hi": estimate.hi}


def plain_spread(records: Sequence[Record]) -> float | None:
    """The longest over the shortest of plain decoding's seconds per token; None below five outputs."""
    seconds = [decode_time(r) for r in records if r.method == PLAIN and r.committed > 0]
    if len(seconds) < 5:
        return None
    return max(seconds) / min(seconds)


def load_range(values: Sequence[float]) -> dict[str, float] | None:
    """The least, the median and the greatest one-minute load average during the run; None where the machine has none."""
    if not values:
        return None
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}


def titles(summary: dict[str, Any]) -> dict[str, str]:
    """Suite name → its title."""
    return {source["name"]: source["title"] for source in summary["sources"]}


def interval(figures: dict[str, Any], name: str = "speedup", unit: str = "×", form: str = ".2f") -> str:
    """A figure with its 95% interval, `1.62× [1.55, 1.70]`."""
    value, lo, hi = figures[name], figures[f"{name}_lo"], figures[f"{name}_hi"]
    if value is None:
        return "n/a"
    return f"{value:{form}}{unit}" + (f" [{lo:{form}}, {hi:{form}}]" if lo is not None else " [no interval]")


def named(method: str, figures: dict[str, Any]) -> str:
    """The method, with its verifier where that is lossy."""
    return f"{method}, {figures['verifier']}" if figures["lossy"] else method


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure with so many decimals, or n/a."""
    return "n/a" if value is None else f"{value:.{digits}f}{unit}"


def verdict(summary: dict[str, Any]) -> str:
    """One paragraph: how fast, how certain, on what, and whether the output changed."""
    settings, overall = summary["settings"], summary["overall"]
    others = [m for m in overall if m != PLAIN]
    if not others:
        return "Only plain decoding was measured: nothing to compare it with."
    if settings.get("race"):
        return (
            "A race between settings, not a measurement: the slower ones left early, so their figures rest on fewer prompts, "
            "and the winners were chosen by these same figures."
        )
    best = max(others, key=lambda m: (m == MAIN, overall[m]["speedup"] or 0.0))
    count = overall[best]["prompts"]
    sources = summary["sources"]
    where = f"{plural(count, 'prompt')} ({', '.join(s['title'] for s in sources if s['prompts'])})"
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    sentences = [
        f"{_subject(best, overall)} {_faster(overall[best])} on {where}, {how}, up to {settings['max_new_tokens']} "
        f"new tokens, {settings['dtype']}, with τ = {number(overall[best]['tau'])} tokens per target call."
    ]
    if len(others) <= _MOST_SENTENCES:
        sentences += [f"{_subject(m, overall)} {_faster(overall[m])}." for m in others if m != best]
    exact = [m for m in others if not overall[m]["lossy"]]
    if exact:
        sentences.append(_lossless(summary, exact))
    sentences += [_lossy(m, overall[m]) for m in others if overall[m]["lossy"]]
    sentences += filter(None, [above_tau(summary)])
    expected = sum(s["prompts"] for s in sources)
    if 0 < count < expected:
        sentences.append(f"UNFINISHED: {count} of {plural(expected, 'prompt')}; the same command continues.")
    if 1 < count < FEWEST:
        sentences.append("So few prompts show little of what others would.")
    unsteady = summary["plain_spread"]
    if unsteady is not None and unsteady > STEADY:
        sentences.append(
            f"The machine was disturbed (plain decoding's own speed varied {unsteady:.1f}-fold between prompts): the "
            "ratios are not to be trusted; repeat on an idle one."
        )
    load = summary["load_average"]
    cores = summary["machine"].get("cores") or 1
    if load is not None and load["median"] > max(int(settings.get("threads") or 1), 1) + 0.5:
        sentences.append(
            f"The machine was not idle (load {load['median']:.1f} on {plural(cores, 'core')}): "
            "repeat on an idle one before quoting the speed."
        )
    return " ".join(sentences)


def exceeds_tau(figures: dict[str, Any]) -> bool:
    """Whether a speed-up lies above τ by more than both intervals allow. Drafting saves at most τ − 1 of τ target forwards."""
    speedup, tau_value = figures["speedup"], figures["tau"]
    if speedup is None or tau_value is None:
        return False
    least = speedup if figures["speedup_lo"] is None else figures["speedup_lo"]
    most = tau_value if figures["tau_hi"] is None else figures["tau_hi"]
    return bool(least > most + 1e-9)


def above_tau(summary: dict[str, Any]) -> str:
    """A sentence on methods that are faster than their drafts allow, over all suites or on one; empty = there is none."""
    found = list[str]()
    for method, figures in summary["overall"].items():
        where = [("", figures)]
        if len(summary["suites"]) > 1:
            title = titles(summary)
            each = summary["suites"].items()
            where += [
                (f" on {title.get(name, name)}", methods[method])
                for name, methods in each
                if method in methods
            ]
        for place, one in where:
            if method != PLAIN and exceeds_tau(one):
                found.append(f"{method}{place} {one['speedup']:.2f}× at τ {one['tau']:.2f}")
                break
    if not found:
        return ""
    return (
        f"NOTE: a speed-up above τ ({'; '.join(found)}) can't come from drafting alone: the baseline is slow here, or the machine was "
        "busy while it ran; measure again before quoting it."
    )


def _subject(method: str, overall: dict[str, Any]) -> str:
    return TITLES.get(method, method) + (" (LOSSY)" if overall[method]["lossy"] else "")


def _lossy(method: str, figures: dict[str, Any]) -> str:
    same = figures["identical"]
    seen = (
        "" if same is None else f": {same} of {plural(figures['prompts'], 'output')} equal plain decoding's"
    )
    return f"NOT LOSSLESS: {method} was verified by {figures['verifier']}, which changes the output's distribution{seen}."


def _faster(figures: dict[str, Any]) -> str:
    value, lo, hi = figures["speedup"], figures["speedup_lo"], figures["speedup_hi"]
    if value is None:
        return "can't be compared with plain decoding (no output was longer than one token)"
    if lo is None:
        return f"took plain decoding's speed ×{value:.2f} (too few prompts for an interval)"
    spread = f"{value:.2f}× (95% interval {lo:.2f} to {hi:.2f})"
    if figures["mean_accepted"] < 0.005 and hi >= 1:
        return f"can't make the target faster, as hardly a draft was accepted; what was measured is noise: {spread}"
    if lo > 1:
        return f"makes the target faster by {spread}"
    return f"makes the target SLOWER: {spread}" if hi < 1 else f"makes no measurable difference: {spread}"


def _lossless(summary: dict[str, Any], methods: list[str]) -> str:
    if summary["settings"]["temperature"] != 0:
        return (
            "Sampled outputs differ from draw to draw, so identity does not apply; "
            f"{', '.join(methods)}: verified exactly, which keeps the target's distribution (the tests enumerate it)."
        )
    figures = [summary["overall"][method] for method in methods]
    if summary["bugs"]:
        count = plural(summary["bugs"], "difference")
        who = ", ".join(m for m, f in zip(methods, figures, strict=True) if f["bugs"])
        return f"OUTPUT CHANGED by {who}: {count} that rounding does not explain. Don't use it."
    pairs = [f"{f['identical']} of {f['prompts']}" for f in figures]
    same = f"The output is identical to plain decoding's on {pairs[0]} prompts"
    if len(set(pairs)) > 1:
        same = "The output is identical to plain decoding's on " + ", ".join(
            f"{pair} prompts ({_subject(method, summary['overall']).lower()})"
            for pair, method in zip(pairs, methods, strict=True)
        )
    ties = sum(f["rounding_ties"] for f in figures)
    if not ties:
        return f"{same}, so accuracy is unchanged."
    over = " (over all methods)" if len(methods) > 1 else ""
    return (
        f"{same}; {plural(ties, 'difference')}{over} start at a rounding tie between two equally good tokens"
        f"{'' if summary['settings']['dtype'] == 'float32' else ' (none or next to none with --dtype float32)'}."
    )
