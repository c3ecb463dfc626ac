"""Case N: a command, what is wrong with its input, and whether it took that as it should."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from align import synthesize, train
from align.common.text import printable, say
from align.config.parser import shipped
from align.config.recipe import keys
from decode import eval, generate, report, verify
from tests.fuzz.hostile import argument, changed_bytes, changed_gguf, copied, damage, text
from tests.target_models import write_gguf

QUICK = [
    "--target", "debug", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "4", "--threads", "1",
]  # fmt: skip
DATA = ["data.samples=12", "data.batch_size=6"]
STEPS = ["trainer.batch_size=1", "trainer.anchors=8", "trainer.warmup_steps=1", "trainer.validation_rows=1"]
PROMPTS = [
    {"prompt": "Say one one one.", "id": "a"},
    {"prompt": "Why is the sky blue?", "category": "why"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 2 3 1 2"}]},
]


class Corpus:
    """What commands read, whole: a trained run, a measurement, prompts, a recipe, a target in hub layout."""

    def __init__(self, folder: Path) -> None:
        self.whole, self.place = folder / "whole", folder / "place"
        self.place.mkdir(parents=True)
        self.whole.mkdir()
        os.chdir(self.place)
        words = ["recipe=debug_block", f"output={self.whole / 'run'}", *DATA]
        self.run(train.main, [*words, *STEPS, "trainer.max_steps=4", "trainer.checkpoint_every=2"])
        (self.whole / "prompts").mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in PROMPTS)
        (self.whole / "prompts/p.jsonl").write_text(lines)
        (self.whole / "prompts/p.json").write_text(json.dumps(PROMPTS[:2]))
        (self.whole / "prompts/p.csv").write_text("id,prompt\n1,Say one.\n2,Say two.\n")
        (self.whole / "prompts/p.txt").write_text("Say one.\nSay two.\n")
        base = yaml.safe_load((Path(__file__).parents[2] / "recipes/debug_block.yaml").read_text())
        (self.whole / "recipe").mkdir()
        (self.whole / "recipe/r.yaml").write_text(yaml.safe_dump(base))
        self.run(
            eval.main,
            [
                *QUICK,
                "--prompts",
                str(self.whole / "prompts/p.jsonl"),
                "--no-hf-check",
                "--out",
                str(self.whole / "measured"),
            ],
        )
        from align.target.loading import load_target

        target = load_target("debug", device="cpu")
        (self.whole / "gguf").mkdir()
        write_gguf(self.whole / "gguf/t.gguf", target)
        target.model.save_pretrained(str(self.whole / "target"))
        target.tokenizer.save_pretrained(str(self.whole / "target"))

    def run(self, main: Callable[[list[str]], object], words: Sequence[str]) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error of a command."""
        out, err = io.StringIO(), io.StringIO()
        code: int | None = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(words))
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            except BaseException:
                code = None
                err.write(traceback.format_exc())
        return code, out.getvalue(), err.getvalue()


def run(corpus: Corpus, seed: int, number: int, show: bool = False) -> str:
    """What is wrong with how a command took case `number`; nothing where it took it well."""
    r = random.Random(f"{seed} {number}")
    shutil.rmtree(corpus.place, ignore_errors=True)
    corpus.place.mkdir()
    os.chdir(corpus.place)
    Path("file").write_text("x")
    Path("folder").mkdir()
    main, words, what = r.choices(list(KINDS), list(KINDS.values()))[0](corpus, r)
    name = f"{main.__module__} {' '.join(map(repr, words))[:600]}{' · ' * bool(what)}{what}"
    if show:
        say(printable(name))
    code, out, err = corpus.run(main, words)
    if show:
        say(f"exit {code}\n--- stdout\n{printable(out)}\n--- stderr\n{printable(err)}")
    why = fault(code, out, err)
    return f"{why}: {printable(name)}" if why else ""


def fault(code: int | None, out: str, err: str) -> str:
    if code is None:
        return f"traceback ({' '.join(err.strip().splitlines()[-1:])[:300]})"
    if "Traceback (most recent call last)" in err:
        return "a traceback on standard error"
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if code == 2 and not re.search(r"(^|\n)error: [^\n]+\n\Z", err):
        return f"exit code 2 without one line ({err[-200:]!r})"
    raw = [c for c in out + err if printable(c) != c and c != "\r"]
    return f"control characters on the terminal: {raw[:5]}" if raw else ""


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


