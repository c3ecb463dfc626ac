"""The formats of exports: what each holds of a block drafter, its folder (all files at once or
nothing, never over files of somebody else), and lines that serve it with another engine."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import join

import torch
from torch import Tensor

from decode.portable import drafter as network
from decode.portable import generate
from specalign.common.claims import Claim, check_folder
from specalign.common.errors import UserError
from specalign.common.files import naming, replacing, write_json, write_text
from specalign.common.hub import card_metadata, card_value
from specalign.common.schema import JsonObject, read_config, read_object
from specalign.common.text import markdown_text
from specalign.formats.block import pack_drafter
from specalign.formats.dflash import make_dflash
from specalign.formats.dspark import make_dspark
from specalign.formats.kinds import EXPORT_RECORD
from specalign.formats.published import Exported, check_last_layer
from specalign.formats.speculators import make_speculators
from specalign.formats.tensors import EMBEDDING
from specalign.formats.transformers import make_assistant
from specalign.formats.weights import read_folder, write_weights
from specalign.lm.loading import resolve_folder
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

REQUIREMENTS = "torch>=2.5\ntransformers>=5.0\nsafetensors\n"


def make_custom_generate(drafter: BlockDrafter) -> Exported:
    """A folder that transformers' `generate` runs: the drafter's own files, with the modules of
    `decode.portable` as source. Raises UserError for a target whose cache can't be rolled back, or
    a tapped last layer."""
    if drafter.target.anatomy.recurrent:
        why = f"{drafter.target.spec!r} keeps state that transformers' cache can't roll back"
        raise UserError(f"--format custom_generate: {why}")
    check_last_layer(drafter, "custom_generate")
    files = {"custom_generate/requirements.txt": REQUIREMENTS}
    for name, module in {"generate": generate, "drafter": network}.items():
        source = inspect.getsource(module).replace("from decode.portable.", "from .")
        files[f"custom_generate/{name}.py"] = source
    return Exported(*pack_drafter(drafter), files)


MAKERS: dict[str, Callable[[BlockDrafter], Exported]] = {
    "dflash": make_dflash,
    "speculators": make_speculators,
    "dspark": make_dspark,
    "transformers": make_assistant,
    "custom_generate": make_custom_generate,
}
"""What a format holds of a drafter. They raise UserError naming the option to train with."""


def make_export(form: str, drafter: BlockDrafter) -> Exported:
    """What a format holds of a drafter. Raises UserError if it can't hold it, with those that
    can."""
    try:
        return MAKERS[form](drafter)
    except UserError as error:
        fitting = []
        for name, make in MAKERS.items():
            with suppress(UserError):
                make(drafter)
                fitting.append(name)
        hint = (
            f"this drafter fits --format {' or '.join(fitting)}"
            if fitting
            else "no format can hold it"
        )
        raise UserError(f"{error}; {hint}") from None


def write_export(
    form: str, drafter: BlockDrafter, out: Path, dtype: torch.dtype, card: str = ""
) -> None:
    """Write a drafter's folder: weights in `dtype`, scaled embeddings in fp32, which have more
    digits than the target's. An older export in this format is replaced. `card`: README.md. Raises
    UserError if the format can't hold the drafter, or the folder holds something else."""
    check_free(out, form)
    made = MAKERS[form](drafter)
    made.config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = {}
    for key, tensor in made.tensors.items():
        kept = torch.float32 if key == EMBEDDING else dtype
        kept = kept if tensor.is_floating_point() else tensor.dtype
        tensors[key] = tensor.detach().to("cpu", kept, copy=True)  # some share their storage
    out = out.resolve()
    room = out.with_name(f".{out.name[:200]}.specalign-export")
    with naming(out), Claim(room, "--out"), replacing(out, room) as new:
        write_weights(tensors, new)
        write_json(new / "config.json", made.config)
        for path, text in {"README.md": card, **made.files}.items():
            write_text(new / path, text)
        record = {"format": form, "target": drafter.config.target, "files": _list_files(new)}
        write_json(new / EXPORT_RECORD, record)


def read_export(folder: Path) -> Exported:
    """Config and tensors as they are stored. Raises UserError."""
    return Exported(read_config(folder), read_folder(folder, f"--export={folder}"))


def read_format(folder: Path) -> str:
    """The format of an export. Raises UserError for any other folder."""
    record = read_object(folder / EXPORT_RECORD) if (folder / EXPORT_RECORD).is_file() else {}
    if record.get("format") not in MAKERS:
        raise UserError(f"{folder}: not an export (no valid {EXPORT_RECORD})")
    return str(record["format"])


def find_other_setting(held: JsonObject, wanted: JsonObject, within: str = "") -> str:
    """The first key of a config that differs from an export of the drafter; empty = none."""
    for name in sorted((held.keys() | wanted.keys()) - {"dtype", "transformers_version"}):
        a, b = held.get(name, "missing"), wanted.get(name, "missing")
        if isinstance(a, dict) and isinstance(b, dict):
            found = find_other_setting(a, b, f"{within}{name}.")
            if found:
                return found
        elif a != b and not (type(a) is type(b) is float and math.isclose(a, b, rel_tol=1e-6)):
            return f"config.json: {within}{name} is {a}, expected {b}"
    return ""


