"""Is `align.plan` right? Five recipes are planned and then run, on this machine: memory and time, planned and measured.

python -m tests.plan_check --out runs/plan_check               # all five, a quarter of an hour on an idle machine
python -m tests.plan_check --out runs/plan_check --only 2      # one of them; its results lie beside the others'

Times are worth something on an idle machine alone. No test runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from align.common.text import say

SHORT = "data.samples=24 data.batch_size=24 data.max_prompt_tokens=48 data.max_answer_tokens=64 trainer.checkpoint_every=10 trainer.validate_every=10 trainer.validation_rows=2 trainer.warmup_steps=2 trainer.resume=never"
CASES = [
    ("debug block, K 3", "recipe=debug_block data.samples=100 trainer.max_steps=100"),
    ("block, K 6, 3 layers, context 384", f"recipe=smollm2_block {SHORT} drafter.block_size=6 drafter.layers=3 data.length=384 trainer.anchors=300 trainer.max_steps=24"),
    ("taps, fill-in, draft vocabulary 16k, context 640, 2 rows", f"recipe=smollm2_taps {SHORT} data.path=DATA drafter.draft_vocab=16384 data.length=640 trainer.batch_size=2 trainer.max_steps=10"),
    ("autoregressive, 3 layers, context 320, 2 rows", f"recipe=smollm2_autoregressive {SHORT} data.path=DATA drafter.target_layers=null drafter.layers=3 data.length=320 trainer.batch_size=2 trainer.validate_first=false trainer.max_steps=16"),
    ("masked LM, K 6, 2 layers, context 256", f"recipe=smollm2_mdlm {SHORT} data.batch_size=20 data.samples=20 data.max_answer_tokens=48 drafter.target_layers=null drafter.layers=2 drafter.block_size=6 data.length=256 trainer.anchors=32 trainer.validate_first=false trainer.max_steps=16"),
]  # fmt: skip


MODULES = {"plan": "align.plan", "writing": "align.synthesize", "training": "align.train"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.plan_check", description="Is align.plan right here?"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/plan_check"))
    parser.add_argument("--only", type=int, help="the number of a case, 1 to 5")
    parser.add_argument("--missing", action="store_true", help="what has no result yet")
    parser.add_argument("--stage", choices=MODULES, help="one command of it, in this order; default: all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number, (_, words) in enumerate(CASES, 1):
        if options.only in (None, number):
            path = options.out / f"{number}.json"
            there = json.loads(path.read_text()) if options.missing and path.is_file() else {}
            for stage in [options.stage] if options.stage else MODULES:
                if stage not in there:
                    measure(words, stage, options.out, number)
    say(table(options.out))


def measure(words: str, stage: str, out: Path, number: int) -> None:
    """Run one command of a case and write down what it took."""
    folder, path = out / str(number), out / f"{number}.json"
    keys = dict(word.split("=", 1) for word in words.split())  # a later value wins
    own = [f"{key}={text.replace('DATA', str(out / '2' / 'data'))}" for key, text in keys.items()]
    own += [f"output={folder}"]
    found: dict[str, Any] = {} if stage == "plan" else json.loads(path.read_text())
    if stage == "plan":
        shutil.rmtree(folder, ignore_errors=True)
        own += ["--json", str(folder.with_suffix(".plan"))]
    elif not found["plan"]["seconds"][stage]:
        return  # its text is there
    seconds, peak = run(MODULES[stage], own)
    found[stage] = {"seconds": seconds, "bytes": peak}
    if stage == "plan":
        plan = json.loads(folder.with_suffix(".plan").read_text())
        found["plan"] = {key: plan[key] for key in ("seconds", "memory_bytes")}
    path.write_text(json.dumps(found, indent=2) + "\n")


def run(module: str, words: list[str]) -> tuple[float, int]:
    """Seconds and peak memory of a command, which must end well."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{module} {' '.join(words)} ended with {process.returncode}")
    return time.monotonic() - start, usage.ru_maxrss * 1024


def table(folder: Path) -> str:
    """All results that are there, as Markdown."""
    lines = [
        "| run | stage | memory, MiB | planned | off by | seconds | planned | off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, (title, _) in enumerate(CASES, 1):
        path = folder / f"{number}.json"
        found = json.loads(path.read_text()) if path.is_file() else {}
        for stage in (s for s in ("writing", "training") if s in found):
            measured = found[stage]
            planned = {
                "seconds": found["plan"]["seconds"][stage],
                "bytes": found["plan"]["memory_bytes"][stage],
            }
            off = {key: planned[key] / measured[key] - 1 for key in measured}
            lines.append(
                f"| {title} | {stage} | {measured['bytes'] / 2**20:.0f} | {planned['bytes'] / 2**20:.0f} | {off['bytes']:+.0%} | "
                f"{measured['seconds']:.0f} | {planned['seconds']:.0f} | {off['seconds']:+.0%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
