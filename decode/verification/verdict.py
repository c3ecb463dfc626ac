"""The figures of the checks, and the verdict: a page, JSON, and the file for replaying the first
difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from specalign.common.errors import UserError
from specalign.common.files import write_json, write_text
from specalign.common.schema import JsonObject, read_object
from specalign.common.text import markdown_table, markdown_text

TITLES = {
    "rows": "The distribution used in verification equals that of a fresh forward pass without a "
    "cache, processed by transformers",
    "proposals": "Drafts follow the distribution q that is reported with them",
    "rule": "For any p and q, the verifier's output follows exactly p",
    "randomness": "Every random number comes from the request's own generator and is used once",
    "commit": "The text consists of the prompt and each round's accepted path and next token, and "
    "ends where it must",
    "end_to_end": "Greedy outputs equal those of plain decoding and of transformers' generate, and "
    "the joint distribution of four sampled tokens is p's",
}
"""The six checks, in their order."""
SHOWN = 5
"""Differences of a check that the page lists."""
MISSED = "MISSED"
Tested = tuple[str, str, str]
"""A bug of the self-test, the checks that caught it (or `MISSED`), and the first difference."""
NOT_COVERED = (
    "systems that change the distribution on purpose; the random numbers of drafts made in the "
    "background (everything else in their rounds is compared); draft lengths chosen by timing "
    "(every length is exact, but a seed does not reproduce it); positions beyond the decoded "
    "texts; devices, data types and versions other than those named above"
)


@dataclass
class Finding:
    """A difference that rounding does not explain. `place`: what replays it."""

    check: str
    what: str
    place: JsonObject


@dataclass
class Tally:
    """One check's figures: what was compared, and how often. largest: of each the difference that
    comes nearest to its bound, and that bound. place: what is being compared now, for findings."""

    check: str
    counts: Counter[str] = field(default_factory=Counter)
    largest: dict[str, tuple[float, float]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    place: JsonObject = field(default_factory=dict)

    def measure(self, name: str, value: float, bound: float, what: str) -> bool:
        """Record a difference: a finding if it is above the bound. Returns whether it is not."""
        largest, its_bound = self.largest.setdefault(name, (value, bound))
        if not value * its_bound <= largest * bound:
            self.largest[name] = value, bound
        return self.expect(name, value <= bound, f"{what} ({value:.3g})")

    def expect(self, name: str, right: bool, what: str) -> bool:
        """Count a comparison: a finding if it is not right. Returns whether it is."""
        self.counts[name] += 1
        if not right:
            self.find(what)
        return right

    def find(self, what: str) -> None:
        """Record a difference that rounding does not explain."""
        self.findings.append(Finding(self.check, what, dict(self.place)))

    @contextmanager
    def measure_time(self) -> Iterator[Tally]:
        """Add the seconds spent within."""
        started = monotonic()
        self.place = {}
        yield self
        self.seconds += monotonic() - started


def write_verdict(
    folder: Path,
    tallies: Sequence[Tally],
    pair: Mapping[str, Any],
    options: Mapping[str, Any],
    tested: Sequence[Tested] = (),
) -> str:
    """Write verdict.md and verdict.json, and replay.json if there is a difference. Returns the
    page."""
    found = [finding for tally in tallies for finding in tally.findings]
    checks = [vars(tally) | {"title": TITLES[tally.check]} for tally in tallies]
    record = {"lossless": not found, "pair": pair, "checks": checks, "self_test": tested}
    text = page(tallies, pair, tested)
    write_text(folder / "verdict.md", text)
    write_json(folder / "verdict.json", record, default=vars)
    (folder / "replay.json").unlink(missing_ok=True)
    if found:
        replay = {"options": dict(options), "finding": asdict(found[0])}
        write_json(folder / "replay.json", replay, default=str)
    return text


def read_replay(path: Path) -> tuple[JsonObject, str]:
    """The options of the run that a replay file comes from, and what of it is run again. Raises
    UserError if there is no such file, or another one."""
    record = read_object(path)
    options, finding = record.get("options"), record.get("finding")
    if not isinstance(options, dict) or not isinstance(finding, dict) or "check" not in finding:
        raise UserError(f"{path}: not a replay.json of decode.verify")
    part = "rule" if finding["check"] == "rule" else "joint law"
    paths = {key: Path(options[key]) for key in ("prompts", "data_dir") if options.get(key)}
    return options | paths, str(finding.get("place", {}).get("batch", part))


def page(tallies: Sequence[Tally], pair: Mapping[str, Any], tested: Sequence[Tested] = ()) -> str:
    """The verdict as Markdown."""
    bad = sum(bool(tally.findings) for tally in tallies)
    what = f"{bad} of {len(tallies)} checks found a difference that rounding does not explain"
    lines = [f"# NOT LOSSLESS: {what}" if bad else "# LOSSLESS", ""]
    for name, value in pair.items():
        if isinstance(value, Mapping):
            value = [f"{key} {one}" for key, one in value.items()]
        text = ", ".join(value) if isinstance(value, list) else value
        lines += [f"- {name}: {markdown_text(str(text))}"] if text else []
    for number, tally in enumerate(tallies, 1):
        result = "DIFFERENT" if tally.findings else "yes"
        lines += ["", f"## {number}. {TITLES[tally.check]}: {result}", "", *_describe(tally)]
    lines += ["", f"Not covered: {NOT_COVERED}.", ""]
    if tested:
        caught = sum(by != MISSED for _, by, _ in tested)
        lines += [f"## Self-test: {caught} of {len(tested)} planted bugs caught", ""]
        lines += [markdown_table(("bug", "caught by", "first difference"), tested), ""]
    if bad:
        again = "python -m decode.verify --replay replay.json"
        lines += [f"`{again}` runs the batch of the first difference again.", ""]
    return "\n".join(lines)


def _describe(tally: Tally) -> Iterator[str]:
    """The page's lines of one check."""
    for name, count in tally.counts.items():
        line = f"- {name}: {count}"
        if name in tally.largest:
            largest, bound = tally.largest[name]
            line += f", largest difference {largest:.2g} (bound {bound:.2g})"
        yield line
    for finding in tally.findings[:SHOWN]:
        short = [f"{k} {v}" for k, v in finding.place.items() if isinstance(v, int | str)]
        place = f" ({', '.join(short)})" if short else ""
        yield f"- **{markdown_text(finding.what)}**{markdown_text(place)}"
    if len(tally.findings) > SHOWN:
        yield f"- {len(tally.findings) - SHOWN} more differences are in verdict.json"
    yield f"- {tally.seconds:.0f} s"
