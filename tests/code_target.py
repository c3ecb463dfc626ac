"""A target that somebody changed: SmolLM2, finetuned for some steps on the functions of the installed Python.

    python -m tests.code_target --out runs/smollm2_code

Each function of the standard library that has a docstring becomes one conversation: name, arguments and docstring in the user's turn,
the source in the assistant's. All weights are trained in fp32 with AdamW (products in bf16 where the processor multiplies it), the
loss counts the answer's tokens alone. Beside the model the folder gets `prompts.jsonl`: requests for functions that were held out,
for `data.prompts` of a recipe that calibrates a drafter to this target.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.common.errors import UserError, cli
from align.common.text import say
from align.target.dtypes import has_fast_bf16
from align.target.loading import resolve_folder
from align.target.names import DEFAULT_TARGET

HELD_OUT = 10
"""One function in so many is not trained on."""
LENGTH = 512


@cli
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default=DEFAULT_TARGET)
    add("--steps", type=int, default=30)
    add("--learning-rate", type=float, default=3e-4)
    add("--batch-size", type=int, default=2, help="functions a step")
    add("--prompts", type=int, default=1000, help="held-out requests to write")
    add("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.out.exists():
        raise UserError(f"--out={options.out}: is there already; name a new folder")
    finetune(options)


def finetune(options: argparse.Namespace) -> None:
    """Train and write the folder."""
    folder = resolve_folder(options.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pairs = sorted(set(functions()))
    random.Random(0).shuffle(pairs)
    held, trained = pairs[::HELD_OUT], [p for i, p in enumerate(pairs) if i % HELD_OUT]
    rows = [row for pair in trained if (row := conversation(tokenizer, *pair)) is not None]
    say(f"{len(rows)} functions to train on, {len(held)} held out")
    tokens = train(model, rows, options)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt, _ in held[: options.prompts]]
    (options.out / "prompts.jsonl").write_text("".join(lines))
    say(f"{options.out}: {options.steps} steps, {tokens} tokens of answers, {len(lines)} prompts")


def functions() -> Iterator[tuple[str, str]]:
    """Request and source of every documented function of the standard library that is short enough to be one answer."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
                text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if 4 <= text.count("\n") <= 40:
                    yield _request(node, said), f"```python\n{text}\n```"


def _request(node: ast.FunctionDef, said: str) -> str:
    first = " ".join(said.split("\n\n")[0].split())
    return f"Write the Python function `{node.name}({ast.unparse(node.args)})`. {first}"


def conversation(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], int] | None:
    """Token ids, and at which the answer begins; None where they are too many."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    before = tokenizer(asked, add_special_tokens=False).input_ids
    ids = before + tokenizer(answer, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    return (ids, len(before)) if len(ids) <= LENGTH else None


def train(model: Any, rows: list[tuple[list[int], int]], options: argparse.Namespace) -> int:
    """Answers' tokens seen: AdamW, the rate rising over five steps and falling to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    draw, tokens = random.Random(1), 0
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min((step + 1) / 5, 1 - step / options.steps)
        batch = draw.sample(rows, options.batch_size)
        longest = max(len(ids) for ids, _ in batch)
        ids_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        labels_BL = ids_BL.clone()
        for label_L, (ids, start) in zip(labels_BL, batch, strict=True):
            label_L[:start] = -100
            label_L[len(ids) :] = -100
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=has_fast_bf16(ids_BL.device)
        ):  # padding is to the right
            loss = model(input_ids=ids_BL, labels=labels_BL).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int((labels_BL >= 0).sum())
        if step % 5 == 0:
            say(f"step {step}, loss {loss.item():.3f}")
    return tokens


if __name__ == "__main__":
    main()
