"""The verdict of a measurement in sentences: the speed-up, its uncertainty, and whether the output
changed."""

from collections.abc import Iterator, Sequence

from decode.evaluation.statistics import FEWEST, format_estimate, format_number, value_of
from decode.evaluation.summary import Figures, Summary, format_method, swept_points
from decode.systems.registry import MAIN, PLAIN, TITLES
from specalign.common.text import plural

NOISE, EQUAL = "noise", "equal"
_MOST_SENTENCES = 5  # with more methods than this, only the best one has its own sentence
STEADY = 2.0
"""On an idle machine plain decoding's slowest prompt takes less than this times the seconds per
token of its fastest one: 1.4 and 1.5 over MT-Bench, 4 to 10 next to another process."""


def find_best(summary: Summary) -> str:
    """The method that verdicts begin with: the drafter, else the fastest; "" without one."""
    others = [method for method in summary.overall if method != PLAIN]
    speeds = {m: value_of(summary.overall[m].speedup) or 0.0 for m in others}
    return max(others, key=lambda m: (m == MAIN, speeds[m]), default="")


def headline(summary: Summary) -> str:
    """The verdict in one short sentence."""
    target = str(summary.settings["target"]).rstrip("/").rpartition("/")[2]
    best = find_best(summary)
    speedup = summary.overall[best].speedup if best else None
    if summary.bugs:
        return f"{target}: OUTPUT CHANGED by {_name_changed(summary)}"
    if speedup is None:
        return f"{target}: nothing to compare with plain decoding"
    if summary.settings.get("tuning"):
        return f"{target}: tuning, not a measurement"
    same = "the same output" if summary.greedy else "the same output distribution"
    if summary.overall[best].lossy:
        same = "another output distribution"
    elif summary.overall[best].rounding_ties:
        same = "the same output up to rounding ties"
    if best != MAIN and len(summary.overall) > 2:
        kind = "point" if summary.settings.get("sweep") else "method"
        same += f", best of {plural(len(summary.overall) - 1, kind)}"
    judged = judge(summary.overall[best])
    if not judged:
        return f"{target}: too few prompts for a verdict ({speedup.value:.2f}×), {same}"
    if judged in (NOISE, EQUAL):
        return f"{target}: no measurable difference ({speedup.value:.2f}×), {same}"
    doubt = ", above τ" if _exceeds_tau(summary.overall[best]) else ""
    doubt += ", on a busy machine" if _find_busy(summary) else ""
    return f"{target} decodes {judged}: {speedup.value:.2f}×, with {same}{doubt}"


def judge(figures: Figures) -> str:
    """What the speed-up's interval says: NOISE (hardly any drafts were accepted), EQUAL, `faster`,
    `SLOWER`; "" without an interval."""
    speedup = figures.speedup
    if speedup is None or speedup.lo is None or speedup.hi is None:
        return ""
    if (figures.mean_accepted or 0.0) < 0.005 and speedup.hi >= 1:
        return NOISE
    if speedup.lo <= 1 <= speedup.hi:
        return EQUAL
    return "faster" if speedup.lo > 1 else "SLOWER"


def list_reservations(summary: Summary) -> list[str]:
    """The headline, and all that changed the output or casts doubt on the figures."""
    lossy = [_describe_lossy(m, f) for m, f in summary.overall.items() if f.lossy]
    changed = []
    if summary.bugs:
        count, who = plural(summary.bugs, "difference"), _name_changed(summary)
        line = f"OUTPUT CHANGED by {who}: {count} that rounding does not explain. Do not use it."
        changed.append(line)
    return [headline(summary), *changed, *lossy, *_warnings(summary)]


