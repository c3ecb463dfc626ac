"""One drafter in every engine that runs here, side by side: tokens/s, and how much faster each one makes its own plain decoding.

    python -m tests.peers --drafter runs/smollm2_taps/drafter --vllm .venv-vllm      # make serve-check sets up the latter

Prompt by prompt, in turns, greedily and in fp32: the decoder here; transformers' `generate`, with its own DFlash assistant and with a
`custom_generate` export; the dflash package's loop, where it is installed; vLLM, where `--vllm` says. Prompt lookup beside them, where
an engine has it. `--assistant runs/smollm2_autoregressive/drafter`: a small language model drafts too, four tokens a call, here and as
transformers' `assistant_model`.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from align.common.errors import cli
from align.common.text import say
from align.models.block import BlockDrafter
from align.models.checkpoints.block import load_drafter
from align.target.loading import load_target, resolve_folder
from align.target.model import Target
from align.target.names import DEFAULT_TARGET
from decode.drafters.autoregressive import DRAFT_TOKENS, AutoregressiveDrafter
from decode.drafters.block import BlockProposer
from decode.drafters.lookup import LookupDrafter
from decode.engine.compiled import stock_model
from decode.engine.decoder import Decoder
from decode.exporting.compare import encode_prompts
from decode.exporting.registry import FORMATS
from decode.suites.registry import prompts_of
from tests.serve_check import measured, plain_of, rested, serving

Way = Callable[[list[int], int], list[int]]
LOOKUP = 8
"""Tokens that transformers' and vLLM's prompt lookup copies at most, as our own does."""


@cli
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--drafter", default="runs/smollm2_taps/drafter")
    add("--vllm", type=Path, help="the virtual environment that vLLM is installed in")
    add("--assistant", type=Path, help="an autoregressive drafter (recipe=smollm2_autoregressive)")
    add("--target", default=DEFAULT_TARGET)
    add("--suite", default="mtbench")
    add("--limit", type=int, default=10)
    add("--max-new-tokens", type=int, default=64)
    add("--out", type=Path, default=Path("runs/peers"))
    run(parser.parse_args())


def run(options: argparse.Namespace) -> dict[str, Any]:
    target = load_target(options.target, "float32")
    drafter = load_drafter(options.drafter, target)
    folders = {name: options.out / name for name in ("dflash", "transformers", "custom_generate")}
    for name, folder in folders.items():
        FORMATS[name].write(drafter, folder, torch.bfloat16, "")
    drafter.prepare_for_drafting()  # as `decode.load` does
    suites, _ = prompts_of(options.suite, limit=options.limit)
    prompts = encode_prompts(target, suites[0].prompts)
    with ExitStack() as stack:
        model = stock_model(target)
        ways = here(drafter) | in_transformers(model, folders) | in_package(target, folders)
        if options.assistant is not None:
            ways |= with_assistant(target, model, options.assistant)
        if options.vllm is not None:
            ways |= in_vllm(options, folders["dflash"], drafter.config.block_size, stack)
        for name, way in ways.items():
            rested(name, way, prompts[0], 8)  # warm
        outputs, speeds = measured(ways, prompts, options.max_new_tokens)
    same = {
        name: sum(a == b for a, b in zip(outputs[plain_of(name)], outputs[name], strict=True))
        for name in ways
    }
    report = {
        "prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "threads": torch.get_num_threads(),
        "tokens_per_s": speeds, "identical_to_own_plain": same,
        "identical_to_ours": {n: sum(a == b for a, b in zip(outputs["ours"], outputs[n], strict=True)) for n in ways},
    }  # fmt: skip
    (options.out / "peers.json").write_text(json.dumps(report, indent=2) + "\n")
    tell(report)
    return report


def decoded(decoder: Decoder) -> Way:
    return lambda prompt, count: decoder.generate(prompt, max_new_tokens=count).tokens


def here(drafter: BlockDrafter) -> dict[str, Way]:
    target = drafter.target
    return {
        "ours": decoded(Decoder(target)),
        "ours with the drafter": decoded(Decoder(target, BlockProposer(drafter, tree_nodes=0))),
        "ours with the drafter's trees": decoded(Decoder(target, BlockProposer(drafter, tree_nodes=None))),
        "ours with lookup": decoded(Decoder(target, LookupDrafter())),
    }


def generated(model: Any, **words: Any) -> Way:
    """transformers' `generate` with these arguments."""

    def write(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **words
            )
        return [int(t) for t in out[0, len(prompt) :]]

    return write


