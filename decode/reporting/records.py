"""The files of a measurement: `run.json` says what was run and on what, `records.jsonl` holds one line per
generation.

Records come first and the report reads nothing else, so that a figure can always be traced and remade. No
torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from align.common.errors import UserError
from align.common.files import write_atomically
from align.common.schema import convert, parse_json, read_json
from align.common.text import short
from decode.method_names import LOSSY

_MOST = 2**53
"""No count and no time of a record is larger, or negative."""

RECORDS, RUN, SUMMARY = "records.jsonl", "run.json", "summary.json"


@dataclass
class Divergence:
    """Where a greedy output first leaves the plain one, and whether rounding explains it
    (decode/losslessness/divergence.py)."""

    index: int
    """Position in the output, 0 = its first token."""
    plain_token: int | None
    """None where the plain output has ended."""
    token: int | None
    kind: str
    """`rounding tie`, else `BUG`."""
    gap: float | None = None
    """Plain decoding's logit of its own token minus that of the other token (its top-2 gap when `top2` says
    so)."""
    bound: float | None = None
    """The largest gap that the measured rounding can close: 2·max|Δ logit| between the two widths of the
    forward."""
    top2: bool = False
    """Whether the two tokens are plain decoding's first and second choice there."""
    reproduced: bool = False
    """Whether replaying both paths in their own widths gives both tokens again."""


@dataclass
class Record:
    """One generation: a prompt, a method, a repeat."""

    suite: str
    prompt: str
    method: str
    repeat: int
    category: str
    prompt_tokens: int
    new_tokens: int
    """Tokens in the output, an end-of-sequence token included, nothing after it."""
    committed: int
    """Of these, the ones that verifying calls committed: all but the first, which the prefill gives."""
    seconds: float
    """Decoding, prefill excluded."""
    prefill_seconds: float
    tokens_per_s: float
    """committed / seconds."""
    calls: int
    """Target calls after the prefill."""
    accepted: list[int]
    """Drafted tokens committed by each call."""
    drafted: list[int]
    """Tokens drafted ahead in each call; of a tree, its levels."""
    tau: float | None
    """committed / calls; None without a call."""
    finish: str
    tokens: list[int]
    nodes: list[int] = field(default_factory=list)
    """Drafted tokens verified by each call: `drafted`, unless drafts branch."""
    draft_seconds: float = 0.0
    """Part of `seconds` spent drafting."""
    verify_seconds: float = 0.0
    """Part of `seconds` spent in target calls and verification."""
    load: float | None = None
    """The machine's one-minute load average afterwards."""
    position: int = 0
    """Place of the method in its group's order."""
    identical: bool | None = None
    """Whether the output equals plain decoding's, token for token; None where that is not defined
    (temperature > 0)."""
    divergence: Divergence | None = None
    verifier: str = ""
    """Its name; "" for plain decoding."""

    @property
    def lossy(self) -> bool:
        """Whether the method was allowed to change the output's law."""
        return self.verifier.startswith(LOSSY)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.suite, self.prompt, self.method, self.repeat


class _Always(TypedDict):
    target: str
    dtype: str
    methods: list[str]
    temperature: float
    max_new_tokens: int


class Settings(_Always, total=False):
    """Those that a report reads; the others are recorded all the same."""

    threads: int
    seed: int
    repeats: int
    warmup: int
    sweep: list[str] | None
    tuned: list[str] | None


class Source(TypedDict):
    """A suite and where its prompts came from."""

    name: str
    title: str
    group: str
    prompts: int
    source: str


class Machine(TypedDict, total=False):
    """What it ran on, as far as a report reads it."""

    processor: str
    cores: int | None


@dataclass
class Run:
    """What was measured on what: written before the first record."""

    settings: dict[str, Any]
    """Everything that a figure depends on; a run is continued only under the same settings."""
    suites: list[dict[str, Any]]
    command: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    skipped: list[str] = field(default_factory=list)
    """Suites and prompts that were left out, with the reason."""
    baseline: dict[str, Any] | None = None
    """Plain decoding against transformers' own `generate` (decode/benchmark/baseline.py)."""
    started: str = ""


def write_json(path: Path, value: Any) -> None:
    """Atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_run(folder: Path, run: Run) -> None:
    write_json(folder / RUN, asdict(run))


def read_run(folder: Path) -> Run:
    """Raises UserError when the folder holds no readable run.json."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    path = folder / RUN
    if not path.exists():
        raise UserError(f"{folder} holds no {RUN}: not a folder that `python -m decode.eval --out` wrote")
    run = convert(read_json(path), Run, "", str(path))
    for name, kind in (("settings", Settings), ("suites", list[Source]), ("machine", Machine)):
        convert(getattr(run, name), kind, name, str(path))
    return run


def append(folder: Path, records: Iterable[Record]) -> None:
    """One JSON line each, flushed to the disk before this returns."""
    with open(folder / RECORDS, "a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """These and no others, atomically."""
    lines = [json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    write_atomically(folder / RECORDS, lambda part: part.write_text("".join(lines), encoding="utf-8"))


def read_records(folder: Path, mend: bool = False) -> list[Record]:
    """All records of the folder, none when there is no file yet; of those that tell of the same generation the last.

    A last line without its end, left by a kill, is ignored; `mend` also cuts it off the file, so that
    appending goes on.

    Raises:
        UserError: a broken line in the middle, or one that is not a record.
    """
    path = folder / RECORDS
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if mend and len(whole) < len(raw):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    records = []
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], 1):
        where = f"{path}, line {number}"
        record = convert(parse_json(line, where), Record, "", where)
        for name, value in vars(record).items():
            amounts = [
                v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)
            ]
            if any(not 0 <= v <= _MOST for v in amounts):
                raise UserError(f"{where}: {name}={short(value)} must lie between 0 and {_MOST}")
        if why := _contradiction(record):
            raise UserError(f"{where}: {why}")
        records.append(record)
    return list({record.key: record for record in records}.values())


def _contradiction(r: Record) -> str | None:
    """Why no generation has this record, or None. Every quotient of a report is of amounts that are checked here."""
    if len(r.accepted) != len(r.drafted) or len(r.nodes) not in (0, len(r.drafted)):
        return "accepted, drafted and nodes do not tell of as many calls"
    if len(r.tokens) != r.new_tokens:
        return f"new_tokens={r.new_tokens}, but tokens holds {len(r.tokens)}"
    if r.committed != (max(r.new_tokens - 1, 0) if r.calls else 0):
        return f"committed={r.committed} can't be of new_tokens={r.new_tokens} and calls={r.calls}"
    if sum(r.accepted) > r.committed or any(a > d for a, d in zip(r.accepted, r.drafted, strict=True)):
        return "accepted says more tokens than drafted or committed"
    if r.committed and r.seconds == 0:
        return f"seconds=0 can't be of committed={r.committed}"
    return None
