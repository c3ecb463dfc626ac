"""All formats by name, and the lines that serve what was written."""

from __future__ import annotations

from collections.abc import Callable

from align.models.block_config import BlockConfig
from decode.exporting.base import Format
from decode.exporting.drop_in import DropIn, custom_generate
from decode.exporting.engine_reader import PackageReader, SpeculatorsReader, TransformersReader
from decode.exporting.formats import assistant, dflash, dspark, speculators
from decode.exporting.gguf_file import FILE, GGUFFormat, gguf
from decode.exporting.gguf_reader import GGUFFileReader
from decode.exporting.reader import FilesReader


def _vllm(method: str) -> Callable[[BlockConfig, str], list[str]]:
    def lines(config: BlockConfig, folder: str) -> list[str]:
        target, drafts = config.target, config.block_size
        said = f'{{"method":"{method}","model":"{folder}","num_speculative_tokens":{drafts}}}'
        sglang = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {drafts + 1}"
        )
        return [f"vllm serve {target} --speculative-config '{said}'", sglang]

    return lines


def _speculators_lines(config: BlockConfig, folder: str) -> list[str]:
    return [f"vllm serve {folder}", _vllm("dflash")(config, folder)[0]]


def _assistant_lines(config: BlockConfig, folder: str) -> list[str]:
    return [
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
        f'tokenizer = AutoTokenizer.from_pretrained("{config.target}")',
        f'model = AutoModelForCausalLM.from_pretrained("{config.target}")',
        f'assistant = AutoModel.from_pretrained("{folder}", dtype=model.dtype)',
        'words = tokenizer("your prompt", return_tensors="pt")',
        'out = model.generate(**words, assistant_model=assistant, speculation_type="dflash", max_new_tokens=100)',
    ]


def _custom_lines(config: BlockConfig, folder: str) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'tokenizer = AutoTokenizer.from_pretrained("{config.target}")',
        f'model = AutoModelForCausalLM.from_pretrained("{config.target}")',
        'words = tokenizer("your prompt", return_tensors="pt")',
        f'out = model.generate(**words, custom_generate="{folder}", trust_remote_code=True, max_new_tokens=100)',
    ]


def llama_kind(config: BlockConfig) -> str:
    """What llama.cpp is to be told: `draft-dflash` drafts from the second row on, whatever the file says of its block layout."""
    return "draft-dflash" if config.fill_in and not config.markov_rank else "draft-dspark"


def _llama_lines(config: BlockConfig, folder: str) -> list[str]:
    said = f"--spec-type {llama_kind(config)} --spec-draft-n-max {config.block_size}"
    return [f"llama-server -m TARGET.gguf -md {folder}/{FILE} {said}"]


FORMATS = {
    each.name: each
    for each in (
        Format("dflash", dflash, _vllm("dflash"), (FilesReader, PackageReader)),
        Format(
            "speculators", speculators, _speculators_lines, (FilesReader, SpeculatorsReader), "speculators"
        ),
        Format("dspark", dspark, _vllm("dspark")),
        Format("transformers", assistant, _assistant_lines, (TransformersReader,), "transformers"),
        GGUFFormat("gguf", gguf, _llama_lines, (GGUFFileReader,), "llama.cpp", ("gguf",)),
        DropIn("custom_generate", custom_generate, _custom_lines, (), "transformers", ("custom_generate",)),
    )
}
