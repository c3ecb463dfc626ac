"""A summary as text: tables for the terminal, the page and Markdown, the sources of the prompts, the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from align.common.text import markdown_text, titled
from align.folder.chat import Chat
from decode.method_names import MAIN, PLAIN
from decode.reporting.summary import above_tau, interval, named, number, plural, titles

SUITE, METHOD, SPEED, SPEEDUP, WHOLE, TAU, TAU_MACRO, PLACES, TIMES, SAME, PROMPTS = COLUMNS = (
    "suite", "method", "tokens/s", "speed-up [95%]", "with prefill", "τ [95%]", "τ macro", "accepted at 1, 2, 4, 8",
    "draft + verify, ms a call", "identical", "prompts",
)  # fmt: skip
ON_TERMINAL = (SUITE, METHOD, SPEED, SPEEDUP, TAU, SAME)
"""The columns that fit into 80 characters, τ without its interval."""


def headline(summary: dict[str, Any]) -> str:
    """Target, sampling, dtype and suites; the template's switches and the system prompt where some were given."""
    settings = summary["settings"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    chat = Chat(settings.get("template_kwargs") or {}, settings.get("system"))
    prompted = f" · {chat.description}" if chat else ""
    target = titled(settings["target"], settings.get("weights"))
    return f"{target} · {how} · {settings['dtype']} · {', '.join(titles(summary).values())}{prompted}"


def rows(summary: dict[str, Any]) -> list[dict[str, str]]:
    """One dict of `COLUMNS` per suite and method; a last block over all suites when there are several."""
    blocks = [(titles(summary).get(name, name), methods) for name, methods in summary["suites"].items()]
    if len(blocks) > 1:
        blocks.append(("all", summary["overall"]))
    return [_row(title, method, figures) for title, methods in blocks for method, figures in methods.items()]


def _row(title: str, method: str, figures: dict[str, Any]) -> dict[str, str]:
    plain = method == PLAIN
    return {
        SUITE: title,
        METHOD: named(method, figures),
        SPEED: number(figures["tokens_per_s"], 1),
        SPEEDUP: "1" if plain else interval(figures),
        WHOLE: "1" if plain else number(figures["speedup_with_prefill"], 2, "×"),
        TAU: interval(figures, "tau", "") if not plain else number(figures["tau"], 2),
        TAU_MACRO: number(figures["tau_macro"], 2),
        PLACES: _places(figures["acceptance"]),
        TIMES: ""
        if plain
        else f"{number(figures.get('draft_ms'), 1)} + {number(figures.get('verify_ms'), 1)}",
        SAME: _identity(figures),
        PROMPTS: str(figures["prompts"]),
    }


def _places(acceptance: list[dict[str, Any]]) -> str:
    """At the 1st, 2nd, 4th and 8th position: of the calls that drafted a token there, the share that accepted it."""
    shown = [a for a in acceptance if a["position"] in (1, 2, 4, 8)]
    return " ".join(f"{a['unconditional']:.2f}" for a in shown)


def _identity(figures: dict[str, Any]) -> str:
    if figures["identical"] is None:
        return "n/a (sampled)"
    notes = [plural(figures["bugs"], "BUG")] if figures["bugs"] else []
    notes += [plural(figures["rounding_ties"], "tie")] if figures["rounding_ties"] else []
    return f"{figures['identical']}/{figures['prompts']}" + (f" ({', '.join(notes)})" if notes else "")


def table(summary: dict[str, Any]) -> Table:
    """The table for the terminal."""
    result = Table(title=headline(summary), title_justify="left")
    lossy = any(figures["lossy"] for figures in summary["overall"].values())
    # the headline names a single suite; the name of a lossy verifier needs the room of the speed
    needless = (SUITE if len(summary["suites"]) == 1 else None, SPEED if lossy else None)
    shown = [name for name in ON_TERMINAL if name not in needless]
    for name in shown:
        breaks = name in (SUITE, METHOD, SAME)  # may be broken where room is short; figures are not
        result.add_column(
            "τ" if name == TAU else name,
            justify="left" if name in (SUITE, METHOD) else "right",
            no_wrap=not breaks,
            overflow="fold",
            min_width=7 if breaks else None,
        )
    before = None
    for row in rows(summary):
        if before is not None and row[SUITE] != before:
            result.add_section()
        cells = ["" if name == SUITE and row[name] == before else row[name] for name in shown]
        cells = [c.partition(" [")[0] if name == TAU else c for name, c in zip(shown, cells, strict=True)]
        result.add_row(*cells, style="bold" if row[METHOD].startswith(MAIN) else "")
        before = row[SUITE]
    return result


AGAINST = ("point", "τ, difference [95%]", "speed, ratio [95%]", "prompts")


def against_first(summary: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows of `AGAINST` for each swept system: what each point gains over the first, prompt by prompt."""
    blocks: dict[str, list[list[str]]] = {}
    for point in summary["against_first"]:
        title = f"{point['system']} against {point['first']}, prompt by prompt"
        cells = [interval(point, "tau", "", "+.3f"), interval(point, "speed"), str(point["prompts"])]
        blocks.setdefault(title, []).append([point["point"], *cells])
    return list(blocks.items())


def against_tables(summary: dict[str, Any]) -> list[Table]:
    """`against_first` for the terminal."""
    found = []
    for title, body in against_first(summary):
        result = Table(title=title, title_justify="left")
        for name in AGAINST:
            result.add_column(name, no_wrap=name != AGAINST[0], overflow="fold")
        found.append(result)
        for row in body:
            result.add_row(*row)
    return found


def overview(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Several suites in one table, header and rows: each method over all of them, and its speed-up on each in the last columns."""
    shown = (METHOD, SPEED, SPEEDUP, TAU, PLACES, TIMES, SAME, PROMPTS)
    title = titles(summary)
    header = [*shown, *(title.get(name, name) for name in summary["suites"])]
    body = []
    for method, figures in summary["overall"].items():
        row = _row("all", method, figures)
        each = [number(methods[method]["speedup"], 2, "×") for methods in summary["suites"].values()]
        body.append([row[column] for column in shown] + each)
    return header, body


def markdown(summary: dict[str, Any]) -> str:
    """Headline, machine and table as Markdown, for a README or a model card; of several suites the overview."""
    settings, machine = summary["settings"], summary["machine"]
    if len(summary["suites"]) > 1:
        header, body = overview(summary)
    else:
        header, body = list(COLUMNS), [list(row.values()) for row in rows(summary)]
    lines = [
        f"**{markdown_text(headline(summary))}**, up to {settings['max_new_tokens']} new tokens, batch 1, "
        f"{plural(settings['threads'], 'thread')}, {markdown_text(machine.get('processor', 'unknown processor'))}",
        "",
        *_markdown(header, body),
    ]
    for title, points in against_first(summary):
        lines += ["", f"{markdown_text(title)}:", "", *_markdown(AGAINST, points)]
    if note := above_tau(summary):
        lines += ["", markdown_text(note)]
    return "\n".join(lines)


def _markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(map(markdown_text, header)) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(markdown_text, row)) + " |" for row in body),
    ]