def verdict(summary: Summary) -> str:
    """The verdict as one paragraph."""
    settings, overall = summary.settings, summary.overall
    others = [method for method in overall if method != PLAIN]
    if not others:
        return "Only plain decoding was measured: there is nothing to compare it with."
    if settings.get("tuning"):
        return (
            "Tuning, not a measurement: the fastest settings were chosen from these same figures."
        )
    best = find_best(summary)
    count = overall[best].prompts
    titles = ", ".join(summary.titles.values())
    where = f"{plural(count, 'prompt')} ({titles}), {summary.sampling}"
    sentences = [
        f"{_subject(best, overall[best])} {_describe_speed(overall[best])} on {where}, "
        f"up to {summary.length} new tokens, {settings['dtype']}, "
        f"with τ = {format_number(value_of(overall[best].tau))} tokens per target forward pass."
    ]
    if len(others) <= _MOST_SENTENCES:
        rest = [method for method in others if method != best]
        sentences += [f"{_subject(m, overall[m])} {_describe_speed(overall[m])}." for m in rest]
    exact = [method for method in others if not overall[method].lossy]
    if exact and not summary.bugs:
        sentences.append(_describe_losslessness(summary, exact))
    sentences += _describe_accuracy(summary, best)
    sentences += list_reservations(summary)[1:]
    sentences += _best_points(summary)
    return " ".join(sentences)


def _subject(method: str, figures: Figures) -> str:
    return TITLES.get(method, method) + (" (LOSSY)" if figures.lossy else "")


def _describe_speed(figures: Figures) -> str:
    speedup = figures.speedup
    if speedup is None:
        return "can't be compared with plain decoding (no output was longer than one token)"
    judged = judge(figures)
    if not judged:
        return (
            f"ran at {speedup.value:.2f}× plain decoding's speed (too few prompts for an interval)"
        )
    interval = f"{speedup.value:.2f}× (95% interval {speedup.lo:.2f} to {speedup.hi:.2f})"
    if judged == NOISE:
        return (
            "can't make the target faster: hardly any drafts were accepted; the difference is "
            f"noise: {interval}"
        )
    if judged == EQUAL:
        return f"makes no measurable difference: {interval}"
    return f"makes the target {judged}{' by' if judged == 'faster' else ':'} {interval}"


def _name_changed(summary: Summary) -> str:
    return ", ".join(method for method, figures in summary.overall.items() if figures.bugs)


def _describe_losslessness(summary: Summary, methods: Sequence[str]) -> str:
    if not summary.greedy:
        return (
            "Sampled outputs differ from draw to draw, so they are not compared; "
            f"{', '.join(methods)}: exact verification keeps the target's distribution."
        )
    figures = {method: summary.overall[method] for method in methods}
    counts = {method: f"{f.identical} of {f.prompts} prompts" for method, f in figures.items()}
    where = counts[methods[0]]
    if len(set(counts.values())) > 1:
        where = ", ".join(f"{counts[m]} ({_subject(m, figures[m]).lower()})" for m in methods)
    same = f"The output is identical to plain decoding's on {where}"
    if len(summary.batches) > 1:
        same += " at every batch size"
    ties = sum(f.rounding_ties or 0 for f in figures.values())
    if not ties:
        return f"{same}, so accuracy is unchanged."
    over = " (over all methods)" if len(methods) > 1 else ""
    hint = "" if summary.settings["dtype"] == "float32" else " (hardly any with --dtype float32)"
    differences = plural(ties, "difference")
    return f"{same}; {differences}{over} start at a rounding tie between two tokens{hint}."


def _describe_accuracy(summary: Summary, method: str) -> Iterator[str]:
    """The scores of plain decoding and the best method on each suite that has a metric."""
    found, suites = [], 0
    for source in summary.run.suites:
        methods = summary.suites.get(source["name"], {})
        if method not in methods or methods[method].score is None:
            continue
        suites += 1
        plain, mine = methods[PLAIN].score, methods[method].score
        gain = methods[method].score_difference
        if value_of(plain) != value_of(mine):
            scores = f"{value_of(plain):.3f} and {value_of(mine):.3f}"
            difference = format_estimate(gain, "", "+.3f")
            found.append(f"{source['title']} {scores} (difference {difference})")
    if found:
        yield f"Scores of plain decoding and {method}: {'; '.join(found)}."
    elif suites:
        yield f"Scores of plain decoding and {method} are equal on {plural(suites, 'suite')}."


