"""The results of `decode.verify`, as a page and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from align.common.errors import UserError
from align.common.files import write_text
from align.common.schema import convert, read_json
from align.common.text import markdown_text


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


@dataclass
class Caught:
    """A bug that the self-test planted, and whether a check caught it."""

    bug: str
    check: str
    method: str
    caught: bool | None
    """None: it affects nothing here."""
    words: str

    def __str__(self) -> str:
        if self.caught is None:
            return f"—      {self.bug}: {self.words}"
        return (
            f"{'caught' if self.caught else 'MISSED'} {self.bug} ({self.check} · {self.method}: {self.words})"
        )


def line(check: Check) -> str:
    """A finished check as a line for the terminal."""
    mark = "BUG" if not check.passed else "—  " if _idle(check) else "ok "
    return f"{mark} {check.name} · {check.method}: {check.words} ({check.seconds:.0f} s)"


def _idle(check: Check) -> bool:
    """Whether it shows nothing of drafts because nothing was drafted."""
    return check.method != "plain" and not check.figures.get("drafted")


@dataclass
class Tested:
    """A run that was stopped: what it had checked and planted, and `content`: what files it had read."""

    checks: list[Check] = field(default_factory=list)
    caught: list[Caught] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)


class _Record(TypedDict):
    """What is read of verdict.json."""

    asked: Any
    pair: dict[str, Any]
    checks: list[Check]
    self_test: list[Caught]
    finished: bool


def read_tested(folder: Path, asked: Mapping[str, Any]) -> Tested:
    """The run that was stopped in the folder; nothing where it holds none, or one that was `asked` something else, by other code."""
    path = folder / "verdict.json"
    try:
        record = convert(read_json(path), _Record, "", str(path))
    except UserError:  # none, or none of ours
        return Tested()
    if record["finished"] or record["asked"] != asked:
        return Tested()
    return Tested(record["checks"], record["self_test"], record["pair"].get("content") or {})


def write_verdict(
    folder: Path,
    checks: Sequence[Check],
    pair: Mapping[str, Any],
    finished: bool,
    caught: Sequence[Caught] = (),
    asked: Mapping[str, Any] | None = None,
) -> str:
    """Write verdict.md and verdict.json, also of an unfinished run. Returns the page."""
    text = page(checks, pair, finished, caught)
    record = {
        "asked": asked,
        "pair": pair,
        "checks": [asdict(c) for c in checks],
        "self_test": [asdict(c) for c in caught],
        "finished": finished,
        "lossless": finished and all(c.passed for c in checks),
    }
    write_text(folder / "verdict.md", text)
    write_text(folder / "verdict.json", json.dumps(record, indent=2))
    return text


def page(
    checks: Sequence[Check], pair: Mapping[str, Any], finished: bool = True, caught: Sequence[Caught] = ()
) -> str:
    """The verdict as Markdown."""
    bad = [c for c in checks if not c.passed]
    idle = [c for c in checks if _idle(c)]
    lost = [c for c in checks if c.figures.get("drafted") and not c.figures.get("accepted", 1)]
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
        markdown_text(f"target {pair['target']}, drafter {pair['drafter']}"),
        *([markdown_text(f"prompted with {pair['prompted']}")] if pair.get("prompted") else []),
        f"{pair['prompts']} prompts, up to {pair['max_new_tokens']} new tokens, {pair['device']}, commit {pair['git_commit'] or 'unknown'}",
        "",
        "| check | method | result | seconds |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {c.name} | {markdown_text(c.method)} | {'' if c.passed else 'BUG: '}{'— ' if _idle(c) else ''}{markdown_text(c.words)} | {c.seconds:.0f} |"
        for c in checks
    ]
    lines += ["", *_seen(checks), "", *_self_test(caught)]
    lines += [
        f"{sum(c.seconds for c in checks):.0f} seconds in all. Distributions of every verifier, enumerated: tests/contract/README.md.",
        "",
    ]
    return "\n".join(lines)


def _seen(checks: Sequence[Check]) -> list[str]:
    """Which shifts the sampled checks could see, and which not."""
    drawn = [c for c in checks if c.figures.get("sees") is not None and c.figures["drafted"]]
    if not drawn:
        return ["No drafts were sampled: nothing is shown of sampled output."]
    least = max(c.figures["sees"] for c in drawn)
    whole = [c for c in drawn if c.figures["sees_whole"] is not None]
    untested = [c.method for c in drawn if c.figures["sees_whole"] is None]
    said = [
        f"What sampling shows: a bug that moves {least:.2f} of the probability to or from the likeliest token would be found in "
        "nine of ten runs, whatever the method"
        + (
            f"; one in the token after a fully accepted draft from {max(c.figures['sees_whole'] for c in whole):.2f} on"
            + (" in every one that accepted enough." if untested else ".")
            if whole
            else "."
        ),
        "Smaller ones pass: take more `--samples`, or `--thorough`.",
    ]
    if untested:
        said += [
            "",
            "Not seen, because too few drafts were accepted whole: the token after a whole draft of",
            "",
        ]
        said += [f"- {markdown_text(method)}" for method in untested]
    return said


def _self_test(caught: Sequence[Caught]) -> list[str]:
    if not caught:
        return ["Which bugs would these checks have caught? `--self-test` plants some and says.", ""]
    tried = [c for c in caught if c.caught is not None]
    words = {True: "caught", False: "MISSED", None: "does not apply"}
    return [
        f"## Self-test: {sum(c.caught is True for c in tried)} of {len(tried)} planted bugs caught",
        "",
        "| bug | check | method | with these samples |",
        "|---|---|---|---|",
        *(f"| {c.bug} | {c.check} | {markdown_text(c.method)} | {words[c.caught]} |" for c in caught),
        "",
    ]
