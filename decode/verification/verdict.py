"""The verdict of `decode.verify`, as a page and as a JSON file, and the file that replays the first
difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode.verification.tally import TITLES, Tally
from specalign.common.errors import UserError
from specalign.common.files import write_text
from specalign.common.schema import read_object
from specalign.common.text import markdown_text

SHOWN = 5
"""Differences of a check that the page lists."""
NOT_COVERED = (
    "systems that change the distribution on purpose",
    "the random numbers of drafts that are made in the background (everything else of their rounds "
    "is compared)",
    "the length of drafts that a drafter chooses by the clock: any length is exact, and a seed "
    "does not repeat it",
    "positions beyond the texts that were decoded",
    "other devices, data types and versions than those named above",
)


def write_verdict(
    folder: Path,
    tallies: Sequence[Tally],
    pair: Mapping[str, Any],
    options: Mapping[str, Any],
    tested: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Write verdict.md and verdict.json, and replay.json where a difference was found. Returns the
    page."""
    text = page(tallies, pair, tested)
    found = [finding for tally in tallies for finding in tally.findings]
    record = {
        "lossless": not found,
        "pair": dict(pair),
        "checks": [
            {
                **vars(tally),
                "title": TITLES[tally.check],
                "findings": [asdict(finding) for finding in tally.findings],
            }
            for tally in tallies
        ],
        "self_test": list(tested),
    }
    write_text(folder / "verdict.md", text)
    write_text(folder / "verdict.json", json.dumps(record, indent=2))
    replay = folder / "replay.json"
    replay.unlink(missing_ok=True)
    if found:
        first = asdict(found[0])
        write_text(replay, json.dumps({"options": dict(options), "finding": first}, indent=2))
    return text


def read_replay(path: Path) -> tuple[dict[str, Any], str]:
    """The options of the run that a replay file comes from, and what of it is run again.

    Raises:
        UserError: no such file, or another one.
    """
    record = read_object(path)
    options, finding = record.get("options"), record.get("finding")
    if not isinstance(options, dict) or not isinstance(finding, dict) or "check" not in finding:
        raise UserError(f"{path}: not a replay.json of decode.verify")
    place = finding.get("place", {})
    part = "rule" if finding["check"] == "rule" else "joint law"
    return options, str(place.get("batch", part))


def page(
    tallies: Sequence[Tally], pair: Mapping[str, Any], tested: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The verdict as Markdown."""
    bad = [tally for tally in tallies if tally.findings]
    head = (
        f"NOT LOSSLESS: {len(bad)} of {len(tallies)} checks found a difference that rounding does "
        "not explain"
        if bad
        else "LOSSLESS"
    )
    versions = ", ".join(f"{name} {version}" for name, version in pair["versions"].items())
    weights = f" ({pair['weights']})" if pair["weights"] else ""
    lines = [
        f"# {head}",
        "",
        markdown_text(f"target {pair['target']}{weights}, drafter {pair['drafter']}"),
        markdown_text(
            f"{pair['dtype']} on {pair['device']}, {pair['engine']} engine, {pair['kernels']} "
            f"kernels, layers {pair['layers']}, "
            f"attention {pair['attention']}, {pair['threads']} threads, commit "
            f"{pair['git_commit'] or 'unknown'}, {versions}"
        ),
        f"{pair['prompts']} prompts"
        + (f", {pair['left_out']} left out because they are too long" if pair["left_out"] else ""),
    ]
    for number, tally in enumerate(tallies, 1):
        lines += [
            "",
            f"## {number}. {TITLES[tally.check]}: {'DIFFERENT' if tally.findings else 'yes'}",
            "",
        ]
        for name, count in tally.counts.items():
            size = (
                f", largest difference {tally.largest[name]:.2g} (bound {tally.bounds[name]:.2g})"
                if name in tally.largest
                else ""
            )
            lines.append(f"- {name}: {count}{size}")
        if not tally.counts:
            lines.append("- nothing to compare")
        for finding in tally.findings[:SHOWN]:
            lines.append(f"- **{markdown_text(finding.what)}**{_place(finding.place)}")
        if len(tally.findings) > SHOWN:
            lines.append(f"- {len(tally.findings) - SHOWN} more differences are in verdict.json")
        lines.append(f"- {tally.seconds:.0f} s")
    lines += ["", "Not covered: " + "; ".join(NOT_COVERED) + ".", "", *_self_test(tested)]
    if bad:
        lines += [
            "`python -m decode.verify --replay replay.json` runs the batch of the first difference "
            "again.",
            "",
        ]
    return "\n".join(lines)


def _place(place: Mapping[str, Any]) -> str:
    short = [f"{key} {value}" for key, value in place.items() if isinstance(value, int | str)]
    return markdown_text(f" ({', '.join(short)})") if short else ""


def _self_test(tested: Sequence[Mapping[str, Any]]) -> list[str]:
    if not tested:
        return [
            "`--self-test` plants thirteen classic bugs, one at a time, and says whether these "
            "checks catch them.",
            "",
        ]
    caught = sum(bool(one["caught"]) for one in tested)
    return [
        f"## Self-test: {caught} of {len(tested)} planted bugs caught",
        "",
        "| bug | caught by | first difference |",
        "|---|---|---|",
        *(
            f"| {one['bug']} | {', '.join(one['caught']) or 'MISSED'} | "
            f"{markdown_text(one['what'])} |"
            for one in tested
        ),
        "",
    ]
