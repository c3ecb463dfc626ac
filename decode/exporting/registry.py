"""All formats by name, and the lines that serve what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from shlex import quote

from align.models.block_config import BlockConfig
from align.models.checkpoints.dspark import KINDS
from decode.exporting.base import Format
from decode.exporting.drop_in import DropIn, custom_generate
from decode.exporting.engine_reader import PackageReader, SpeculatorsReader, TransformersReader
from decode.exporting.folder import python_text
from decode.exporting.formats import assistant, dflash, dspark, speculators
from decode.exporting.gguf_file import FILE, GGUFFormat, gguf
from decode.exporting.gguf_reader import GGUFFileReader
from decode.exporting.reader import FilesReader


def vllm_line(method: str, target: str, folder: str, drafts: int) -> str:
    """vLLM's."""
    words = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    said = json.dumps(words, ensure_ascii=False, separators=(",", ":"))
    return f"vllm serve {quote(target)} --speculative-config {quote(said)}"


def sglang_line(algorithm: str, target: str, folder: str, drafts: int) -> str:
    """SGLang's. A small language model's steps and branches are asked for beside its drafts, or none of the three."""
    steps = f" --speculative-num-steps {drafts} --speculative-eagle-topk 1" * (algorithm == "STANDALONE")
    return (
        f"python -m sglang.launch_server --model-path {quote(target)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {quote(folder)} --speculative-num-draft-tokens {drafts + 1}{steps}"
    )


def _server_lines(method: str) -> Callable[[BlockConfig, str], list[str]]:
    """Those of the servers that serve such a drafter; both have silu alone."""

    def lines(config: BlockConfig, folder: str) -> list[str]:
        kind = KINDS.get(config.markov_kind, "vanilla")
        vanilla = method != "dspark" or kind == "vanilla"
        widened = method != "dspark" or kind != "vanilla" or not config.draft_vocab_size
        said = config.target, folder, config.block_size
        both = (vllm_line(method, *said), vanilla), (sglang_line(method.upper(), *said), widened)
        return [line for line, serves in both if serves and config.hidden_act == "silu"]

    return lines


def _speculators_lines(config: BlockConfig, folder: str) -> list[str]:
    served = _server_lines("dflash")(config, folder)[:1]
    return [f"vllm serve {quote(folder)}", *served] if served else []


def _assistant_lines(config: BlockConfig, folder: str) -> list[str]:
    return [
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
        *_opened(config),
        f"assistant = AutoModel.from_pretrained({python_text(folder)}, dtype=model.dtype)",
        'words = tokenizer("your prompt", return_tensors="pt")',
        'out = model.generate(**words, assistant_model=assistant, speculation_type="dflash", max_new_tokens=100)',
    ]


def _custom_lines(config: BlockConfig, folder: str) -> list[str]:
    given = f"custom_generate={python_text(folder)}, trust_remote_code=True, max_new_tokens=100"
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *_opened(config),
        'words = tokenizer("your prompt", return_tensors="pt")',
        f"out = model.generate(**words, {given})",
    ]


def _opened(config: BlockConfig) -> list[str]:
    target = python_text(config.target)
    return [
        f"tokenizer = AutoTokenizer.from_pretrained({target})",
        f"model = AutoModelForCausalLM.from_pretrained({target})",
    ]


def llama_kind(config: BlockConfig) -> str:
    """What llama.cpp is to be told: `draft-dflash` drafts from the second row on, whatever the file says of its block layout."""
    return "draft-dflash" if config.fill_in and not config.markov_rank else "draft-dspark"


def _llama_lines(config: BlockConfig, folder: str) -> list[str]:
    said = f"--spec-type {llama_kind(config)} --spec-draft-n-max {config.block_size}"
    return [f"llama-server -m TARGET.gguf -md {quote(f'{folder}/{FILE}')} {said}"]


FORMATS = {
    each.name: each
    for each in (
        Format("dflash", dflash, _server_lines("dflash"), (FilesReader, PackageReader)),
        Format(
            "speculators", speculators, _speculators_lines, (FilesReader, SpeculatorsReader), "speculators"
        ),
        Format("dspark", dspark, _server_lines("dspark")),
        Format("transformers", assistant, _assistant_lines, (TransformersReader,), "transformers"),
        GGUFFormat("gguf", gguf, _llama_lines, (GGUFFileReader,), "llama.cpp", ("gguf",)),
        DropIn("custom_generate", custom_generate, _custom_lines, (), "transformers", ("custom_generate",)),
    )
}
