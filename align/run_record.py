"""What a run leaves beside its results: the resolved recipe, versions, commit and command, to repeat it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from align.errors import UserError
from align.files import write_atomically
from align.recipe import Recipe, resolve
from align.strict_yaml import dump_yaml

_CHECKOUT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "lightning", "transformers", "datasets", "deepspeed", "wandb", "safetensors", "numpy")


def versions() -> dict[str, Any]:
    """Python, packages and the git commit of this checkout; null for what is absent."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, **git_state(_CHECKOUT)}


def git_state(folder: Path) -> dict[str, Any]:
    """`git_commit`, `git_dirty` (a tracked file changed) of the checkout rooted in `folder`, else nulls."""

    def ask(*words: str) -> str | None:
        command = ["git", *words]
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    root = ask("rev-parse", "--show-toplevel")
    # An installed package may lie inside somebody else's checkout: that commit says nothing about it.
    commit = ask("rev-parse", "HEAD") if root and Path(root).resolve() == folder.resolve() else None
    changed = ask("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changed is None else bool(changed)}


def save_run_record(recipe: Recipe, folder: Path, argv: Sequence[str] | None = None) -> None:
    """Write recipe.yaml (resolved: recipe=PATH runs it again) and versions.json into the run's folder.

    Args:
        argv: the words of the command line; default: this process's own.

    Raises:
        UserError: the folder can't be written.
    """
    record = {**versions(), "argv": list(sys.argv[1:] if argv is None else argv)}
    plain, versions_text = dump_yaml(resolve(recipe)), json.dumps(record, indent=2) + "\n"
    try:
        write_atomically(folder / "recipe.yaml", lambda part: part.write_text(plain, encoding="utf-8"))
        write_atomically(
            folder / "versions.json", lambda part: part.write_text(versions_text, encoding="utf-8")
        )
    except OSError as error:
        raise UserError(f"output={folder}: can't be written ({error.strerror or error})") from None
