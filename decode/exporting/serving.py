"""Lines that serve an exported drafter with another engine, for the card and for the terminal."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join
from typing import Any

import torch
from transformers import AutoConfig

from specalign.common.errors import UserError
from specalign.common.hub import hub_id, local_path
from specalign.common.provenance import memory_bytes
from specalign.folder.publishing import opening_name
from specalign.lm.debug import DEBUG
from specalign.lm.inspection.anatomy import context_limit
from specalign.lm.loading import resolve_folder
from specalign.models.block_config import BlockConfig

GIB = 1 << 30
CACHE_SHARE = 0.25
"""The largest part of the machine's memory that a line reserves for the KV cache."""
CACHE_SLACK = 1.1
"""Engines round each layer's cache up to whole blocks."""


@dataclass(frozen=True)
class Snippet:
    """Lines to paste for one engine. language: of the Markdown fence."""

    engine: str
    language: str
    lines: tuple[str, ...]

    def as_markdown(self) -> list[str]:
        """A fenced block under its title; the fence is longer than any in a path."""
        longest = max(map(len, re.findall("`+", "\n".join(self.lines))), default=0)
        fence = "`" * max(3, longest + 1)
        return [f"With {self.engine}:", "", f"{fence}{self.language}", *self.lines, fence, ""]

    def as_text(self) -> list[str]:
        """A block under its title for the terminal. Python is not indented, so that it can be
        pasted."""
        indent = "" if self.language == "python" else "      "
        return [f"  with {self.engine}:", "", *(f"{indent}{line}" for line in self.lines), ""]


@dataclass(frozen=True)
class ServedTarget:
    """A target as an engine opens it, and the options that fit this machine.

    name: hub id or folder. context: tokens; 0 = the model's own. cache_gib: for the KV cache; 0 =
    the engine's choice. dtype: empty = the engine's choice. gguf: the target as a GGUF file.
    """

    name: str
    context: int = 0
    cache_gib: int = 0
    dtype: str = ""
    gguf: str = "TARGET.gguf"

    @property
    def vllm_options(self) -> list[str]:
        """Options of `vllm serve` for a CPU."""
        if not self.cache_gib:
            return []
        # without --enforce-eager vLLM compiles the model for minutes on a CPU, and needs a compiler
        return [
            *("--dtype", self.dtype),
            *("--max-model-len", str(self.context)),
            *("--kv-cache-memory-bytes", f"{self.cache_gib}G"),
            "--enforce-eager",
        ]


# ---- lines of each engine ----


def python_text(text: str) -> str:
    """A Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def vllm_line(method: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """vLLM's server. vLLM 0.32 has no DSpark on CPUs, so that line is for a GPU."""
    config = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    text = json.dumps(config, ensure_ascii=False, separators=(",", ":"))
    engine, options = "vLLM", target.vllm_options
    if method == "dspark" and options:
        engine, options = "vLLM on a GPU (its build for CPUs refuses DSpark)", []
    line = join(["vllm", "serve", target.name, *options, "--speculative-config", text])
    return Snippet(engine, "bash", (line,))


def sglang_line(algorithm: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """SGLang's server. With a small language model it also requires steps and branches."""
    words = [
        *("python", "-m", "sglang.launch_server", "--model-path", target.name),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder),
        *("--speculative-num-draft-tokens", str(drafts + 1)),
    ]
    if algorithm == "STANDALONE":
        words += ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
    return Snippet("SGLang", "bash", (join(words),))


def transformers_script(target: ServedTarget, assistant: str, options: str) -> Snippet:
    """A script that generates. assistant: a line that opens a drafter, or empty; options: of
    `generate`."""
    classes = ["AutoModelForCausalLM", "AutoTokenizer"]
    if assistant.startswith("assistant = AutoModel."):
        classes.insert(0, "AutoModel")
    name = python_text(target.name)
    lines = [
        f"from transformers import {', '.join(classes)}",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        f"model = AutoModelForCausalLM.from_pretrained({name})",
        *([assistant] if assistant else []),
        'inputs = tokenizer("your prompt", return_tensors="pt")',
        f"out = model.generate(**inputs, {options}, max_new_tokens=100)",
        "print(tokenizer.decode(out[0]))",
    ]
    return Snippet("transformers", "python", tuple(lines))


# ---- the target ----


def shared_name(target: str, repo: str | None) -> str:
    """The target's name in an export: its hub id, else its path, or only the last part if the
    export is uploaded."""
    if repo and not hub_id(target):
        return local_path(target).name
    return opening_name(target)


def find_served_target(
    target: str,
    name: str,
    device: str,
    drafter: BlockConfig | None,
    gguf: Path | None,
    repo: str | None,
) -> ServedTarget:
    """The target for the printed lines: with this machine's options, or plain if they are uploaded.

    Args:
        name: as `shared_name` gives it. drafter: None = an autoregressive one. gguf: the target's
            GGUF file.
    """
    return ServedTarget(name) if repo else fit_machine(target, device, drafter, gguf)


def resolved_name(target: str) -> str:
    """What engines on this machine open: a folder (for a GGUF file or package the converted one) or
    a hub id."""
    try:
        found = resolve_folder(target)
    except UserError:  # debug targets have no folder
        return target
    return str(found.absolute()) if isinstance(found, Path) else found


def fit_machine(
    target: str, device: str, drafter: BlockConfig | None = None, gguf: Path | None = None
) -> ServedTarget:
    """A target with options for this machine.

    On a CPU an engine needs the dtype (fp32, in which exports are compared) and the memory of the
    KV cache: enough for one text of the model's whole context, or of what fits into a quarter of
    the memory.

    Args:
        device: as `load_target` takes it. drafter: a block drafter; None = an autoregressive one,
            at most of the target's size.
    """
    name = resolved_name(target)
    plain = ServedTarget(name, gguf=ServedTarget.gguf if gguf is None else str(gguf.absolute()))
    on_cpu = not torch.cuda.is_available() if device == "auto" else device.startswith("cpu")
    if not on_cpu or target in DEBUG:
        return plain
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):  # a model with custom code
        return plain
    text = config.get_text_config(decoder=True)
    target_bytes = _cache_bytes(text, int(text.num_hidden_layers))
    drafter_bytes = (
        target_bytes if drafter is None else _cache_bytes(drafter, len(drafter.init_layer_ids))
    )
    per_token = CACHE_SLACK * (target_bytes + drafter_bytes)
    fits = int(CACHE_SHARE * (memory_bytes() or 8 * GIB) / per_token)
    context = min(context_limit(config), fits)
    cache_gib = math.ceil(context * per_token / GIB)
    return replace(plain, context=context, cache_gib=cache_gib, dtype="float32")


def _cache_bytes(config: Any, layers: int) -> int:
    """Bytes of one token's keys and values in fp32."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * layers * int(heads) * int(width)
