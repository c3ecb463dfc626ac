"""The figures of a measurement, computed from run.json and the records."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from decode.evaluation import statistics as stats
from decode.evaluation.domains import DomainTau, compare_domains
from decode.evaluation.records import Record, Run
from decode.evaluation.statistics import Acceptance, Estimate
from decode.systems.parsing import format_method as join_options
from decode.systems.registry import PLAIN
from specalign.common.schema import JsonObject

BUG = "BUG"
_ESTIMATES = ("speedup", "speedup_with_prefill", "tau", "speed", "score", "score_difference")
"""Fields that summary.json writes as `name`, `name_lo` and `name_hi`."""


@dataclass
class Figures:
    """One method over some records, compared with plain decoding on the same prompts.

    score, score_difference: the mean score of the suites that have a metric, and what it gains
        over plain decoding's.
    identical: prompts of which every repeat, at every batch size, gave plain decoding's tokens. It,
        `rounding_ties` and `bugs` (outputs, at every batch size) are None when sampling.
    timed: prompts in full batches; all times are theirs.
    """

    verifier: str | None
    lossy: bool
    speedup: Estimate | None
    speedup_with_prefill: Estimate | None
    tau: Estimate | None
    tau_macro: float | None
    mean_accepted: float | None
    mean_drafted: float | None
    tokens_per_s: float | None
    prompts: int
    timed: int
    identical: int | None
    rounding_ties: int | None
    bugs: int | None
    new_tokens: int
    calls: int
    draft_ms: float | None
    verify_ms: float | None
    draft_share: float | None
    finish: dict[str, int]
    acceptance: list[Acceptance]
    score: Estimate | None = None
    score_difference: Estimate | None = None


@dataclass(frozen=True)
class Gain:
    """What a point of a sweep, or a drafted method, gains over the first one, prompt by prompt: a
    difference of τ and a ratio of speeds. `first` and `point`: the swept options or the methods."""

    system: str
    first: str
    point: str
    method: str
    prompts: int
    tau: Estimate | None
    speed: Estimate | None


@dataclass
class Summary:
    """A measurement: figures by method, over all suites and per suite, and where they come from.

    batches: batch size → method → figures over the suites with at least that number of
        prompts. The other figures are those of the first size.
    plain_spread: the longest over the shortest of plain decoding's seconds per token; None below
        five outputs. load_average: None where the machine has none.
    """

    run: Run
    overall: dict[str, Figures]
    suites: dict[str, dict[str, Figures]]
    bugs: int
    records: int
    plain_spread: float | None
    load_average: dict[str, float] | None
    against_first: list[Gain] = field(default_factory=list)
    verdict: str = ""
    batches: dict[int, dict[str, Figures]] = field(default_factory=dict)
    domains: list[DomainTau] = field(default_factory=list)

    @property
    def settings(self) -> JsonObject:
        return self.run.settings

    @property
    def greedy(self) -> bool:
        return bool(self.settings["temperature"] == 0)

    @property
    def sampling(self) -> str:
        """`greedy`, or the temperature."""
        return "greedy" if self.greedy else f"temperature {self.settings['temperature']:g}"

    @property
    def length(self) -> str:
        """The length limit of outputs: one number, or the range over the suites."""
        limit = self.settings["max_new_tokens"]
        if not isinstance(limit, dict):
            return str(limit)
        sizes = {limit[suite] for suite in self.suites if suite in limit} or {*limit.values()}
        return str(min(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"

    @property
    def batch(self) -> int:
        """The batch size of the main figures."""
        return next(iter(self.batches), 1)

    @property
    def titles(self) -> dict[str, str]:
        """Suite name → its title, of those with records."""
        sources = [source for source in self.run.suites if source["name"] in self.suites]
        return {source["name"]: source["title"] for source in sources}

    def as_json(self) -> JsonObject:
        """The contents of summary.json."""
        own = ("bugs", "plain_spread", "load_average", "records", "verdict")
        return {
            **asdict(self.run),
            **{name: getattr(self, name) for name in own},
            "overall": _flatten(self.overall),
            "suites": _flatten(self.suites),
            "batches": _flatten(self.batches),
            "sources": self.run.suites,
            "target_hash": self.settings.get("target_hash"),
            "drafter_hash": self.settings.get("drafter_hash"),
            "against_first": _flatten(self.against_first),
            "domains": _flatten(self.domains),
        }


def _flatten(figures: Any) -> Any:
    """Figures, or a list or mapping of them, as JSON."""
    if isinstance(figures, dict):
        return {str(key): _flatten(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [_flatten(value) for value in figures]
    flat: JsonObject = {}
    for name, value in asdict(figures).items():
        if name not in _ESTIMATES:
            flat[name] = value
            continue
        estimate = value or {}
        flat[name] = estimate.get("value")
        flat[f"{name}_lo"] = estimate.get("lo")
        flat[f"{name}_hi"] = estimate.get("hi")
    return flat


def summarise(run: Run, records: Sequence[Record]) -> Summary:
    found = {
        size: [record for record in records if record.batch == size]
        for size in run.settings.get("batch_sizes") or [1]
    }
    by_size = {size: rows for size, rows in found.items() if rows}
    first = next(iter(by_size), 1)
    everything, records = records, by_size.get(first, [])
    measured = {record.method for record in everything}
    methods = [method for method in run.settings["methods"] if method in measured]
    greedy = run.settings["temperature"] == 0

    def compute(rows: Sequence[Record], size: int = first) -> dict[str, Figures]:
        metrics = len({r.suite for r in rows if r.score is not None})
        return {m: method_figures(rows, m, size, greedy, metrics) for m in methods}

    suites = dict.fromkeys(record.suite for record in records)
    seconds = [stats.decode_time(unit) for unit in stats.list_units(records, PLAIN)]
    loads = [r.load for r in records if r.load is not None]
    load_average = None
    if loads:
        load_average = {"min": min(loads), "median": float(np.median(loads)), "max": max(loads)}
    summary = Summary(
        run=run,
        overall=compute(everything),
        suites={suite: compute([r for r in everything if r.suite == suite]) for suite in suites},
        bugs=sum(r.divergence is not None and r.divergence.kind == BUG for r in everything),
        records=len(everything),
        batches={size: compute(rows, size) for size, rows in by_size.items()},
        plain_spread=None if len(seconds) < 5 else max(seconds) / min(seconds),
        load_average=load_average,
    )
    summary.against_first = _compare_with_first(summary, records)
    if run.training is not None and run.training.method in methods:
        taus = {name: found[run.training.method].tau for name, found in summary.suites.items()}
        summary.domains = compare_domains(run.training, run.settings, taus)
    return summary


def method_figures(
    everything: Sequence[Record], method: str, size: int, greedy: bool, metrics: int
) -> Figures:
    """The figures of one method at a batch size, over some records; outputs of every batch size are
    compared with plain decoding's. `metrics`: suites with scores; those of several have no mean."""
    records = [record for record in everything if record.batch == size]
    outputs = [record for record in everything if record.method == method]
    rows = [record for record in outputs if record.batch == size]
    timed = [r for unit in stats.list_units(rows, method) for r in unit]
    seconds = sum(r.seconds for r in timed)
    draft_seconds = sum(r.draft_seconds for r in timed)
    plain = stats.times(records, PLAIN)
    mine = stats.times(records, method)
    counted = stats.counts(records, method)
    scored = stats.scores(records, method)
    plain_whole = stats.times(records, PLAIN, stats.whole_time)
    prompts = {(r.suite, r.prompt) for r in rows}
    different = {(r.suite, r.prompt) for r in outputs if not r.identical}
    kinds = Counter(r.divergence.kind for r in outputs if r.divergence is not None)

    def per_call(total: float, of: Sequence[Record] = rows) -> float | None:
        calls = sum(r.calls for r in of)
        return total / calls if calls else None

    return Figures(
        verifier=", ".join(sorted({r.verifier for r in rows if r.verifier})) or None,
        lossy=any(r.lossy for r in rows),
        speedup=stats.paired_ratio(plain, mine),
        speedup_with_prefill=stats.paired_ratio(
            plain_whole, stats.times(records, method, stats.whole_time)
        ),
        tau=stats.tau(counted),
        tau_macro=stats.tau_macro(counted),
        mean_accepted=per_call(sum(sum(r.accepted) for r in rows)),
        mean_drafted=per_call(sum(sum(r.nodes or r.drafted) for r in rows)),
        tokens_per_s=stats.throughput(rows, method),
        prompts=len(prompts),
        timed=len({(r.suite, r.prompt) for r in timed}),
        identical=len(prompts - different) if greedy else None,
        rounding_ties=kinds.total() - kinds[BUG] if greedy else None,
        bugs=kinds[BUG] if greedy else None,
        new_tokens=sum(r.new_tokens for r in rows),
        calls=sum(r.calls for r in rows),
        draft_ms=per_call(1000 * draft_seconds, timed),
        verify_ms=per_call(1000 * sum(r.verify_seconds for r in timed), timed),
        draft_share=draft_seconds / seconds if seconds > 0 else None,
        finish=dict(Counter(r.finish for r in rows)),
        acceptance=stats.acceptance(rows),
        score=stats.mean_score(scored) if metrics < 2 else None,
        score_difference=stats.score_difference(
            stats.scores(records, PLAIN), scored, identical=not different
        ),
    )