def _describe_lossy(method: str, figures: Figures) -> str:
    same = ""
    if figures.identical is not None:
        count = plural(figures.prompts, "output")
        same = f": {figures.identical} of {count} equal plain decoding's"
    return (
        f"NOT LOSSLESS: {method} was verified by {figures.verifier}, which changes the output's "
        f"distribution{same}."
    )


def _warnings(summary: Summary) -> Iterator[str]:
    """Reasons to doubt the figures."""
    faster = [
        f"{method} {f.speedup.value:.2f}× at τ {f.tau.value:.2f}"
        for method, f in summary.overall.items()
        if method != PLAIN and f.speedup and f.tau and _exceeds_tau(f)
    ]
    if faster:
        yield (
            f"NOTE: a speed-up above τ ({'; '.join(faster)}) can't come from drafting alone: the "
            "baseline is slow here, or the machine was busy while it ran; measure again before "
            "quoting it."
        )
    for size, methods in summary.batches.items():
        figures = next(iter(methods.values()))
        if size > 1 and figures.timed < figures.prompts:
            count = f"{figures.timed} of {plural(figures.prompts, 'prompt')}"
            yield f"At batch size {size}, only full batches are timed: {count}."
    training = summary.run.training
    for suite, overlap in training.overlaps.items() if training else ():
        if overlap.found:
            share = f"{len(overlap.found)} of {plural(overlap.checked, 'prompt')}"
            yield (
                f"NOT HELD OUT: {share} of {summary.titles.get(suite, suite)} overlap with the "
                "drafter's training data, so these figures are partly in-domain."
            )
    sizes: list[int] = summary.settings.get("batch_sizes") or [1]
    repeats = summary.settings.get("repeats", 1)
    expected = repeats * sum(
        source["prompts"] * len(source.get("batch_sizes", sizes)) for source in summary.run.suites
    )
    done = summary.records // len(summary.overall)
    if 0 < done < expected:
        what = plural(expected, "prompt" if repeats * len(sizes) == 1 else "output")
        yield f"UNFINISHED: {done} of {what}; rerun the command to continue."
    best = find_best(summary)
    if best and 1 < summary.overall[best].prompts < FEWEST:
        yield "With so few prompts, the result may not generalize."
    if reasons := _find_busy(summary):
        yield (
            f"The machine was not idle ({' and '.join(reasons)}): do not quote the speed; repeat "
            "the measurement on an idle machine."
        )


def _find_busy(summary: Summary) -> list[str]:
    load = (summary.load_average or {}).get("median", 0.0)
    threads = int(summary.settings.get("threads") or 1)
    return find_busy(summary.plain_spread, load, threads, summary.run.machine.get("cores") or 1)


def find_busy(spread: float | None, load: float, threads: int, cores: int) -> list[str]:
    """Signs that the machine was busy. `spread`: of plain decoding's time per token. `load`: its
    median, for a measurement that uses this many threads itself."""
    reasons = []
    if spread is not None and spread > STEADY:
        reasons.append(f"plain decoding's own speed varied {spread:.1f}-fold between prompts")
    if load > max(threads, 1) + 0.5:
        reasons.append(f"load {load:.1f} on {plural(cores, 'core')}")
    return reasons


def _exceeds_tau(figures: Figures) -> bool:
    """Whether a speed-up exceeds τ beyond both intervals: drafting saves at most τ − 1 of τ target
    forwards."""
    speedup, tau = figures.speedup, figures.tau
    if speedup is None or tau is None:
        return False
    return (speedup.lo or speedup.value) > (tau.hi or tau.value) + 1e-9


def _best_points(summary: Summary) -> Iterator[str]:
    """A sentence on the fastest point of each swept system."""
    for points in swept_points(summary).values():
        speeds = {m: value_of(summary.overall[m].speedup) for m in points.values()}
        known = {method: speed for method, speed in speeds.items() if speed is not None}
        if known:
            method = max(known, key=lambda name: known[name])
            figures = summary.overall[method]
            speed, tau = format_estimate(figures.speedup), value_of(figures.tau)
            who = format_method(method, figures)
            yield f"Best of {len(known)} points: {who}, {speed}, τ = {tau:.2f}."
