"""Converts a GGUF file into a hub-layout folder in the cache, once, with transformers' reader."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specalign.common.checksums import is_unchanged, write_checksums
from specalign.common.errors import UserError
from specalign.common.files import UNFINISHED, naming, replacing, sha256_file
from specalign.common.hub import cache_folder
from specalign.common.text import say
from specalign.gguf.config import complete_config
from specalign.gguf.header import HINT, Header, check_header, read_header
from specalign.gguf.tokenizer import answer_ends, complete_tokenizer, make_tokenizer, special_id

_VERSION = 7
"""Of the conversion; folders of other versions are not reused."""
_OWN_TOKENIZERS = ("llama", "qwen2", "qwen3")


def converted_folder(path: Path) -> Path:
    """The hub-layout folder of a GGUF file: converted at the first call, then reused while
    unchanged. Raises UserError: the file cannot be converted."""
    name = path.stem if path.suffix.lower() == ".gguf" else path.name
    folder = cache_folder() / "targets" / f"{name[:100]}-{sha256_file(path)[:12]}-{_VERSION}"
    if is_unchanged(folder):
        return folder
    header = read_header(path)
    check_header(path, header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if is_unchanged(folder):  # converted by another process meanwhile
            return folder
        with replacing(folder, Path(f"{folder}{UNFINISHED}")) as new:
            _convert(path, header, new)
            write_checksums(new, "*")
    return folder


def _convert(path: Path, header: Header, folder: Path) -> None:
    say(f"converting {path.name} ({header.architecture}) once; this can take minutes", error=True)
    with tempfile.TemporaryDirectory(prefix="specalign-gguf-") as room:
        Path(room, "model.gguf").symlink_to(path.absolute())  # the name may have no suffix
        config = AutoConfig.from_pretrained(room, gguf_file="model.gguf")
        complete_config(path, header, config)
        model, tensors = _load_model(path, header, config, room)
        if header.architecture in _OWN_TOKENIZERS:
            tokenizer: Any = make_tokenizer(header.values)
        else:
            tokenizer = AutoTokenizer.from_pretrained(room, gguf_file="model.gguf")
            complete_tokenizer(tokenizer, header.values)
    with naming(folder):
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(str(folder))
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(str(folder))
    ends = answer_ends(header.values)
    if set(ends) - {config.eos_token_id}:
        pad = special_id(header.values, "padding")
        generation = {
            "eos_token_id": ends,
            "bos_token_id": config.bos_token_id,
            "pad_token_id": pad,
        }
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _load_model(
    path: Path, header: Header, config: Any, room: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in float32, and its tensors without tied copies. Raises UserError: the file lacks
    tensors of the model, or has others that would be dropped."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        room, gguf_file="model.gguf", config=config, dtype=torch.float32,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    model, report = loaded
    tensors: dict[str, torch.Tensor] = {}
    pointers = set[int]()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in pointers:
            tensors[name] = tensor.contiguous()
            pointers.add(tensor.data_ptr())
    architecture = header.architecture
    differing = [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]
    if differing:
        raise UserError(
            f"{path}: lacks {min(differing)!r} of a {architecture} model, or has it in another "
            f"shape; {HINT}"
        )
    stored = sum(
        tensor.n_elements
        for name, tensor in header.tensors.items()
        if not name.startswith("rope_") and not _is_draft_layer(name, config.num_hidden_layers)
    )
    built = sum(tensor.numel() for tensor in tensors.values())
    if stored != built:
        raise UserError(
            f"{path}: contains {stored:,} weights, but the {architecture} model built from it has "
            f"{built:,}; {HINT}"
        )
    return model, tensors


def _is_draft_layer(name: str, layers: int) -> bool:
    """Layers after the model's last one are for multi-token prediction (Qwen3.5)."""
    return name.startswith("blk.") and int(name.split(".")[1]) >= layers
