"""The files of a measurement: `run.json` describes the run, `records.jsonl` holds one line per
generation.

The report reads nothing else, so every figure can be traced to its records and recomputed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from decode.systems.registry import LOSSY
from specalign.common.errors import UserError
from specalign.common.files import check_ordinary, naming, write_json, write_text
from specalign.common.schema import JsonObject, convert, parse_json, read_json
from specalign.common.text import short

RECORDS, RUN, SUMMARY = "records.jsonl", "run.json", "summary.json"
AS_JSON: JsonObject = {"ensure_ascii": False, "allow_nan": False}
"""How the files of a measurement are written."""
_MOST, _LONGEST = 2**53, 1 << 16
"""The largest amount in a record, and the longest draft."""


@dataclass
class Divergence:
    """Where a greedy output first leaves the plain one, and whether rounding explains it
    (decode/evaluation/divergence.py).

    Args:
        index: position in the output. plain_token: None where the plain output has ended. kind:
            `rounding tie` or `BUG`.
        gap: plain decoding's logit of its own token minus that of the other one (with `top2`, its
            top-2 gap).
        bound: the largest gap that the measured rounding can close: 2·max|Δ logit| between forwards
            of the two widths.
        top2: the two tokens are plain decoding's two most probable ones there.
        reproduced: replaying both outputs, each in its own widths, gives both tokens again.
    """

    index: int
    plain_token: int | None
    token: int | None
    kind: str
    gap: float | None = None
    bound: float | None = None
    top2: bool = False
    reproduced: bool = False


@dataclass
class Record:
    """One generation: a prompt, a method, a repeat.

    Args:
        new_tokens: in the output, an end of sequence included. committed: by verifying calls, all
            but the first, which the prefill gives. seconds: of decoding, prefill excluded.
            tokens_per_s: committed / seconds.
        calls: target forwards after the prefill. accepted, drafted: tokens per call; of a tree,
            levels. nodes: drafts verified per call, where drafts branch. tau: committed / calls.
        draft_seconds, verify_seconds: parts of `seconds`. load: the machine's one-minute load
            average at the end.
        position: the method's place in the order on this prompt. identical: whether the output
            equals plain decoding's; None above temperature 0. verifier: "" for plain decoding.
    """

    suite: str
    prompt: str
    method: str
    repeat: int
    category: str
    prompt_tokens: int
    new_tokens: int
    committed: int
    seconds: float
    prefill_seconds: float
    tokens_per_s: float
    calls: int
    accepted: list[int]
    drafted: list[int]
    tau: float | None
    finish: str
    tokens: list[int]
    nodes: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    load: float | None = None
    position: int = 0
    identical: bool | None = None
    divergence: Divergence | None = None
    verifier: str = ""

    @property
    def lossy(self) -> bool:
        """Whether the verifier may change the output's distribution."""
        return self.verifier.startswith(LOSSY)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.suite, self.prompt, self.method, self.repeat


class RequiredSettings(TypedDict):
    """The settings that a report needs. A run records more."""

    target: str
    dtype: str
    methods: list[str]
    temperature: float
    max_new_tokens: int


class RecordedSettings(RequiredSettings, total=False):
    """The settings that a report reads where they are recorded."""

    threads: int
    seed: int
    repeats: int
    warmup: int
    sweep: list[str] | None
    tuned: list[str] | None
    template_kwargs: JsonObject | None
    system: str | None


class RecordedSuite(TypedDict):
    name: str
    title: str
    group: str
    prompts: int
    source: str


class RecordedMachine(TypedDict, total=False):
    processor: str
    cores: int | None


@dataclass
class Run:
    """What was measured, and on which machine. Written before the first record.

    Args:
        settings: all that a figure depends on. A run continues only under the same settings.
        skipped: suites and prompts that were left out, with the reason.
        baseline: plain decoding against transformers' own `generate`
            (decode/evaluation/baseline.py).
    """

    settings: JsonObject
    suites: list[JsonObject]
    command: str = ""
    machine: JsonObject = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    skipped: list[str] = field(default_factory=list)
    baseline: JsonObject | None = None
    started: str = ""


