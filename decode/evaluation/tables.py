"""Renders a summary as text: tables for the terminal, HTML and Markdown, prompt sources, and the
baseline check."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from decode.evaluation import domains
from decode.evaluation.accuracy import CODE
from decode.evaluation.statistics import format_estimate, format_number, value_of
from decode.evaluation.summary import Figures, Summary, format_method
from decode.evaluation.verdict import list_reservations
from decode.systems.registry import MAIN, PLAIN
from specalign.common.text import format_title, markdown_table, markdown_text, plural
from specalign.folder.chat import Chat

COLUMNS = (
    "suite", "method", "tokens/s", "speed-up [95%]", "with prefill", "τ [95%]", "τ macro",
    "accepted at 1, 2, 4, 8", "draft + verify, ms per round", "identical", "prompts",
)  # fmt: skip
SUITE, METHOD, SPEED, SPEEDUP, _, TAU, _, _, _, SAME, _ = COLUMNS
ACCURACY = (SUITE, "metric", "scored", METHOD, "score", "difference [95%]")
AGAINST = ("point or method", "τ, difference [95%]", "speed, ratio [95%]", "prompts")
FAIR = 0.97  # from this ratio to transformers' speed on the baseline is strong
TOY = 10_000_000
"""Parameters below which the baseline is not judged: a token costs less than the code around it."""


def headline(summary: Summary, suites: str = "") -> str:
    """Target, sampling, dtype, suites (by default their titles), and the options of the chat
    template."""
    settings = summary.settings
    chat = Chat(settings.get("template_kwargs") or {}, settings.get("system"))
    target = format_title(settings["target"], settings.get("weights"))
    suites = suites or ", ".join(summary.titles.values())
    parts = [target, summary.sampling, settings["dtype"], suites]
    return " · ".join([*parts, chat.description] if chat else parts)


def rows(summary: Summary) -> list[dict[str, str]]:
    """One dict of `COLUMNS` per suite and method; a last block over all suites if there are
    several."""
    blocks = [(summary.titles.get(name, name), methods) for name, methods in summary.suites.items()]
    if len(blocks) > 1:
        blocks.append(("all", summary.overall))
    return [_row(title, m, f) for title, methods in blocks for m, f in methods.items()]


def _row(title: str, method: str, figures: Figures) -> dict[str, str]:
    plain = method == PLAIN
    times = f"{format_number(figures.draft_ms, 1)} + {format_number(figures.verify_ms, 1)}"
    shares = [a.unconditional for a in figures.acceptance if a.position in (1, 2, 4, 8)]
    cells = (
        title,
        format_method(method, figures),
        format_number(figures.tokens_per_s, 1),
        "1" if plain else format_estimate(figures.speedup),
        "1" if plain else format_number(value_of(figures.speedup_with_prefill), 2, "×"),
        format_number(value_of(figures.tau)) if plain else format_estimate(figures.tau, ""),
        format_number(figures.tau_macro),
        " ".join(f"{share:.2f}" for share in shares),
        "" if plain else times,
        describe_identity(figures),
        str(figures.prompts),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def describe_identity(figures: Figures) -> str:
    if figures.identical is None:
        return "n/a (sampled)"
    counted = ((figures.bugs, "BUG"), (figures.rounding_ties, "tie"))
    notes = ", ".join(plural(count, word) for count, word in counted if count)
    return f"{figures.identical}/{figures.prompts}" + (f" ({notes})" if notes else "")


def table(summary: Summary) -> Table:
    """The table for the terminal: the columns that fit into 80 characters."""
    result = Table(title=headline(summary), title_justify="left")
    shown = [SUITE, METHOD, SPEED, SPEEDUP, TAU, SAME]
    if len(summary.suites) == 1:  # which the headline names
        shown.remove(SUITE)
    if any(figures.lossy for figures in summary.overall.values()):  # long names
        shown.remove(SPEED)
    for name in shown:
        breaks = name in (SUITE, METHOD, SAME)  # figures never break
        result.add_column(
            "τ" if name == TAU else name,
            justify="left" if name in (SUITE, METHOD) else "right",
            no_wrap=not breaks,
            overflow="fold",
            min_width=7 if breaks else None,
        )
    for row in rows(summary):
        if row[METHOD] == PLAIN:
            result.add_section()
        row[TAU] = row[TAU].partition(" [")[0]
        style = "bold" if row[METHOD].startswith(MAIN) else ""
        result.add_row(*(row[name] for name in shown), style=style)
    return result


def against_first(summary: Summary) -> dict[str, list[list[str]]]:
    """Title → rows of `AGAINST` for each swept system, or for the methods: what each gains over the
    first, prompt by prompt."""
    blocks: dict[str, list[list[str]]] = {}
    for gain in summary.against_first:
        title = f"{gain.system} against {gain.first}, prompt by prompt"
        tau, speed = format_estimate(gain.tau, "", "+.3f"), format_estimate(gain.speed)
        blocks.setdefault(title, []).append([gain.point, tau, speed, str(gain.prompts)])
    return blocks


def plain_table(title: str, header: Sequence[str], body: list[list[str]]) -> Table:
    """Rows of text for the terminal."""
    result = Table(title=title, title_justify="left")
    for name in header:
        breaks = name in (header[0], "metric", "scored", METHOD, domains.HEADER[-1])
        result.add_column(name, no_wrap=not breaks, overflow="fold")
    for row in body:
        result.add_row(*row)
    return result


def overview(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Several suites in one table, header and rows: each method over all of them, and its speed-up
    on each."""
    shown = [name for name in COLUMNS if name not in (SUITE, "with prefill", "τ macro")]
    body = []
    for method, figures in summary.overall.items():
        row = _row("all", method, figures)
        speedups = [value_of(methods[method].speedup) for methods in summary.suites.values()]
        body.append([*(row[name] for name in shown), *(format_number(s, 2, "×") for s in speedups)])
    return [*shown, *(summary.titles.get(name, name) for name in summary.suites)], body


