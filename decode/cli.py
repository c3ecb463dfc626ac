"""Options that several commands share, and their values as typed objects."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from decode.speculation.settings import MOST_NODES, Sampling
from decode.systems.parsing import ENGINES
from decode.systems.registry import (
    ANY,
    LOSSY,
    ORDERS,
    SYSTEMS,
    VERIFIERS,
    DraftingSystem,
    GivenDrafter,
)
from specalign.common.commands import OptionParser
from specalign.common.commands import path as path
from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject
from specalign.folder.chat import merge_kwargs, read_kwargs
from specalign.suites.registry import prompts_of
from specalign.suites.sources import Loaded


class Parser(OptionParser):
    """`OptionParser` that suggests the nearest option, with the options that several commands
    share."""

    stray = ""
    """A hint for an argument that belongs to no option."""
    mixed = False
    """Whether positional arguments may follow options."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Raises UserError naming the first argument that no option takes."""
        words = sys.argv[1:] if args is None else args
        parse = self.parse_known_intermixed_args if self.mixed else self.parse_known_args
        parsed, unknown = parse(words, namespace)
        given = getattr(parsed, "template_kwargs", None)
        if isinstance(given, list):
            parsed.template_kwargs = merge_kwargs(given)
        if unknown:
            options = [
                o for action in self._actions for o in action.option_strings if o.startswith("--")
            ]
            is_option = unknown[0].startswith("-")
            hint = nearest(unknown[0].split("=")[0], options) if is_option else self.stray
            self.error(f"unrecognized argument {unknown[0]!r}{hint}")
        return parsed

    def add_target_options(self, dtype: bool = True) -> None:
        """The target and where it runs. `dtype`: whether its type is an option."""
        name = "hub id, folder, FILE.gguf or debug (default SmolLM2-135M-Instruct)"
        self.add_argument("--target", help=name)
        if dtype:
            self.add_argument("--dtype", default="auto", help="auto (default), fp32, bf16 or fp16")
        self.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
        trust = "allow models to run their own Python code (default: reject such models)"
        self.add_argument("--trust-remote-code", action="store_true", help=trust)

    def add_engine_option(self) -> None:
        engine = "eager, captured (rounds of fixed shapes; CUDA graphs), compiled (also by "
        engine += "torch.compile, on a GPU) or auto: captured on a GPU (default)"
        self.add_argument("--engine", choices=ENGINES, default="auto", help=engine)

    def add_chat_options(self) -> None:
        """How the target's chat template is called."""
        add = self.add_argument
        variable = "set a chat template variable, e.g. enable_thinking=false; can be repeated"
        system = "system prompt for conversations that have none"
        repeated: JsonObject = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
        add("--template-kwargs", type=template_kwargs, help=variable, **repeated)
        add("--system", metavar="TEXT", help=system)

    def add_prompt_options(self, suites: str) -> None:
        """Where the prompts come from. `suites`: the help of --suite."""
        formats = (
            "your own prompts: a folder, or .jsonl .json .csv .tsv .parquet .txt (also .gz, .zst)"
        )
        column = "the column of --prompts to read (default: the first known one)"
        copies = "folder with local copies of the suites, in the Hub's layout"
        self.add_argument("--suite", help=suites)
        self.add_argument("--prompts", type=path, metavar="FILE", help=formats)
        self.add_argument("--prompts-column", metavar="NAME", help=column)
        self.add_argument("--data-dir", type=path, metavar="DIR", help=copies)

    def add_sampling_options(self, seed: str, default_seed: int | None = 0) -> None:
        """How tokens are chosen. `seed`: the help of --seed."""
        mass = "keep the most probable tokens up to this total probability (default 1)"
        count = "keep only the N most probable tokens (default 0: all)"
        add, seeds = self.add_argument, parse_whole(0, 2**63 - 1)
        add("--temperature", type=number, default=0.0, metavar="T", help="0 = greedy (default)")
        add("--top-p", type=number, default=1.0, metavar="P", help=mass)
        add("--top-k", type=parse_whole(0), default=0, metavar="N", help=count)
        add("--seed", type=seeds, default=default_seed, metavar="N", help=seed)

    def add_drafting_options(self, title: str) -> None:
        """The options of `GivenDrafter`, except `copying`, as a group of that title in the help."""
        add = self.add_argument_group(title).add_argument
        nodes = "block drafters: size of the tree; 0 = a chain (default: 5 up to temperature 0.7)"
        verifiers = (
            f"auto (default), {', '.join(VERIFIERS)}; {LOSSY}_* change the output's distribution"
        )
        steps = "standalone drafters: forward passes per draft (default 1)"
        vocabulary = "standalone drafters: the tokenizer, if the vocabulary is not the target's"
        order = f"standalone drafters: unmasking order: {', '.join(ORDERS)} (default {ORDERS[0]})"
        most = "draft at most K tokens ahead"
        add("--draft-tokens", type=parse_whole(1, MOST_NODES), metavar="K", help=most)
        add("--tree-nodes", type=parse_whole(0, MOST_NODES), metavar="N", help=nodes)
        add("--verifier", default="auto", metavar="NAME", help=verifiers)
        add("--steps", type=parse_whole(1, MOST_NODES), default=1, metavar="N", help=steps)
        add("--order", default=ORDERS[0], metavar="NAME", help=order)
        add("--drafter-tokenizer", metavar="FOLDER", help=vocabulary)


