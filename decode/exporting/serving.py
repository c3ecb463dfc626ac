"""Lines that serve an exported drafter with another engine, for the card and for the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from specalign.common.errors import UserError
from specalign.lm.loading import resolve_folder
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig

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