def markdown(summary: Summary) -> str:
    """Headline, machine, table and reservations as Markdown, for a README or a model card; of
    several suites the overview."""
    settings = summary.settings
    if len(summary.suites) > 1:
        header, body = overview(summary)
    else:
        header, body = list(COLUMNS), [list(row.values()) for row in rows(summary)]
    processor = markdown_text(summary.run.machine.get("processor", "unknown processor"))
    first = (
        f"**{markdown_text(headline(summary))}**, up to {summary.length} new tokens, "
        f"batch {summary.batch}, {plural(settings['threads'], 'thread')}, {processor}"
    )
    blocks = [first, markdown_table(header, body)]
    for title, one in extra_tables(summary).items():
        blocks += [f"{markdown_text(title)}:", markdown_table(*one)]
    blocks += [markdown_text(line) for line in list_reservations(summary)]
    return "\n\n".join(blocks)


def extra_tables(summary: Summary) -> dict[str, tuple[Sequence[str], list[list[str]]]]:
    """Title → header and rows of the tables that only some measurements have."""
    found: dict[str, tuple[Sequence[str], list[list[str]]]] = {
        title: (AGAINST, points) for title, points in against_first(summary).items()
    }
    if scored := accuracy_rows(summary):
        title = "Accuracy: mean score of the answers, and the difference from plain decoding"
        found[title] = (ACCURACY, scored)
    if batches := batch_rows(summary):
        found["Batches"] = (BATCH, batches)
    training = summary.run.training
    if training is not None and summary.domains:
        checked = f", prompts checked against {training.data}" if training.data else ""
        title = f"In-domain and held-out τ of {training.method}{checked}"
        found[title] = (domains.HEADER, [row.cells(summary.titles) for row in summary.domains])
    return found