OPTIONS = [
    "--suite",
    "--prompts",
    "--data-dir",
    "--target",
    "--drafter",
    "--methods",
    "--sweep",
    "--tune",
    "--draft-tokens",
    "--tree-nodes",
    "--drafter-tokenizer",
    "--steps",
    "--order",
    "--verifier",
    "--limit",
    "--max-new-tokens",
    "--temperature",
    "--top-p",
    "--top-k",
    "--seed",
    "--repeats",
    "--warmup",
    "--dtype",
    "--device",
    "--threads",
    "--out",
]
GENERATE = [
    "--target",
    "--drafter",
    "--method",
    "--verifier",
    "--draft-tokens",
    "--tree-nodes",
    "--drafter-tokenizer",
    "--steps",
    "--order",
    "--max-new-tokens",
    "--temperature",
    "--top-p",
    "--top-k",
    "--repetition-penalty",
    "--min-p",
    "--presence-penalty",
    "--ban",
    "--min-new-tokens",
    "--seed",
    "--stop",
    "--system",
    "--dtype",
    "--device",
]
VERIFY = [
    "--target",
    "--drafter",
    "--methods",
    "--drafter-tokenizer",
    "--suite",
    "--prompts",
    "--data-dir",
    "--device",
    "--out",
]


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
    return eval.main, words + hostile_options(OPTIONS, r), ""


def generate_options(corpus: Corpus, r: random.Random) -> Case:
    words = [*QUICK[:-2], "--drafter", "lookup", *hostile_options(GENERATE, r)]
    return generate.main, [*words, argument(r) if r.random() < 0.5 else "Say one."], ""


def verify_options(corpus: Corpus, r: random.Random) -> Case:
    return verify.main, ["--target", "nowhere", *hostile_options(VERIFY, r)], ""


def hostile_options(names: Sequence[str], r: random.Random) -> list[str]:
    found = []
    for _ in range(r.choice((1, 1, 2))):
        name, value = r.choice(names), argument(r)
        found += [f"{name}={value}"] if r.random() < 0.7 else [name, value]
    return found


def damaged(corpus: Corpus, r: random.Random, name: str, choose: Callable[[Path], bool]) -> tuple[Path, str]:
    folder = copied(corpus.whole / name, Path(name))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and choose(p))
    path = r.choice(files)
    return folder, f"{path}: {damage(path, r)}"


def report_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "measured", lambda p: p.name in ("run.json", "records.jsonl"))
    return report.main, [str(folder), *(["--markdown"] if r.random() < 0.3 else [])], what


def continued_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "measured", lambda p: p.name in ("run.json", "records.jsonl"))
    words = [
        *QUICK,
        "--prompts",
        str(corpus.whole / "prompts/p.jsonl"),
        "--no-hf-check",
        "--out",
        str(folder),
    ]
    return eval.main, words, what


def prompts_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "prompts", lambda p: True)
    path = (
        r.choice(sorted(folder.iterdir()))
        if r.random() < 0.1
        else folder / what.split(":")[0].rpartition("/")[2]
    )
    if r.random() < 0.5:
        words = [*QUICK, "--methods", "lookup", "--no-hf-check", "--out", "out", "--prompts", str(path)]
        return eval.main, words, what
    words = [
        "recipe=debug_block",
        "output=out",
        f"data.prompts={path}",
        "data.samples=2",
        "data.max_answer_tokens=4",
    ]
    return synthesize.main, words, what


def data_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "run", lambda p: p.parent.name == "data")
    words = ["recipe=debug_block", f"output={folder}", *DATA]
    if r.random() < 0.5:
        return synthesize.main, words, what
    small = [*STEPS, "trainer.max_steps=1", "trainer.resume=never"]
    return train.main, [*words, *small, f"data.path={folder}/data"], what


def checkpoint_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "run", lambda p: p.parent.name == "checkpoints")
    words = ["recipe=debug_block", f"output={folder}", *DATA]
    return train.main, [*words, *STEPS, "trainer.max_steps=5"], what


def drafter_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "run", lambda p: p.parent.name == "drafter")
    return generate.main, [*QUICK[:-2], "--drafter", f"{folder}/drafter", "Say one."], what


def target_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "target", lambda p: True)
    words = ["--target", str(folder), *QUICK[2:-2], "--drafter", "lookup", "Say one."]
    return generate.main, words, what


def gguf_file(corpus: Corpus, r: random.Random) -> Case:
    os.environ["SPECALIGN_CACHE"] = str(Path("cache").absolute())
    path = copied(corpus.whole / "gguf", Path("gguf")) / "t.gguf"
    if r.random() < 0.8:
        raw, what = changed_gguf(path.read_bytes(), r)
        path.write_bytes(raw)
    else:
        what = damage(path, r)
    words = ["--target", str(path), *QUICK[2:-2], "--drafter", "lookup", "Say one."]
    return generate.main, words, f"{path}: {what}"


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


KINDS: dict[Callable[[Corpus, random.Random], Case], float] = {
    recipe_words: 30, recipe_file: 12, eval_options: 12, generate_options: 10, verify_options: 6, report_file: 14, continued_file: 4,
    prompts_file: 8, data_file: 3, checkpoint_file: 2, drafter_file: 3, target_file: 4, gguf_file: 6, prompt: 5,
}  # fmt: skip
