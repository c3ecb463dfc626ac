"""Cases of words: recipes' keys and commands' options with values that they do not expect, and prompts."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from align import plan, sweep, synthesize, train
from align.config.parser import shipped
from align.config.recipe import keys
from decode import advise, compare, eval, export, generate, parity, verify
from tests.fuzz.corpus import COMPARED, QUICK, TWINS, Corpus
from tests.fuzz.hostile import argument, changed_bytes, changed_json, copied, text

Case = tuple[Callable[[list[str]], object], list[str], str]


def recipe_words(corpus: Corpus, r: random.Random) -> Case:
    """Keys with values that they do not expect; some of what passes is run."""
    words = [f"recipe={'debug_block' if r.random() < 0.7 else r.choice([*shipped(), argument(r)])}"]
    for _ in range(r.choice((1, 1, 2, 4))):
        key = r.choice(list(keys())) if r.random() < 0.95 else argument(r)
        words.append(f"{'--' * (r.random() < 0.1)}{key}={argument(r)}")
    if r.random() < 0.1:
        words.append(argument(r))
    if not any(w.startswith("output=") for w in words):
        words.append("output=out")
    heavy = ("target.name=", "trainer.max_steps", "data.samples", "drafter.kind", "stage=", "launch")
    if words[0] != "recipe=debug_block" or r.random() < 0.7 or any(w.startswith(heavy) for w in words):
        words.append("--print")
    elif not any(w.startswith(("data.path", "trainer.max_steps")) for w in words):
        words += [
            f"data.path={corpus.whole / 'run/data'}",
            "trainer.max_steps=1",
            "trainer.validation_rows=1",
        ]
    return (
        r.choice((train.main, train.main, synthesize.main)) if "--print" in words else train.main,
        words,
        "",
    )


def recipe_file(corpus: Corpus, r: random.Random) -> Case:
    path = copied(corpus.whole / "recipe", Path("recipe")) / "r.yaml"
    path.write_bytes(changed_bytes(path.read_bytes(), r))
    return train.main, [f"recipe={path}", "--print"], "bytes of the recipe changed"


def options_of(parser: Callable[[], argparse.ArgumentParser]) -> list[str]:
    """All of a command's options."""
    return [name for name in re.findall(r"--[a-z][a-z-]+", parser().format_usage()) if name != "--help"]


OPTIONS = {
    command: options_of(command.parser)
    for command in (advise, compare, eval, export, generate, parity, plan, sweep, verify)
}


def eval_options(corpus: Corpus, r: random.Random) -> Case:
    words = [
        *QUICK,
        "--prompts",
        str(corpus.whole / "prompts/p.txt"),
        "--methods",
        "lookup",
        "--no-hf-check",
        "--out",
        "out",
    ]
    return eval.main, words + hostile_options(eval, r), ""


def generate_options(corpus: Corpus, r: random.Random) -> Case:
    words = [*QUICK[:-2], "--drafter", "lookup", *hostile_options(generate, r)]
    return generate.main, [*words, argument(r) if r.random() < 0.5 else "Say one."], ""


def verify_options(corpus: Corpus, r: random.Random) -> Case:
    return verify.main, ["--target", "nowhere", *hostile_options(verify, r)], ""


def hostile_options(command: ModuleType, r: random.Random) -> list[str]:
    found = []
    for _ in range(r.choice((1, 1, 2))):
        name, value = r.choice(OPTIONS[command]), argument(r)
        found += [f"{name}={value}"] if r.random() < 0.7 else [name, value]
    return found


def prompt(corpus: Corpus, r: random.Random) -> Case:
    """A hostile prompt, from the command line or in a file beside others."""
    if r.random() < 0.5:
        return generate.main, [*QUICK[:-2], "--drafter", r.choice(("lookup", "none")), argument(r)], ""
    rows = [
        {r.choice(("prompt", "id", "category", "text")): text(r) for _ in range(3)} | {"prompt": text(r)}
        for _ in range(2)
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *QUICK,
        "--methods",
        "lookup",
        "--no-hf-check",
        "--out",
        r.choice(("out", "[/b]", "$5_vs_$10")),
        "--prompts",
        "p.jsonl",
    ]
    return eval.main, words, json.dumps(rows)[:300]


def advise_options(corpus: Corpus, r: random.Random) -> Case:
    words = [
        *QUICK[:-4],
        "--drafter",
        "lookup",
        "--limit",
        "2",
        "--max-new-tokens",
        "4",
        "--temperatures",
        "0",
        "--trees",
        "0",
    ]
    words += ["--most-batch", "1", "--long", "64", "--out", "out"]
    return advise.main, words + hostile_options(advise, r), ""


def export_options(corpus: Corpus, r: random.Random) -> Case:
    words = [*corpus.taps, "--format", "dflash", "--no-check", "--out", "out"]
    return export.main, words + hostile_options(export, r), ""


def parity_options(corpus: Corpus, r: random.Random) -> Case:
    return parity.main, [*corpus.taps, *COMPARED, *hostile_options(parity, r)], ""


def compare_options(corpus: Corpus, r: random.Random) -> Case:
    """Options or keys of two recipes that are trained and measured already."""
    os.chdir(copied(corpus.compared, Path("compared")))
    if r.random() < 0.7:
        return compare.main, TWINS + hostile_options(compare, r), ""
    return compare.main, [*TWINS, f"{r.choice(list(keys()))}={argument(r)}"], ""


def plan_words(corpus: Corpus, r: random.Random) -> Case:
    """A recipe's keys with hostile values, planned for a device that is named, or not."""
    words = ["recipe=debug_block", "--no-pilot", f"{r.choice(list(keys()))}={argument(r)}"]
    words += hostile_options(plan, r) if r.random() < 0.6 else []
    return plan.main, words, ""


SWEPT = {
    "method": "grid",
    "metric": {"name": "validation/tau_greedy", "goal": "maximize"},
    "parameters": {
        "objective.weighting": {"values": ["d_pace", "uniform"]},
        "trainer.learning_rate": {"min": 0.0004, "max": 0.0008},
        "seed": {"values": [0, 1]},
    },
    "command": ["${env}", "python", "-m", "align.train", "recipe=debug_block", "${args_no_hyphens}"],
    "run_cap": 1,
}


def sweep_file(corpus: Corpus, r: random.Random) -> Case:
    """A sweep whose file is changed, or whose options are hostile."""
    value = SWEPT
    for _ in range(r.choice((0, 1, 1, 2))):
        value = changed_json(value, r)
    raw = json.dumps(value).encode("utf-8", "surrogatepass")
    Path("s.yaml").write_bytes(changed_bytes(raw, r) if r.random() < 0.2 else raw)
    few = [
        f"data.path={corpus.whole / 'run/data'}",
        "trainer.max_steps=1",
        "trainer.validation_rows=1",
        "trainer.anchors=8",
        "trainer.warmup_steps=0",
    ]
    words = [
        "s.yaml",
        "--count",
        "1",
        "--method",
        "random",
        "--out",
        "out",
        *(hostile_options(sweep, r) if r.random() < 0.4 else []),
    ]
    return sweep.main, [*words, *few], raw.decode(errors="replace")[:500]
