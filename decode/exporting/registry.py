"""All formats by name, with the lines that serve what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from align.models.block import BlockDrafter
from decode.exporting.formats import (
    Exported,
    custom_generate,
    dflash,
    dspark,
    speculators,
    transformers_assistant,
)
from decode.exporting.gguf_file import FILE, gguf


@dataclass(frozen=True)
class Format:
    """A format by its name.

    make: (drafter, target) → content; serve: the lines that serve a folder, of (target, folder, K).
    """

    make: Callable[[BlockDrafter], Exported]
    serve: Callable[[str, str, int], list[str]]


def _vllm(method: str) -> Callable[[str, str, int], list[str]]:
    def lines(target: str, folder: str, drafts: int) -> list[str]:
        said = f'{{"method":"{method}","model":"{folder}","num_speculative_tokens":{drafts}}}'
        sglang = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {drafts + 1}"
        )
        return [f"vllm serve {target} --speculative-config '{said}'", sglang]

    return lines


def _speculators_lines(target: str, folder: str, drafts: int) -> list[str]:
    return [f"vllm serve {folder}", _vllm("dflash")(target, folder, drafts)[0]]


def _transformers_lines(target: str, folder: str, drafts: int) -> list[str]:
    return [
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")',
        f'model = AutoModelForCausalLM.from_pretrained("{target}")',
        f'assistant = AutoModel.from_pretrained("{folder}", dtype=model.dtype)',
        'words = tokenizer("your prompt", return_tensors="pt")',
        'out = model.generate(**words, assistant_model=assistant, speculation_type="dflash", max_new_tokens=100)',
    ]


def _custom_lines(target: str, folder: str, drafts: int) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")',
        f'model = AutoModelForCausalLM.from_pretrained("{target}")',
        'words = tokenizer("your prompt", return_tensors="pt")',
        f'out = model.generate(**words, custom_generate="{folder}", trust_remote_code=True, max_new_tokens=100)',
    ]


def _llama_lines(target: str, folder: str, drafts: int) -> list[str]:
    return [
        f"llama-server -m TARGET.gguf -md {folder}/{FILE} --spec-type draft-dflash --spec-draft-n-max {drafts}    # draft-dspark with a Markov head",
    ]


FORMATS = {
    "dflash": Format(dflash, _vllm("dflash")),
    "speculators": Format(speculators, _speculators_lines),
    "dspark": Format(dspark, _vllm("dspark")),
    "transformers": Format(transformers_assistant, _transformers_lines),
    "gguf": Format(gguf, _llama_lines),
    "custom_generate": Format(custom_generate, _custom_lines),
}
