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
SWEEP = """
method: grid
metric: {name: validation/tau_greedy, goal: maximize}
parameters: {objective.weighting: {values: [uniform, d_pace]}}
command: ["python", "-m", "align.train", "recipe=debug_block", "${args_no_hyphens}"]
"""
PAIR = (
    "--target", "debug", "--drafter", "{inputs}/block/out/drafter", "--prompts", "{inputs}/p.jsonl", "--device", "cpu", "--out", "out",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """`python -m module words`; `weight`: how often it is chosen. `stops`: whether a process that it starts may be killed in its place,
    which it takes for a stop."""

    name: str
    module: str
    words: tuple[str, ...]
    weight: float = 1.0
    stops: bool = False


def training(recipe: str, *words: str, name: str = "") -> Scenario:
    """A recipe on data that are there."""
    own = (*ANSWERS[1:], "data.path={inputs}/block/out/data", *STEPS, *words)
    return Scenario(name or f"train {recipe}", "align.train", (f"recipe={recipe}", *own))


def measuring(name: str, *words: str) -> Scenario:
    own = (*PAIR, "--dtype", "float32", "--threads", "1", "--max-new-tokens", "6", *words)
    return Scenario(name, "decode.eval", own)


def sweeping(name: str, weight: float) -> Scenario:
    own = (
        *STEPS,
        "trainer.max_steps=2",
        "trainer.warmup_steps=1",
        "data.path={inputs}/block/out/data",
        "--out",
        "out",
    )
    return Scenario(name, "align.sweep", ("{inputs}/s.yaml", *own), weight, stops=True)


TAPS = training("debug_taps")
EXPORT = (
    "--target",
    "debug",
    "--device",
    "cpu",
    "--drafter",
    "{inputs}/taps/out/drafter",
    "--limit",
    "1",
    "--max-new-tokens",
    "4",
)
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
    Scenario("synthesize by a server", "align.synthesize", (*ANSWERS, "data.writer=openai:{server}", "data.concurrency=3"), 2.0),
    Scenario("synthesize in two processes", "align.synthesize", (*ANSWERS, "launch.devices=2"), 0.2),
    Scenario("features", "align.features", (*TAPS.words, "trainer.features_gb=0.1"), 2.0),
    training("debug_block", "trainer.features_gb=0.1", name="train on features"),
    training("debug_adapt_taps", "drafter.init={inputs}/dflash", name="train another engine's drafter"),
    sweeping("sweep", 1.1),
    Scenario("plan", "align.plan", (*TAPS.words, "--json", "out/plan.json"), 0.4),
    Scenario("export", "decode.export", (*EXPORT, "--format", "dflash,transformers,speculators", "--out", "out"), 1.0),
    Scenario(
        "advise",
        "decode.advise",
        (*PAIR, "--dtype", "float32", "--limit", "2", "--max-new-tokens", "4", "--temperatures", "0", "--trees", "0", "--most-batch", "2",
         "--long", "64"),
        0.3,
    ),
    measuring("eval greedy", "--methods", "lookup,drafter", "--repeats", "2"),
    measuring("eval sampled", "--no-hf-check", "--temperature", "1", "--tree-nodes", "0"),
    Scenario(
        "verify",
        "decode.verify",
        (*PAIR, "--methods", "lookup", "--limit", "1", "--max-new-tokens", "4"),
        0.5,
    ),
)  # fmt: skip


def inputs(folder: Path) -> None:
    """What scenarios read: prompts, and a finished run of the debug block drafter with its data."""
    folder.mkdir()
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    texts = [f"{verb} {what}." for verb in ("Tell me", "Say", "Write") for what in WHAT]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (folder / "s.yaml").write_text(SWEEP)
    foreign = (*EXPORT, "--no-check", "--format", "dflash", "--out", "{inputs}/dflash")
    tmp = folder / "tmp"
    for name, each in ("block", BLOCK), ("taps", TAPS), ("other", Scenario("", "decode.export", foreign)):
        (folder / name).mkdir()
        done = run(each.module, filled(each, folder), folder / name, tmp, tmp, NOTHING)
        if done.code:
            raise RuntimeError(f"the undisturbed run failed: {done.err}")
    shutil.rmtree(tmp)


def filled(scenario: Scenario, folder: Path, server: str = "") -> list[str]:
    """The words with the inputs' folder and the server's address in them; a key that is given again counts as it is given last."""
    words = [word.replace("{inputs}", str(folder)).replace("{server}", server) for word in scenario.words]
    keys = [word.partition("=")[0] if not word.startswith("-") and "=" in word else "" for word in words]
    return [
        w for i, (w, key) in enumerate(zip(words, keys, strict=True)) if not key or key not in keys[i + 1 :]
    ]
