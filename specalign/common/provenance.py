"""Where and with what something was made: machine, package versions, commit. Read without importing
torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that holds `align` and `decode`: a git checkout, or where the packages are
installed."""

TRAINING_PACKAGES = (
    "torch",
    "lightning",
    "transformers",
    "datasets",
    "deepspeed",
    "wandb",
    "safetensors",
    "numpy",
)
DECODING_PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "safetensors")


def package_versions(packages: Sequence[str] = DECODING_PACKAGES) -> dict[str, str | None]:
    """Python's version and the packages'; None = not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def training_versions() -> dict[str, Any]:
    """Python, operating system, packages and the git commit of this checkout; None for what is
    absent."""
    packages = package_versions(TRAINING_PACKAGES)
    python = {"python": packages.pop("python"), "platform": platform.platform()}
    return {**python, **packages, **git_state()}


def decoding_versions() -> dict[str, str]:
    """Python's and the packages' versions; a package that is not installed is left out."""
    return {name: version for name, version in package_versions().items() if version is not None}


def git_state(folder: Path = CHECKOUT) -> dict[str, Any]:
    """`git_commit` and `git_dirty` (a tracked file differs from it) of the checkout rooted in
    `folder`, else Nones."""

    def git(*words: str) -> str | None:
        command = ["git", *words]
        try:
            run = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    root = git("rev-parse", "--show-toplevel")
    # An installed package may lie inside somebody else's checkout: that commit says nothing about
    # it.
    commit = git("rev-parse", "HEAD") if root and Path(root).resolve() == folder.resolve() else None
    changed = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changed is None else bool(changed)}


def git_commit() -> str | None:
    """The commit of this checkout, `-dirty` when files differ from it; None outside a checkout."""
    state = git_state()
    return state["git_commit"] and state["git_commit"] + ("-dirty" if state["git_dirty"] else "")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, operating system, and the GPU where torch
    sees one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": cores,
        "system": platform.platform(),
    }
    if (memory := memory_bytes()) is not None:
        found["memory_gib"] = round(memory / 2**30, 1)
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["gpu"] = sys.modules["torch"].cuda.get_device_name()
    return found


def memory_bytes() -> int | None:
    """The machine's memory; None where the system does not say."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes that wanted to run over the last minute; None where the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None