def write_run(folder: Path, run: Run) -> None:
    write_json(folder / RUN, asdict(run), **AS_JSON)


def read_run(folder: Path) -> Run:
    """Raises UserError when the folder holds no readable run.json."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    path = folder / RUN
    if not path.exists():
        raise UserError(
            f"{folder} holds no {RUN}: not a folder that `python -m decode.eval --out` wrote"
        )
    run = convert(read_json(path), Run, "", str(path))
    convert(run.settings, RecordedSettings, "settings", str(path))
    convert(run.suites, list[RecordedSuite], "suites", str(path))
    convert(run.machine, RecordedMachine, "machine", str(path))
    return run


def append(folder: Path, records: Iterable[Record]) -> None:
    """Append one JSON line per record, synced to disk."""
    check_ordinary(folder / RECORDS)
    with naming(folder / RECORDS), open(folder / RECORDS, "a", encoding="utf-8") as file:
        for record in records:
            file.write(_to_line(record))
        file.flush()
        os.fsync(file.fileno())


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Replace all records, atomically."""
    write_text(folder / RECORDS, "".join(map(_to_line, records)))


def _to_line(record: Record) -> str:
    return json.dumps(asdict(record), **AS_JSON) + "\n"


def add(folder: Path, earlier: list[Record], new: list[Record]) -> list[Record]:
    """Add new records to the folder's earlier ones, replacing those of the same generations.
    Returns all."""
    keys = {record.key for record in new}
    others = [record for record in earlier if record.key not in keys]
    if len(others) == len(earlier):
        append(folder, new)
    else:
        write_records(folder, [*others, *new])
    return others + new


def read_records(folder: Path, mend: bool = False) -> list[Record]:
    """All records of the folder, none if there is no file yet; of several of the same generation
    the last.

    An incomplete last line, which a killed run leaves, is ignored; `mend` also removes it from the
    file.

    Raises:
        UserError: a broken line in the middle, or one that is not a record.
    """
    path = folder / RECORDS
    check_ordinary(path)
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if mend and len(whole) < len(raw):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    records = {}
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], 1):
        where = f"{path}, line {number}"
        record = convert(parse_json(line, where), Record, "", where)
        if problem := _find_problem(record):
            raise UserError(f"{where}: {problem}")
        records[record.key] = record
    return list(records.values())


def _find_problem(r: Record) -> str | None:
    """Why no generation can have this record, or None. The report divides only by amounts that are
    checked here."""
    for name, value in vars(r).items():
        amounts = value if isinstance(value, list) else [value]
        if any(isinstance(v, int | float) and not 0 <= v <= _MOST for v in amounts):
            return f"{name}={short(value)} must lie between 0 and {_MOST}"
    if max(r.drafted + r.nodes, default=0) > _LONGEST:
        return f"drafted and nodes must lie between 0 and {_LONGEST}"
    if len(r.accepted) != len(r.drafted) or len(r.nodes) not in (0, len(r.drafted)):
        return "accepted, drafted and nodes differ in their number of calls"
    if len(r.tokens) != r.new_tokens:
        return f"new_tokens={r.new_tokens}, but tokens holds {len(r.tokens)}"
    if r.committed != (max(r.new_tokens - 1, 0) if r.calls else 0):
        return f"committed={r.committed} can't be of new_tokens={r.new_tokens} and calls={r.calls}"
    if sum(r.accepted) > r.committed or any(
        a > d for a, d in zip(r.accepted, r.drafted, strict=True)
    ):
        return "accepted exceeds drafted or committed"
    if r.committed and r.seconds == 0:
        return f"seconds=0 can't be of committed={r.committed}"
    return None