def load_prompts(options: argparse.Namespace, report: Callable[[str], object]) -> list[Loaded]:
    """The prompts that a command's options name; `report` gets a line for each suite that is
    unavailable. Raises UserError as `prompts_of` does."""
    names = ("suite", "prompts", "data_dir", "limit", "prompts_column")
    suites, skipped = prompts_of(*(getattr(options, name) for name in names))
    for line in skipped:
        report(f"skipped: {line}")
    return suites


def target_options(options: object) -> JsonObject:
    """What a command's options say to `load_target`, besides the name."""
    names = ("dtype", "device", "trust_remote_code", "template_kwargs", "system")
    return {name: getattr(options, name) for name in names}


def pop_drafting(typed: JsonObject) -> GivenDrafter:
    """The drafting options of a parsed command line, removed from it. Raises UserError for a value
    out of range."""
    verifier = typed.pop("verifier")
    names = ("draft_tokens", "tree_nodes", "steps", "order")
    options = {name: typed.pop(name) for name in names}
    return GivenDrafter(verifier=None if verifier == "auto" else verifier, **options)


def pop_sampling(typed: JsonObject) -> Sampling:
    """The sampling options of a parsed command line, removed from it. Raises UserError for a value
    out of range."""
    return Sampling(**{f.name: typed.pop(f.name) for f in fields(Sampling) if f.name in typed})


def parse_whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {most}")
        return value

    return parse


def template_kwargs(text: str) -> JsonObject:
    """Variables of a chat template: `specalign.folder.chat.read_kwargs`."""
    try:
        return read_kwargs(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def list_systems() -> str:
    """Every system with its drafters and options, for `--help`."""
    lines = ["methods, each with its options after colons (specdiff:draft_tokens=16:steps=4):"]
    for system in SYSTEMS.values():
        kinds = ", ".join(kind for kind in system.needs if kind != ANY)
        needed = f" (needs {kinds})" if kinds else ""
        lines.append(f"  {system.name}: {' '.join((system.__doc__ or '').split())}{needed}")
        if issubclass(system, DraftingSystem):
            given = system().own_options.items()
            texts = [f"{key}={'' if value is None else str(value).lower()}" for key, value in given]
            lines.append(f"      {', '.join(texts)}")
    what = "where the text repeats itself, copy instead of drafting"
    lines.append(f"  all drafting methods: verifier=auto, copying=false (combined: true): {what}")
    return "\n".join(lines)
