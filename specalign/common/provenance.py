"""Records how a result was produced: machine, package versions, commit. Does not import torch."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages: a git checkout, or where they are installed."""
_TRAINING = (
    "torch", "lightning", "transformers", "datasets", "deepspeed", "wandb", "safetensors", "numpy",
)  # fmt: skip
_DECODING = ("torch", "transformers", "numpy", "tokenizers", "safetensors")


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    """The packages' versions; None = not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def training_versions() -> dict[str, Any]:
    """Python, operating system, packages and the git commit of this checkout; None if absent."""
    python = {"python": platform.python_version(), "platform": platform.platform()}
    return {**python, **_versions(_TRAINING), **git_state()}


def decoding_versions() -> dict[str, str]:
    """Python's version and those of the installed packages."""
    found = {"python": platform.python_version(), **_versions(_DECODING)}
    return {name: version for name, version in found.items() if version is not None}


def git_state(folder: Path = CHECKOUT) -> dict[str, Any]:
    """`git_commit` and `git_dirty` of the checkout rooted in `folder`, else Nones."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    root = git("rev-parse", "--show-toplevel")
    # an installed package may lie inside another project's checkout
    is_own = root and Path(root).resolve() == folder.resolve()
    commit = git("rev-parse", "HEAD") if is_own else None
    changed = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changed is None else bool(changed)}


def git_commit() -> str | None:
    """The commit of this checkout, `-dirty` if files differ from it; None outside a checkout."""
    state = git_state()
    return state["git_commit"] and state["git_commit"] + ("-dirty" if state["git_dirty"] else "")


def machine() -> dict[str, Any]:
    """Processor, cores of this process, memory, operating system, GPU if torch sees one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = platform.platform()
    found: dict[str, Any] = {"processor": _processor(), "cores": cores, "system": system}
    if (memory := memory_bytes()) is not None:
        found["memory_gib"] = round(memory / 2**30, 1)
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["gpu"] = sys.modules["torch"].cuda.get_device_name()
    return found


def memory_bytes() -> int | None:
    """The machine's memory; None if the system does not say."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes that wanted to run over the last minute; None if the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None
