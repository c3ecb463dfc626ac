"""Commands that are disturbed: each takes seconds on the debug target, and writes into the folder that it is started in."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.kills.child import NOTHING, run

PROMPTS = [
    {"prompt": "Say one one one.", "id": "a", "category": "say"},
    {"prompt": "Why is the sky blue?", "id": "b"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 2 3 1 2"}]},
]
WHAT = ("one", "two", "three", "four", "a song", "your name", "nothing", "it all")
STEPS = (
    "trainer.checkpoint_every=2", "trainer.validate_every=4", "trainer.ema=0.9", "trainer.anchors=8", "trainer.max_steps=8",
    "trainer.validation_rows=2",
)  # fmt: skip
ANSWERS = (
    "recipe=debug_block", "output=out", "data.prompts={inputs}/texts.jsonl", "data.batch_size=4", "data.max_answer_tokens=12",
)  # fmt: skip
PAIR = (
    "--target", "debug", "--drafter", "{inputs}/block/out/drafter", "--prompts", "{inputs}/p.jsonl", "--device", "cpu", "--out", "out",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """`python -m module words`; `weight`: how often it is chosen."""

    name: str
    module: str
    words: tuple[str, ...]
    weight: float = 1.0


def training(recipe: str, *words: str, name: str = "") -> Scenario:
    """A recipe on data that are there."""
    own = (*ANSWERS[1:], "data.path={inputs}/block/out/data", *STEPS, *words)
    return Scenario(name or f"train {recipe}", "align.train", (f"recipe={recipe}", *own))


def measuring(name: str, *words: str) -> Scenario:
    own = (*PAIR, "--dtype", "float32", "--threads", "1", "--max-new-tokens", "6", *words)
    return Scenario(name, "decode.eval", own)


BLOCK = Scenario("train with data", "align.train", (*ANSWERS, *STEPS), 2.0)
SCENARIOS = (
    Scenario("synthesize", "align.synthesize", ("recipe=debug_block", "output=out", "data.batch_size=8", "data.samples=10")),
    Scenario("synthesize answers", "align.synthesize", ANSWERS, 2.0),
    BLOCK,
    training("debug_block", "trainer.logger=[csv,tensorboard]", name="train with TensorBoard"),
    training("debug_block", "trainer.keep_checkpoints=1", "trainer.accumulate=2", name="train, one checkpoint kept"),
    training("debug_sedd", "drafter.dropout=0.2"),
    training("debug_mdlm"),
    training("debug_autoregressive"),
    training("debug_variable_prefix"),
    training("debug_confidence"),
    training("debug_adapt"),
    measuring("eval greedy", "--methods", "lookup,drafter", "--repeats", "2"),
    measuring("eval sampled", "--no-hf-check", "--temperature", "1", "--tree-nodes", "0"),
    Scenario(
        "verify",
        "decode.verify",
        (*PAIR, "--methods", "lookup", "--limit", "1", "--max-new-tokens", "4", "--samples", "12"),
        0.5,
    ),
)  # fmt: skip


def inputs(folder: Path) -> None:
    """What scenarios read: prompts, and a finished run of the debug block drafter with its data."""
    folder.mkdir()
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    texts = [f"{verb} {what}." for verb in ("Tell me", "Say", "Write") for what in WHAT]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (folder / "block").mkdir()
    tmp = folder / "tmp"
    done = run(BLOCK.module, filled(BLOCK, folder), folder / "block", tmp, tmp, NOTHING)
    if done.code:
        raise RuntimeError(f"the undisturbed run failed: {done.err}")
    shutil.rmtree(tmp)


def filled(scenario: Scenario, folder: Path) -> list[str]:
    """The words with the inputs' folder in them."""
    return [word.replace("{inputs}", str(folder)) for word in scenario.words]
