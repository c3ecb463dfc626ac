"""What `decode.verify` found, as a page and as a record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from align.common.files import write_atomically


@dataclass
class Check:
    """One line of the verdict."""

    name: str
    method: str
    passed: bool
    compared: int
    """Outputs, or sampled texts."""
    figures: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    seconds: float = 0.0


def line(check: Check) -> str:
    """A check that is done, for the terminal."""
    return f"{'ok ' if check.passed else 'BUG'} {check.name} · {check.method}: {check.words} ({check.seconds:.0f} s)"


def write_verdict(folder: Path, checks: Sequence[Check], pair: Mapping[str, Any], finished: bool) -> str:
    """Write verdict.md and verdict.json, of a run that was stopped too; the page."""
    text = page(checks, pair, finished)
    record = {
        "pair": pair,
        "checks": [asdict(c) for c in checks],
        "finished": finished,
        "lossless": finished and all(c.passed for c in checks),
    }
    write_atomically(folder / "verdict.md", lambda part: part.write_text(text, encoding="utf-8"))
    write_atomically(
        folder / "verdict.json", lambda part: part.write_text(json.dumps(record, indent=2), encoding="utf-8")
    )
    return text


def page(checks: Sequence[Check], pair: Mapping[str, Any], finished: bool = True) -> str:
    """The verdict as Markdown."""
    bad = [c for c in checks if not c.passed]
    idle = [c for c in checks if c.method != "plain" and not c.figures.get("drafted")]
    lost = [c for c in checks if c.figures.get("drafted") and not c.figures.get("accepted", 1)]
    seen = [f["detectable_tv"] for c in checks for k, f in c.figures.items() if k.startswith("tokens_")]
    if bad:
        head = f"NOT LOSSLESS: {len(bad)} of {len(checks)} checks found a bug"
    elif not finished:
        head = f"UNFINISHED: no bug in the first {len(checks)} checks"
    else:
        head = "LOSSLESS: no difference that rounding does not explain"
        shown = [(len(idle), "was drafted"), (len(lost), "that was drafted was accepted")]
        said = [f"in {count} of {len(checks)} checks nothing {what}" for count, what in shown if count]
        head += f" ({', '.join(said)})" if said else ""
    lines = [
        f"# {head}",
        "",
        f"target {pair['target']}, drafter {pair['drafter']}",
        *(
            [f"sampled tokens: nine of ten runs would see a total variation of {max(seen):.2f}"]
            if seen
            else []
        ),
        f"{pair['prompts']} prompts, up to {pair['max_new_tokens']} new tokens, {pair['device']}, commit {pair['git_commit'] or 'unknown'}",
        "",
        "| check | method | result | seconds |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {c.name} | {c.method} | {'' if c.passed else 'BUG: '}{c.words} | {c.seconds:.0f} |"
        for c in checks
    ]
    lines += [
        "",
        f"{sum(c.seconds for c in checks):.0f} seconds in all. Distributions of every verifier, enumerated: tests/contract/README.md.",
        "",
    ]
    return "\n".join(lines)
