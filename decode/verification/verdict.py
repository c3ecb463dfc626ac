"""Writes the results of `decode.verify` as a page and as JSON, and the file for replaying the first
difference."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from specalign.common.errors import UserError
from specalign.common.files import write_text
from specalign.common.pages import render_page
from specalign.common.schema import JsonObject, read_object

TITLES = {
    "rows": "The distribution used in verification equals that of a fresh forward pass without a "
    "cache, processed by transformers",
    "proposals": "Drafts follow the distribution q that is reported with them",
    "rule": "For any p and q, the verifier's output follows exactly p",
    "randomness": "Every random number comes from the request's own generator and is used once",
    "commit": "The text consists of the prompt and each round's accepted path and next token, and "
    "stops where the stopping rules say",
    "end_to_end": "Greedy outputs equal those of plain decoding and of transformers' generate",
}
"""The six checks, in their order."""
SHOWN = 5
"""Differences of a check that the page lists."""


@dataclass
class Finding:
    """A difference that rounding does not explain. `place`: what replays it."""

    check: str
    what: str
    place: JsonObject

    @property
    def short_place(self) -> str:
        """The numbers and names of `place`."""
        return ", ".join(f"{k} {v}" for k, v in self.place.items() if isinstance(v, int | str))


@dataclass
class Tally:
    """One check's figures: what was compared, and how often; of each the difference that comes
    nearest to its bound, and that bound. `place`: what is being compared now, for findings."""

    check: str
    counts: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    place: JsonObject = field(default_factory=dict)

    def measure(self, name: str, value: float, bound: float, what: str) -> bool:
        """Record a difference: a finding if it is above the bound. Returns whether it is not."""
        if name not in self.largest or not value * self.bounds[name] <= self.largest[name] * bound:
            self.largest[name], self.bounds[name] = value, bound
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

    def record(self) -> JsonObject:
        """For verdict.json."""
        figures = {key: value for key, value in vars(self).items() if key != "place"}
        findings = [asdict(finding) for finding in self.findings]
        return {**figures, "title": TITLES[self.check], "findings": findings}

    @contextmanager
    def measure_time(self) -> Iterator[Tally]:
        """Add the seconds spent within."""
        started = monotonic()
        self.place = {}
        yield self
        self.seconds += monotonic() - started


@dataclass(frozen=True)
class PlantedBug:
    """A bug of the self-test, the checks that caught it, and the first difference."""

    bug: str
    caught: list[str]
    what: str


def write_verdict(
    folder: Path,
    tallies: Sequence[Tally],
    pair: Mapping[str, Any],
    options: Mapping[str, Any],
    tested: Sequence[PlantedBug] = (),
) -> str:
    """Write verdict.md and verdict.json, and replay.json if there is a difference. Returns the
    page."""
    text = page(tallies, pair, tested)
    found = [finding for tally in tallies for finding in tally.findings]
    record = {
        "lossless": not found,
        "pair": dict(pair),
        "checks": [tally.record() for tally in tallies],
        "self_test": [asdict(one) for one in tested],
    }
    write_text(folder / "verdict.md", text)
    write_text(folder / "verdict.json", json.dumps(record, indent=2))
    replay = folder / "replay.json"
    replay.unlink(missing_ok=True)
    if found:
        first = {"options": dict(options), "finding": asdict(found[0])}
        write_text(replay, json.dumps(first, indent=2, default=str))
    return text


def read_replay(path: Path) -> tuple[JsonObject, str]:
    """The options of the run that a replay file comes from, and what of it is run again. Raises
    UserError if there is no such file, or another one."""
    record = read_object(path)
    options, finding = record.get("options"), record.get("finding")
    if not isinstance(options, dict) or not isinstance(finding, dict) or "check" not in finding:
        raise UserError(f"{path}: not a replay.json of decode.verify")
    part = "rule" if finding["check"] == "rule" else "joint law"
    return options, str(finding.get("place", {}).get("batch", part))


def page(
    tallies: Sequence[Tally], pair: Mapping[str, Any], tested: Sequence[PlantedBug] = ()
) -> str:
    """The verdict as Markdown."""
    values = {"tallies": tallies, "pair": pair, "tested": tested, "titles": TITLES, "shown": SHOWN}
    return render_page(Path(__file__).with_name("verdict.jinja"), **values)
