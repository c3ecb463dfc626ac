"""Lines that serve an exported drafter with another engine, for the card and for the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import join

import torch
from transformers import AutoConfig

from specalign.common.errors import UserError
from specalign.formats.dspark import KINDS
from specalign.formats.gguf import FILE
from specalign.lm.inspection.anatomy import context_limit
from specalign.lm.loading import resolve_folder
from specalign.lm.names import DEBUG
from specalign.models.block_config import BlockConfig

CPU_CONTEXT, CPU_CACHE = 4096, "4G"
"""Tokens and KV cache of vLLM on a CPU, where it would take most of the memory."""
DRAFTS = 5
"""Drafts per round of an autoregressive drafter."""


@dataclass(frozen=True)
class Snippet:
    """Lines to paste for one engine. language: of the Markdown fence."""

    engine: str
    language: str
    lines: tuple[str, ...]

    def as_markdown(self) -> list[str]:
        """A fenced block under its title."""
        return [f"With {self.engine}:", "", f"```{self.language}", *self.lines, "```", ""]

    def as_text(self) -> list[str]:
        """A block under its title for the terminal. Python is not indented, so that it can be
        pasted."""
        indent = "" if self.language == "python" else "      "
        return [f"  with {self.engine}:", "", *(f"{indent}{line}" for line in self.lines), ""]


@dataclass(frozen=True)
class ServedTarget:
    """A target as an engine opens it.

    name: hub id or folder. vllm_options: for this machine. gguf: the target as a GGUF file.
    """

    name: str
    vllm_options: tuple[str, ...] = ()
    gguf: str = "TARGET.gguf"


def find_served_target(target: str, device: str, gguf: Path | None = None) -> ServedTarget:
    """The target with options for this machine: on a CPU vLLM needs the dtype (fp32, in which
    exports are compared) and limits. `device`: as `load_target` takes it."""
    name = resolved_name(target)
    options: tuple[str, ...] = ()
    on_cpu = not torch.cuda.is_available() if device == "auto" else device.startswith("cpu")
    if on_cpu and target not in DEBUG:
        try:
            context = context_limit(AutoConfig.from_pretrained(name, trust_remote_code=False))
        except (OSError, ValueError):  # a model with custom code
            context = CPU_CONTEXT
        # without --enforce-eager vLLM compiles the model for minutes, and needs a compiler
        options = ("--dtype", "float32", "--max-model-len", str(min(context, CPU_CONTEXT)))
        options += ("--kv-cache-memory-bytes", CPU_CACHE, "--enforce-eager")
    file = ServedTarget.gguf if gguf is None else str(gguf.absolute())
    return ServedTarget(name, options, file)


def resolved_name(target: str) -> str:
    """What engines on this machine open: a folder (for a GGUF file or package the converted one) or
    a hub id."""
    try:
        found = resolve_folder(target)
    except UserError:  # debug targets have no folder
        return target
    return str(found.absolute()) if isinstance(found, Path) else found


# ---- lines of each format ----


def serve_block(form: str, config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    """Lines that serve a block drafter's folder in the format `form`, for engines that can."""
    drafts, name = config.block_size, quote_python(folder)
    if form == "transformers":
        assistant = f"assistant = AutoModel.from_pretrained({name}, dtype=model.dtype)"
        options = 'assistant_model=assistant, speculation_type="dflash"'
        return [transformers_script(target, assistant, options)]
    if form == "custom_generate":
        options = f"custom_generate={name}, trust_remote_code=True"
        return [transformers_script(target, "", options)]
    if form == "gguf":  # draft-dflash ignores the block layout in the file
        plain = config.fill_in and not config.markov_rank
        words = ["llama-server", "-m", target.gguf, "-md", f"{folder}/{FILE}"]
        words += ["--spec-type", "draft-dflash" if plain else "draft-dspark"]
        words += ["--spec-draft-n-max", str(drafts), "--metrics"]
        return [Snippet("llama.cpp", "bash", (join(words),))]
    if config.hidden_act != "silu":  # the only one of both servers
        return []
    if form == "dspark":  # vLLM serves vanilla heads, SGLang whole vocabularies
        vanilla = KINDS.get(config.markov_kind, "vanilla") == "vanilla"
        snippets = [vllm_line("dspark", target, folder, drafts)] if vanilla else []
        if not vanilla or not config.draft_vocab_size:
            snippets.append(sglang_line("DSPARK", target, folder, drafts))
        return snippets
    snippets = [vllm_line("dflash", target, folder, drafts)]
    if form == "dflash":
        snippets.append(sglang_line("DFLASH", target, folder, drafts))
    elif config.target == target.name:
        line = join(["vllm", "serve", folder, *target.vllm_options])
        title = "vLLM, which reads the target's name in the folder"
        snippets.append(Snippet(title, "bash", (line,)))
    return snippets


def serve_draft_model(target: ServedTarget, folder: str) -> list[Snippet]:
    """Lines that serve an autoregressive drafter's folder."""
    assistant = f"assistant = AutoModelForCausalLM.from_pretrained({quote_python(folder)})"
    return [
        vllm_line("draft_model", target, folder, DRAFTS),
        sglang_line("STANDALONE", target, folder, DRAFTS),
        transformers_script(target, assistant, "assistant_model=assistant"),
    ]


# ---- lines of each engine ----


def quote_python(text: str) -> str:
    """A Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def vllm_line(method: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """vLLM's server. vLLM 0.32 has no DSpark on CPUs, so that line is for a GPU."""
    config = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    text = json.dumps(config, ensure_ascii=False, separators=(",", ":"))
    engine, options = "vLLM", target.vllm_options
    if method == "dspark" and options:
        engine, options = "vLLM on a GPU (its build for CPUs refuses DSpark)", ()
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
    first = "AutoModel, " if "= AutoModel." in assistant else ""
    name = quote_python(target.name)
    lines = [
        f"from transformers import {first}AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        f"model = AutoModelForCausalLM.from_pretrained({name})",
        *([assistant] if assistant else []),
        'inputs = tokenizer("your prompt", return_tensors="pt")',
        f"out = model.generate(**inputs, {options}, max_new_tokens=100)",
        "print(tokenizer.decode(out[0]))",
    ]
    return Snippet("transformers", "python", tuple(lines))