def find_other_tensor(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The first tensor that differs from an export of the drafter; empty = none."""
    for name in sorted(held.keys() | wanted.keys()):
        if name not in held or name not in wanted:
            return f"tensor {name} is {'missing' if name in wanted else 'unexpected'}"
        apart = distance(held[name], wanted[name].to(held[name].dtype))
        if not apart <= 1e-6:
            return f"tensor {name} differs (relative difference {apart:.2g})"
    return ""


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the root mean square; infinite for other shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.double().cpu(), wanted.double().cpu()
    size = float(wanted.pow(2).mean().sqrt()) or 1.0
    return float((found - wanted).abs().max()) / size


def check_free(out: Path, form: str) -> None:
    """Raises UserError unless `out` is free, or holds nothing but an export in the format
    `form`."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out={out}: not a folder")
    check_folder(out.resolve().parent, f"--out={out}: folder")
    record = read_object(out / EXPORT_RECORD) if (out / EXPORT_RECORD).is_file() else {}
    written = record.get("files") if record.get("format") == form else None
    for name in _list_files(out):
        if not isinstance(written, list) or name not in (EXPORT_RECORD, *written):
            raise UserError(f"--out={out}: contains {name!r}, not written by a {form} export")


def _list_files(folder: Path) -> list[str]:
    """Relative paths of all files, links and empty folders."""
    found = [
        p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir())
    ]
    return sorted(p.relative_to(folder).as_posix() for p in found)


def write_card(form: str, source: Path, target: str, name: str, serve: Sequence[Snippet]) -> str:
    """README.md: what it is, and lines that serve it; the licence is that of the drafter's own
    folder (`source`). `name`: of the export."""
    libraries = {"speculators": "speculators"}
    libraries |= dict.fromkeys(("transformers", "custom_generate"), "transformers")
    tags = ("speculative-decoding", "discrete-diffusion", "drafter", form)
    licence = card_value(source, "license") or "other"
    page = card_metadata(libraries.get(form, "vllm"), target, licence, tags)
    page += [f"# {markdown_text(f'{name}: drafts for {target} ({form})')}", ""]
    for snippet in serve:
        page += [f"With {snippet.engine}:", "", f"```{snippet.language}", *snippet.lines, "```", ""]
    return "\n".join(page) + "\n"


CPU_CONTEXT = 4096


@dataclass(frozen=True)
class Snippet:
    """Lines to paste for one engine. language: of the Markdown fence."""

    engine: str
    language: str
    lines: tuple[str, ...]

    def as_text(self) -> list[str]:
        """A block under its title for the terminal. Python is not indented, so that it can be
        pasted."""
        indent = "" if self.language == "python" else "      "
        return [f"  with {self.engine}:", "", *(f"{indent}{line}" for line in self.lines), ""]


def resolved_name(target: str) -> str:
    """What engines on this machine open: a folder (for a GGUF file or package the converted one) or
    a hub id."""
    try:
        found = resolve_folder(target)
    except UserError:  # debug targets have no folder
        return target
    return str(found.absolute()) if isinstance(found, Path) else found


def serve(form: str, config: BlockConfig, target: Target, folder: str) -> list[Snippet]:
    """Lines that serve a drafter's folder in the format `form`, for engines that can."""
    name, drafts = resolved_name(target.spec), config.block_size
    if form in ("transformers", "custom_generate"):
        return [_script(form, name, folder)]
    if config.hidden_act != "silu":  # the only one of both servers
        return []
    method = "dspark" if form == "dspark" else "dflash"
    found = [_vllm_line(method, target, name, folder, drafts)]
    if form == "dflash" or (form == "dspark" and not config.draft_vocab_size):
        words = [
            *("python", "-m", "sglang.launch_server", "--model-path", name),
            *("--speculative-algorithm", method.upper(), "--speculative-draft-model-path", folder),
            *("--speculative-num-draft-tokens", str(drafts + 1)),
        ]
        found.append(Snippet("SGLang", "bash", (join(words),)))
    return found


def _vllm_line(method: str, target: Target, name: str, folder: str, drafts: int) -> Snippet:
    """On a CPU vLLM needs the dtype (fp32, in which exports are compared) and limits, else its
    cache takes most of the memory. vLLM 0.32 has no DSpark there, so that line is for a GPU."""
    config = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    text = json.dumps(config, ensure_ascii=False, separators=(",", ":"))
    engine, options = "vLLM", list[str]()
    if target.device.type == "cpu" and method == "dspark":
        engine = "vLLM on a GPU (its build for CPUs refuses DSpark)"
    elif target.device.type == "cpu":
        # without --enforce-eager vLLM compiles the model for minutes, and needs a compiler
        context = str(min(target.context_limit, CPU_CONTEXT))
        options = ["--dtype", "float32", "--max-model-len", context]
        options += ["--kv-cache-memory-bytes", "4G", "--enforce-eager"]
    line = join(["vllm", "serve", name, *options, "--speculative-config", text])
    return Snippet(engine, "bash", (line,))


def _script(form: str, target: str, folder: str) -> Snippet:
    name, path = (json.dumps(text, ensure_ascii=False) for text in (target, folder))
    assistant = [f"assistant = AutoModel.from_pretrained({path}, dtype=model.dtype)"]
    options = 'assistant_model=assistant, speculation_type="dflash"'
    if form == "custom_generate":
        assistant, options = [], f"custom_generate={path}, trust_remote_code=True"
    lines = (
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        f"model = AutoModelForCausalLM.from_pretrained({name})",
        *assistant,
        'inputs = tokenizer("your prompt", return_tensors="pt")',
        f"out = model.generate(**inputs, {options}, max_new_tokens=100)",
        "print(tokenizer.decode(out[0]))",
    )
    return Snippet("transformers", "python", lines)