def source_lines(summary: dict[str, Any]) -> list[str]:
    """A line for each source of prompts, and for each thing that was left out."""
    lines = [f"{s['name']}: {plural(s['prompts'], 'prompt')} from {s['source']}" for s in summary["sources"]]
    return lines + [f"left out: {line}" for line in summary["skipped"]]


def baseline_line(summary: dict[str, Any]) -> str | None:
    """Plain decoding against transformers' own generate, in one sentence."""
    check = summary["baseline"]
    if check is None:
        return None
    if "error" in check:
        return f"transformers' own generate could not be timed: {check['error']}"
    same = "the same tokens" if check["identical"] else "other tokens: the two round differently"
    return (
        f"Plain decoding: {check['plain_tokens_per_s']:.1f} tokens/s; transformers' own generate: "
        f"{check['transformers_tokens_per_s']:.1f} ({check['ratio']:.2f}×{_repeats(check)}, one prompt, prefill included, {same}){_fair(check)}."
    )


FAIR = 0.97
"""Of transformers' speed: from there on plain decoding is no straw man."""
TOY = 10_000_000
"""Below so many parameters a baseline is not judged: a token costs less than what is around it."""


def _repeats(check: dict[str, Any]) -> str:
    ratios = check.get("ratios")  # reports of old have none
    each = "" if not ratios else f", {min(ratios):.2f} to {max(ratios):.2f} each"
    return f" by the best of {check.get('repeats', 3)}{each}"


def _fair(check: dict[str, Any]) -> str:
    """What the ratio means; nothing of a toy, and nothing where a repeat says otherwise."""
    if check.get("parameters", TOY) < TOY:
        return ""
    fair = [ratio >= FAIR for ratio in (check["ratio"], *(check.get("ratios") or []))]
    if all(fair):
        return ": an honest baseline"
    if any(fair):
        return ": the repeats differ too much to judge the baseline"
    return ": SLOWER than transformers, so the speed-ups are too high"