BATCH = ("batch", "method", "tokens/s", "speed-up [95%]", "τ", "identical")


def batch_rows(summary: Summary) -> list[list[str]]:
    """Rows of `BATCH`: each method at each batch size, against plain decoding at the same size.
    Empty for one size."""
    if len(summary.batches) < 2:
        return []
    found = []
    for size, methods in summary.batches.items():
        for method, figures in methods.items():
            row = _row("all", method, figures)
            shown = (row[SPEED], row[SPEEDUP], row[TAU].partition(" [")[0], row[SAME])
            found.append([str(size), row[METHOD], *shown])
    return found


def accuracy_rows(summary: Summary) -> list[list[str]]:
    """Rows of `ACCURACY`. Methods with the same figures on a suite share a row."""
    found = []
    for source in summary.run.suites:
        alike: dict[tuple[str, ...], list[str]] = {}
        measured = summary.suites.get(source["name"], {})
        for method, figures in measured.items():
            if figures.score is not None:
                gain = format_estimate(figures.score_difference, "", ".3f")
                scored = f"{figures.score.prompts}/{source['prompts']}"
                if cut := figures.finish.get("length"):
                    scored += f", {cut / sum(figures.finish.values()):.0%} cut"
                row = (scored, f"{figures.score.value:.3f}", gain)
                alike.setdefault(row, []).append(format_method(method, figures))
        for (scored, score, gain), methods in alike.items():
            if methods == [PLAIN]:
                gain = ""
            names = "all alike" if 1 < len(methods) == len(measured) else ", ".join(methods)
            found.append([source["title"], source["metric"], scored, names, score, gain])
    return found


def unscored(summary: Summary) -> list[str]:
    """A line for each reason why suites have no score."""
    reasons: dict[str, list[str]] = {}
    for source in summary.run.suites:
        methods = summary.suites.get(source["name"], {}).values()
        if any(figures.score is not None for figures in methods):
            continue
        reason = "the rows have no reference answers"
        if not source["prompts"]:
            reason = "no prompt fits this target"
        elif not methods:
            reason = "not measured"
        elif not source.get("metric"):
            reason = "open answers, without a metric here"
        elif source["metric"] == CODE and not summary.settings.get("execute_code"):
            reason = "the answers are code, which only --execute-code runs"
        reasons.setdefault(reason, []).append(source["name"])
    return [f"not scored: {', '.join(names)} ({reason})" for reason, names in reasons.items()]


def source_lines(summary: Summary) -> list[str]:
    """A line for each source of prompts, and for each thing that was left out."""
    sources = [
        f"{s['name']}: {plural(s['prompts'], 'prompt')} from {s['source']}"
        for s in summary.run.suites
    ]
    return sources + [f"skipped: {line}" for line in summary.run.skipped]


def baseline_line(check: Mapping[str, Any] | None) -> str:
    """Plain decoding against transformers' own generate, in one sentence; empty if it was not
    timed."""
    if check is None:
        return ""
    if "error" in check:
        return f"transformers' own generate could not be timed: {check['error']}"
    same = "different tokens, because the two round differently"
    if check["identical"]:
        same = "the same tokens"
    ratios: Sequence[float] = check.get("ratios") or []
    each = f", range {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    fair = [ratio >= FAIR for ratio in (check["ratio"], *ratios)]
    judged = ": SLOWER than transformers, so the speed-ups are too high"
    if check.get("parameters", TOY) < TOY:
        judged = ""
    elif all(fair):
        judged = ": the baseline is strong"
    elif any(fair):
        judged = ": the repeats differ too much to judge the baseline"
    return (
        f"Plain decoding: {check['plain_tokens_per_s']:.1f} tokens/s; transformers' own generate: "
        f"{check['transformers_tokens_per_s']:.1f} ({check['ratio']:.2f}×, best of "
        f"{check.get('repeats', 3)}{each}, one prompt, with prefill, {same}){judged}."
    )