def swept_points(summary: Summary) -> dict[str, dict[str, str]]:
    """System with its other options → its points: their swept options as typed → the method. Empty
    for tuning."""
    if summary.settings.get("tuning"):
        return {}
    words = [word.partition("=") for word in summary.settings.get("sweep") or []]
    keys = [key for key, _, values in words if "," in values.strip(",")]
    found: dict[str, dict[str, str]] = {}
    for method in summary.overall:
        name, *typed = method.split(":")
        options = dict(word.partition("=")[::2] for word in typed)
        point = {key: options.pop(key) for key in keys if key in options}
        if point:
            label = " ".join(f"{key}={value}" for key, value in point.items())
            found.setdefault(join_options(name, options), {})[label] = method
    return found


def _compare_with_first(summary: Summary, records: Sequence[Record]) -> list[Gain]:
    gains = []
    groups = swept_points(summary)
    if not groups and not summary.settings.get("tuning"):
        groups = {"Methods": {name: name for name in summary.overall if name != PLAIN}}
    for title, points in groups.items():
        if not points:
            continue
        (first, base), *others = points.items()
        base_counts = stats.counts(records, base)
        base_times = stats.times(records, base)
        for point, method in others:
            difference = stats.tau_difference(base_counts, stats.counts(records, method))
            ratio = stats.paired_ratio(base_times, stats.times(records, method))
            prompts = difference.prompts if difference else 0
            gains.append(Gain(title, first, point, method, prompts, difference, ratio))
    return gains


def format_method(method: str, figures: Figures) -> str:
    """The method, with its verifier if that is lossy."""
    return f"{method}, {figures.verifier}" if figures.lossy else method
