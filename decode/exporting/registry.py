"""All formats by name, and the lines that serve each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from shlex import join

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.checkpoints.dspark import KINDS
from decode.exporting.base import Format
from decode.exporting.drop_in import DropIn, custom_generate
from decode.exporting.engine_reader import PackageReader, SpeculatorsReader, TransformersReader
from decode.exporting.folder import Exported, python_text
from decode.exporting.formats import assistant, dflash, dspark, speculators
from decode.exporting.gguf_file import FILE, GGUFFormat, gguf
from decode.exporting.gguf_reader import GGUFFileReader
from decode.exporting.reader import FilesReader
from decode.exporting.serving import ServedTarget, Snippet


def vllm_line(method: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """vLLM's server. On a CPU vLLM 0.32 refuses DSpark, whose line is for a GPU then."""
    options = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    text = json.dumps(options, ensure_ascii=False, separators=(",", ":"))
    elsewhere = method == "dspark" and bool(target.vllm_options)
    words = ["vllm", "serve", target.name, *([] if elsewhere else target.vllm_options)]
    engine = "vLLM on a GPU (its build for CPUs refuses DSpark)" if elsewhere else "vLLM"
    return Snippet(engine, "bash", (join([*words, "--speculative-config", text]),))


def sglang_line(algorithm: str, target: ServedTarget, folder: str, drafts: int) -> Snippet:
    """SGLang's server. With a small language model it asks for steps and branches too."""
    words = [
        *("python", "-m", "sglang.launch_server", "--model-path", target.name),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder),
        *("--speculative-num-draft-tokens", str(drafts + 1)),
    ]
    if algorithm == "STANDALONE":
        words += ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
    return Snippet("SGLang", "bash", (join(words),))


ServeLines = Callable[[BlockConfig, ServedTarget, str], list[Snippet]]


def _server_lines(method: str) -> ServeLines:
    """Lines of the servers that serve such a drafter. Both have silu only."""

    def lines(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
        kind = KINDS.get(config.markov_kind, "vanilla")
        vanilla = method != "dspark" or kind == "vanilla"
        widened = method != "dspark" or kind != "vanilla" or not config.draft_vocab_size
        options = target, folder, config.block_size
        both = (vllm_line(method, *options), vanilla), (sglang_line(method.upper(), *options), widened)
        return [snippet for snippet, serves in both if serves and config.hidden_act == "silu"]

    return lines


def _speculators_lines(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    """vLLM's. The short line opens the target that the folder's config.json names."""
    served = _server_lines("dflash")(config, target, folder)[:1]
    if served and config.target == target.name:
        short = join(["vllm", "serve", folder, *target.vllm_options])
        served.append(Snippet("vLLM, which reads the target's name in the folder", "bash", (short,)))
    return served


def _assistant_lines(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    return [
        transformers_snippet(
            target,
            f"assistant = AutoModel.from_pretrained({python_text(folder)}, dtype=model.dtype)",
            'assistant_model=assistant, speculation_type="dflash"',
        )
    ]


def _custom_lines(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    options = f"custom_generate={python_text(folder)}, trust_remote_code=True"
    return [transformers_snippet(target, "", options)]


def transformers_snippet(target: ServedTarget, assistant: str, options: str) -> Snippet:
    """A script that generates. assistant: a line that opens a drafter, if one is needed; options: of `generate`."""
    classes = ["AutoModel"] * assistant.startswith("assistant = AutoModel.")
    name = python_text(target.name)
    lines = [
        f"from transformers import {', '.join([*classes, 'AutoModelForCausalLM', 'AutoTokenizer'])}",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        f"model = AutoModelForCausalLM.from_pretrained({name})",
        assistant,
        'inputs = tokenizer("your prompt", return_tensors="pt")',
        f"out = model.generate(**inputs, {options}, max_new_tokens=100)",
        "print(tokenizer.decode(out[0]))",
    ]
    return Snippet("transformers", "python", tuple(line for i, line in enumerate(lines) if line or i == 1))


def llama_kind(config: BlockConfig) -> str:
    """llama.cpp's `--spec-type`: `draft-dflash` drafts from the second row on, whatever the file says of its block layout."""
    return "draft-dflash" if config.fill_in and not config.markov_rank else "draft-dspark"


def _llama_lines(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    words = [
        *("llama-server", "-m", target.gguf, "-md", f"{folder}/{FILE}"),
        *("--spec-type", llama_kind(config), "--spec-draft-n-max", str(config.block_size), "--metrics"),
        *(["-c", str(target.context)] if target.context else []),
    ]
    return [Snippet("llama.cpp", "bash", (join(words),))]


def causal_snippets(target: ServedTarget, folder: str, drafts: int) -> list[Snippet]:
    """Lines that serve an autoregressive drafter's folder."""
    assistant = f"assistant = AutoModelForCausalLM.from_pretrained({python_text(folder)})"
    return [
        *target.preparation,
        vllm_line("draft_model", target, folder, drafts),
        sglang_line("STANDALONE", target, folder, drafts),
        transformers_snippet(target, assistant, "assistant_model=assistant"),
    ]


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


class UnfitFormat(UserError):
    """A format that can't hold a drafter. fits: the formats that can."""

    def __init__(self, why: str, fits: Sequence[str]) -> None:
        said = f"as it is, this drafter fits --format {' or '.join(fits)}" if fits else NOTHING_FITS
        super().__init__(f"{why}; {said}")
        self.fits = tuple(fits)


NOTHING_FITS = "no engine's format holds this drafter"


def make_export(name: str, drafter: BlockDrafter) -> Exported:
    """What a format holds of a block drafter. Raises UnfitFormat where it can't hold it."""
    try:
        return FORMATS[name].make(drafter)
    except UserError as error:
        raise UnfitFormat(str(error), fitting_formats(drafter)) from None


def fitting_formats(drafter: BlockDrafter) -> list[str]:
    """The formats that can hold a block drafter."""
    found = []
    for name, form in FORMATS.items():
        with suppress(UserError):
            form.make(drafter)
            found.append(name)
    return found
