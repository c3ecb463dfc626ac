"""The files of a measurement: `run.json` describes the run, `records.jsonl` holds one line per
generation. The report is computed from these alone."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from decode.systems.registry import LOSSY
from specalign.common.errors import UserError
from specalign.common.files import check_ordinary, naming, write_json, write_text
from specalign.common.provenance import git_commit
from specalign.common.schema import JsonObject, convert, parse_json, read_json
from specalign.common.text import cut
from specalign.folder.training_record import TrainingRecord

RECORDS, RUN, SUMMARY, REPLAYS = "records.jsonl", "run.json", "summary.json", "replays.json"
AS_JSON: JsonObject = {"ensure_ascii": False, "allow_nan": False}
"""How the files of a measurement are written."""
_OWN = (RECORDS, SUMMARY, "share.png", "report.html", REPLAYS, "tuning")


Row = TypeVar("Row")
RecordKey = tuple[str, str, str, int, int]  # suite, prompt, method, repeat, batch size


@dataclass
class Divergence:
    """Where a greedy output first leaves the plain one, at position `index`, and why: `rounding
    tie` or `BUG` (decode/evaluation/divergence.py).

    plain_token: None if the plain output has ended. gap: plain decoding's logit of `plain_token`
    minus that of `token`. bound: the largest gap that the measured rounding can close. top2: the
    tokens are plain decoding's two most probable ones. reproduced: a replay gives both again.
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

    new_tokens include an end of sequence; committed: all but the first, which the prefill gives.
    calls: target forwards after the prefill, with the tokens that each accepted and drafted (of a
    tree, levels; `nodes`: all of them). tau: committed / calls. seconds: of decoding, prefill
    excluded; drafting and verifying are parts of it. position: the method's place in the order on
    this prompt. identical: whether the output equals plain decoding's; None above temperature 0.
    batch: prompts that were decoded together, at most. group: the first of them. score: by the suite's metric, 0 to 1; None = not
    scored.
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
    batch: int = 1
    group: str = ""
    score: float | None = None

    def __post_init__(self) -> None:
        self.group = self.group or self.prompt

    @property
    def lossy(self) -> bool:
        """Whether the verifier may change the output's distribution."""
        return self.verifier.startswith(LOSSY)

    @property
    def key(self) -> RecordKey:
        return self.suite, self.prompt, self.method, self.repeat, self.batch


@dataclass
class Overlap:
    """Of a suite's `checked` prompts, the ids of those that share a passage with training data."""

    checked: int
    found: list[str]


@dataclass
class DrafterTraining:
    """What is known of the training of the drafter that `method` uses.

    record: from the drafter's folder; None = it has none. data: what the prompts were checked
    against, if they were, with the overlaps by suite.
    """

    method: str
    record: TrainingRecord | None = None
    data: str | None = None
    overlaps: dict[str, Overlap] = field(default_factory=dict)


@dataclass
class Run:
    """What was measured, and on which machine. Written before the first record.

    settings: all that a figure depends on; a run continues only under the same ones. skipped: what
    was left out, with the reason. baseline: plain decoding against transformers' own `generate`.
    training: None = no method uses a drafter.
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
    training: DrafterTraining | None = None


def write_run(folder: Path, run: Run) -> None:
    write_json(folder / RUN, asdict(run), **AS_JSON)


def read_run(folder: Path) -> Run:
    """Raises UserError when the folder holds no readable run.json."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    path = folder / RUN
    if not path.exists():
        raise UserError(
            f"{folder} contains no {RUN}: not an output folder of `python -m decode.eval --out`"
        )
    run: Run = convert(read_json(path), Run, "", str(path))
    return run


def write_replays(folder: Path, replays: Sequence[JsonObject]) -> None:
    write_json(folder / REPLAYS, list(replays), **AS_JSON)


def read_replays(folder: Path) -> list[JsonObject]:
    """The folder's replays; none without the file."""
    path = folder / REPLAYS
    if not path.is_file():
        return []
    found: list[JsonObject] = convert(read_json(path), list[JsonObject], "replays", str(path))
    return found


def append(folder: Path, rows: Iterable[Any], name: str = RECORDS) -> None:
    """Append one JSON line per record to a file of the folder, synced to disk."""
    path = folder / name
    check_ordinary(path)
    with naming(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(map(_to_line, rows))
        file.flush()
        os.fsync(file.fileno())


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Replace all records, atomically."""
    write_text(folder / RECORDS, "".join(map(_to_line, records)))


def _to_line(row: Any) -> str:
    return json.dumps(asdict(row), **AS_JSON) + "\n"


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
    """All records of the folder; for duplicates of a generation, the last one. Otherwise as
    `read_appended`."""
    records = read_appended(folder / RECORDS, Record, mend)
    return list({record.key: record for record in records}.values())


def read_appended(path: Path, kind: type[Row], mend: bool) -> list[Row]:
    """The lines that `append` wrote. An incomplete last one, left by a killed run, is ignored;
    `mend` also removes it from the file. Raises UserError: a broken line in the middle, or one of
    another kind."""
    check_ordinary(path)
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if mend and len(whole) < len(raw):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    lines = whole.decode("utf-8", errors="replace").split("\n")[:-1]
    found = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1))
    return [convert(parse_json(line, where), kind, "", where) for where, line in found]


def check_out(folder: Path, recorded: JsonObject, resume: bool, tune: bool) -> None:
    """Check, before anything is loaded, that the folder may hold this measurement, or that its own
    can be continued. One that is to be replaced after tuning is deleted now: if tuning is
    interrupted, it must not look like the new one. Raises UserError: it may not."""
    check_ordinary(folder / RECORDS)
    if not (folder / RUN).is_file():
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        others = [name for name in names if not name.startswith(".") and name not in _OWN]
        if others:
            raise UserError(
                f"--out={str(folder)!r} contains other files ({cut(others[0], 40)}): "
                "choose another folder"
            )
    elif not resume:
        if tune:
            _empty(folder)
    else:
        old = read_run(folder).settings
        now = recorded | {"git_commit": git_commit()}
        check_same(folder, {key: old.get(key) for key in now}, now)


def open_folder(folder: Path, run: Run, replace: bool) -> tuple[Run, list[Record]]:
    """The folder's run and records if it holds some under the same settings; else `run`, which is
    written, and no records. Raises UserError: it holds a run under other settings."""
    if replace:
        _empty(folder)
    if (folder / RUN).is_file() or (folder / RECORDS).is_file():
        old = read_run(folder)
        check_same(folder, old.settings, run.settings)
        return old, read_records(folder, mend=True)
    write_run(folder, run)
    return run, []


def _empty(folder: Path) -> None:
    for name in (RECORDS, RUN, SUMMARY, REPLAYS):
        (folder / name).unlink(missing_ok=True)


def check_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises UserError for settings that differ from those of the folder's measurement."""
    changes = [
        f"{key}: {cut(str(old.get(key)), 40)} before, {cut(str(new.get(key)), 40)} now"
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"--out={str(folder)!r} contains a measurement with other settings "
            f"({'; '.join(changes[:3])}{more}): choose another folder, or --no-resume to replace it"
        )
