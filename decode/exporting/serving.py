"""Lines that serve an exported drafter with another engine, for the card and for the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from specalign.common.errors import UserError
from specalign.formats.gguf import FILE
from specalign.lm.loading import resolve_folder
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig

VLLM = {
    "dflash": "dflash",
    "speculators": "dflash",
    "dspark": "dspark",
    "draft_model": "draft_model",
}
"""Format → vLLM's method."""
SGLANG = {"dflash": "DFLASH", "dspark": "DSPARK", "draft_model": "STANDALONE"}
"""Format → SGLang's algorithm."""
DRAFTS = 5
"""Drafts per round of an autoregressive drafter."""
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


@dataclass(frozen=True)
class ServedTarget:
    """A target as an engine opens it. name: hub id or folder; vllm_options: for this machine; gguf:
    the target as a GGUF file."""

    name: str
    vllm_options: tuple[str, ...] = ()
    gguf: str = "TARGET.gguf"


def find_served_target(target: Target, gguf: Path | None = None) -> ServedTarget:
    """The target with options for this machine: on a CPU vLLM needs the dtype (fp32, in which
    exports are compared) and limits, else its cache takes most of the memory."""
    options: tuple[str, ...] = ()
    if target.device.type == "cpu":
        # without --enforce-eager vLLM compiles the model for minutes, and needs a compiler
        context = str(min(target.context_limit, CPU_CONTEXT))
        options = ("--dtype", "float32", "--max-model-len", context)
        options += ("--kv-cache-memory-bytes", "4G", "--enforce-eager")
    file = ServedTarget.gguf if gguf is None else str(gguf.absolute())
    return ServedTarget(resolved_name(target.spec), options, file)


def resolved_name(target: str) -> str:
    """What engines on this machine open: a folder (for a GGUF file or package the converted one) or
    a hub id."""
    try:
        found = resolve_folder(target)
    except UserError:  # debug targets have no folder
        return target
    return str(found.absolute()) if isinstance(found, Path) else found


def serve(
    form: str, config: BlockConfig | None, target: ServedTarget, folder: str
) -> list[Snippet]:
    """Lines that serve a drafter's folder in the format `form`, for engines that can. config: a
    block drafter's; None = an autoregressive one."""
    drafts = DRAFTS if config is None else config.block_size
    if form == "gguf":
        return [_llama_line(target, folder, drafts)]
    found = []
    if config is None or config.hidden_act == "silu":  # the only one of both servers
        if form in VLLM:
            found.append(_vllm_line(VLLM[form], target, folder, drafts))
        whole = config is None or not config.draft_vocab_size
        if form in SGLANG and (whole or form != "dspark"):
            found.append(_sglang_line(SGLANG[form], target, folder, drafts))
    if form in ("transformers", "custom_generate", "draft_model"):
        found.append(_script(form, target, folder))
    return found


def _llama_line(target: ServedTarget, folder: str, drafts: int) -> Snippet:
    words = ["llama-server", "-m", target.gguf, "-md", f"{folder}/{FILE}"]
    words += ["--spec-type", "draft-dflash", "--spec-draft-n-max", str(drafts), "--metrics"]
    return Snippet("llama.cpp", "bash", (join(words),))


def _vllm_line(method: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """vLLM 0.32 has no DSpark on CPUs, so that line is for a GPU."""
    config = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    text = json.dumps(config, ensure_ascii=False, separators=(",", ":"))
    engine, options = "vLLM", target.vllm_options
    if method == "dspark" and options:
        engine, options = "vLLM on a GPU (its build for CPUs refuses DSpark)", ()
    line = join(["vllm", "serve", target.name, *options, "--speculative-config", text])
    return Snippet(engine, "bash", (line,))


def _sglang_line(algorithm: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """With a small language model it also requires steps and branches."""
    words = [
        *("python", "-m", "sglang.launch_server", "--model-path", target.name),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder),
        *("--speculative-num-draft-tokens", str(drafts + 1)),
    ]
    if algorithm == "STANDALONE":
        words += ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
    return Snippet("SGLang", "bash", (join(words),))


def _script(form: str, target: ServedTarget, folder: str) -> Snippet:
    name, path = (json.dumps(text, ensure_ascii=False) for text in (target.name, folder))
    kind = "AutoModelForCausalLM" if form == "draft_model" else "AutoModel"
    assistant = [f"assistant = {kind}.from_pretrained({path}, dtype=model.dtype)"]
    options = "assistant_model=assistant"
    if form == "transformers":
        options += ', speculation_type="dflash"'
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
