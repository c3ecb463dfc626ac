"""Lines that start another engine with an exported drafter, as blocks of code for a card and for the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from align.common.errors import UserError, in_one_line
from align.common.hub import hub_id, local_path
from align.common.provenance import memory_bytes
from align.folder.merging import merge_script
from align.folder.publishing import plain_name
from align.models.block_config import BlockConfig
from align.target.debug import DEBUG
from align.target.inspection.anatomy import context_limit
from align.target.loading import adapter_behind, resolve_folder

GIB = 1 << 30
CACHE_SHARE = 0.25
"""Of the machine's memory: the most that a printed line reserves for keys and values."""
CACHE_SLACK = 1.1
"""Engines round each layer's cache up to whole blocks."""


@dataclass(frozen=True)
class Snippet:
    """Lines to paste for one engine. language: as a Markdown fence names it."""

    engine: str
    language: str
    lines: tuple[str, ...]

    def as_markdown(self) -> list[str]:
        """A fenced block under its title. Each line stays as it is, whatever a path in it contains."""
        longest = max(map(len, re.findall("`+", "\n".join(self.lines))), default=0)
        fence = "`" * max(3, longest + 1)
        return [f"With {self.engine}:", "", f"{fence}{self.language}", *self.lines, fence, ""]

    def as_text(self) -> list[str]:
        """A block under its title, one line of code a line; Python is not indented, so that it can be pasted."""
        indent = "" if self.language == "python" else "      "
        return [f"  with {self.engine}:", "", *(f"{indent}{line}" for line in self.lines), ""]


@dataclass(frozen=True)
class ServedTarget:
    """A target as an engine opens it, and how it fits this machine.

    name: hub id or folder. context: tokens; 0 = as many as the model takes. cache_gib: memory for keys and values; 0 = the
    engine's choice. dtype: of the computation; empty = the engine's choice. gguf: the target as a GGUF file. preparation: lines
    that come first, once.
    """

    name: str
    context: int = 0
    cache_gib: int = 0
    dtype: str = ""
    gguf: str = "TARGET.gguf"
    preparation: tuple[Snippet, ...] = ()

    @property
    def vllm_options(self) -> list[str]:
        """Options of `vllm serve` that make it start on this machine."""
        if not self.cache_gib:
            return []
        # without --enforce-eager vLLM compiles the model for minutes on a CPU, and needs a compiler
        return [
            *("--dtype", self.dtype),
            *("--max-model-len", str(self.context)),
            *("--kv-cache-memory-bytes", f"{self.cache_gib}G"),
            "--enforce-eager",
        ]


def opened_name(target: str) -> str:
    """What engines on this machine open for a target: its folder, of a GGUF file or package the converted one, or its hub id."""
    try:
        found = resolve_folder(target)
    except UserError:  # debug targets have no folder
        return target
    return str(found.absolute()) if isinstance(found, Path) else found


def on_this_machine(
    target: str, device: str, drafter: BlockConfig | None = None, gguf: Path | None = None
) -> ServedTarget:
    """A target with the options that fit this machine, derived from its config.json.

    Without a GPU an engine has to be told the dtype (fp32, in which exports are compared) and the memory for keys and values:
    enough for one text of the model's whole context, or of as much as fits into a quarter of the machine's memory.

    Args:
        device: as `load_target` takes it. drafter: a block drafter; None = an autoregressive one, at most as large as the target.
        gguf: the target as a GGUF file, if it is known.
    """
    name = opened_name(target)
    file = str(gguf.absolute()) if gguf is not None else ServedTarget.gguf
    on_cpu = not torch.cuda.is_available() if device == "auto" else device.startswith("cpu")
    if not on_cpu or target in DEBUG:
        return ServedTarget(name, gguf=file)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):  # a model with code of its own
        return ServedTarget(name, gguf=file)
    text = config.get_text_config(decoder=True)
    own = _token_bytes(text, int(text.num_hidden_layers))
    each = own + (own if drafter is None else _token_bytes(drafter, len(drafter.init_layer_ids)))
    most = int(CACHE_SHARE * (memory_bytes() or 8 * GIB) / (CACHE_SLACK * each))
    context = min(context_limit(config), most)
    return ServedTarget(name, context, math.ceil(CACHE_SLACK * context * each / GIB), "float32", file)


def _token_bytes(config: Any, layers: int) -> int:
    """Bytes of one token's keys and values in fp32, over `layers` layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * layers * int(heads) * int(width)


def merged_name(target: str, public: bool = False) -> str:
    """The folder into which the printed lines merge an adapter: next to it, or in the working directory for one in the hub's cache.

    Args:
        public: for others, without a path of this machine.
    """
    name = f"{plain_name(target)}-merged"
    if public:
        return name
    folder = Path.cwd() if hub_id(target) else local_path(target).absolute().parent
    return str(folder / name)


def merge_snippet(target: str, public: bool = False) -> Snippet | None:
    """A script that writes the merged model with `peft`; None for a target that is no adapter.

    Args:
        public: for others, without paths of this machine.

    Raises:
        UserError: the base is unavailable.
    """
    adapter = adapter_behind(target)
    if adapter is None:
        return None
    base = resolve_folder(target)
    shown = str(base.absolute()) if isinstance(base, Path) else base, str(adapter.folder.absolute())
    if public:
        shown = plain_name(adapter.base), plain_name(target)
    with in_one_line(f"target {target!r}: can't be merged"):
        lines = merge_script(adapter, base, shown, merged_name(target, public))
    title = (
        "peft, once: the drafter was trained for this adapter merged into its base, so serve the merged model"
    )
    return Snippet(title, "python", tuple(lines))


def card_blocks(snippets: Iterable[Snippet]) -> list[str]:
    """Markdown lines of snippets."""
    return [line for snippet in snippets for line in snippet.as_markdown()]