def in_transformers(model: Any, folders: dict[str, Path]) -> dict[str, Way]:
    from transformers import AutoModel

    assistant = AutoModel.from_pretrained(folders["transformers"], dtype=torch.float32).eval()
    return {
        "transformers": generated(model),
        "transformers with its DFlash assistant": generated(
            model, assistant_model=assistant, speculation_type="dflash"
        ),
        "transformers with a custom_generate export": generated(
            model, custom_generate=str(folders["custom_generate"]), trust_remote_code=True
        ),
        "transformers with lookup": generated(model, prompt_lookup_num_tokens=LOOKUP),
    }


def with_assistant(target: Target, model: Any, folder: Path) -> dict[str, Way]:
    """A small language model as the drafter, of as many tokens in each call here and there."""
    from transformers import AutoModelForCausalLM

    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assistant.generation_config.update(
        num_assistant_tokens=DRAFT_TOKENS,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    own = AutoregressiveDrafter(load_target(str(folder), "float32"), DRAFT_TOKENS)
    return {
        "ours with a small language model": decoded(Decoder(target, own)),
        "transformers with a small language model": generated(model, assistant_model=assistant),
    }


def in_package(target: Any, folders: dict[str, Path]) -> dict[str, Way]:
    """The dflash package's own loop; nothing where it is not installed."""
    if not FORMATS["dflash"].installed():
        say("the package dflash is not installed")
        return {}
    module = importlib.import_module("dflash.model")
    model = stock_model(target)
    network = module.DFlashDraftModel.from_pretrained(folders["dflash"], dtype=torch.float32).eval()

    def way(size: int | None) -> Way:
        def write(prompt: list[int], count: int) -> list[int]:
            stops = sorted(target.eos_ids)
            with torch.no_grad():
                out = module.dflash_generate(
                    network, model, torch.tensor([prompt]), count, stops, block_size=size
                )
            return [int(t) for t in out[0, len(prompt) :]]

        return write

    return {"dflash": way(1), "dflash with the drafter": way(None)}


def in_vllm(options: argparse.Namespace, folder: Path, drafts: int, stack: ExitStack) -> dict[str, Way]:
    program, model = options.vllm / "bin" / "python", str(resolve_folder(options.target))
    settings: dict[str, dict[str, Any]] = {
        "vLLM": {},
        "vLLM with the drafter": {
            "method": "dflash",
            "model": str(folder.resolve()),
            "num_speculative_tokens": drafts,
        },
        "vLLM with lookup": {"method": "ngram", "num_speculative_tokens": LOOKUP, "prompt_lookup_max": 3},
    }
    ways: dict[str, Way] = {}
    for name, words in settings.items():
        more = ["--speculative-config", json.dumps(words)] if words else []
        log = options.out / f"{name.replace(' ', '_')}.log"
        server = stack.enter_context(
            serving(program, model, more, log, mended=words.get("method") == "dflash")
        )
        ways[name] = server.greedy
    return ways


def tell(report: dict[str, Any]) -> None:
    say(
        "| | tokens/s | over its own plain decoding [95%] | outputs as its own plain ones | as ours |\n|---|---|---|---|---|"
    )
    for name, speed in report["tokens_per_s"].items():
        up, count = speed["speed_up"], report["prompts"]
        said = (
            "1"
            if plain_of(name) == name
            else f"{up[0]:.2f}× [{up[1]:.2f}, {up[2]:.2f}]"
            if up
            else "one prompt: none"
        )
        same, ours = report["identical_to_own_plain"][name], report["identical_to_ours"][name]
        say(f"| {name} | {speed['tokens_per_s']:.1f} | {said} | {same}/{count} | {ours}/{count} |")


if __name__ == "__main__":
    main()
