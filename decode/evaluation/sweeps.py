"""Sweeps: methods that differ in one or more options; the best point of each, and what each point
gains over the first."""

from __future__ import annotations

from collections.abc import Sequence

from decode.evaluation.records import Record
from decode.evaluation.statistics import counts, paired_ratio, tau_difference, times
from decode.evaluation.summary import Gain, Summary, format_estimate, format_method, value_of
from decode.systems.parsing import format_method as join_options


def _swept(summary: Summary) -> list[str]:
    """The options that were swept over more than one value."""
    words = [word.partition("=") for word in summary.settings.get("sweep") or []]
    return [key for key, _, text in words if len([value for value in text.split(",") if value]) > 1]


def _points(summary: Summary) -> dict[str, dict[str, str]]:
    """System with its other options → its points: their swept options as typed → the method. Empty
    for tuning."""
    found: dict[str, dict[str, str]] = {}
    keys = [] if summary.settings.get("tuning") else _swept(summary)
    for method in summary.overall:
        name, *words = method.split(":")
        options = dict(word.partition("=")[::2] for word in words)
        point = {key: options.pop(key) for key in keys if key in options}
        if point:
            label = " ".join(f"{key}={value}" for key, value in point.items())
            found.setdefault(join_options(name, options), {})[label] = method
    return found


def describe_best(summary: Summary) -> str:
    """A sentence on the fastest point of each swept system; "" without one."""
    sentences = []
    for points in _points(summary).values():
        speeds = {m: value_of(summary.overall[m].speedup) for m in points.values()}
        known = {method: speed for method, speed in speeds.items() if speed is not None}
        if known:
            method = max(known, key=lambda name: known[name])
            figures = summary.overall[method]
            speed, tau = format_estimate(figures.speedup), value_of(figures.tau)
            sentences.append(
                f"Best of {len(known)} points: {format_method(method, figures)}, {speed}, τ = "
                f"{tau:.2f}."
            )
    return " ".join(sentences)


def compare_with_first(summary: Summary, records: Sequence[Record]) -> list[Gain]:
    """What each point of each system gains over the first one, prompt by prompt: the figures of an
    ablation."""
    seed = int(summary.settings.get("seed", 0))
    gains = []
    for title, points in _points(summary).items():
        (first, base), *others = points.items()
        base_counts, base_times = counts(records, base), times(records, base)
        for point, method in others:
            difference = tau_difference(base_counts, counts(records, method), seed)
            ratio = paired_ratio(base_times, times(records, method), seed)
            prompts = difference.prompts if difference else 0
            gains.append(Gain(title, first, point, method, prompts, difference, ratio))
    return gains
