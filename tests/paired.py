"""Two checkouts of this project in one run, prompt by prompt in turn: are outputs the same to the token, and how fast is each?

    git worktree add ../before COMMIT && python -m tests.paired ../before
    python -m tests.paired ../before --target FOLDER --drafter FOLDER --limit 20 --max-new-tokens 128

Each checkout decodes in a process of its own, plainly and with its drafter, and the one that begins changes from prompt to prompt. The other
process sleeps meanwhile. Exit code 1 where tokens differ. Nothing else may run on the machine: a speed that is quoted wants an idle one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from decode.evaluation.statistics import paired_ratio
from specalign.common.errors import cli
from specalign.common.text import say
from specalign.lm.names import DEFAULT_TARGET
from specalign.suites.registry import prompts_of

HERE = Path(__file__).resolve().parents[1]
MARK = "answer:"
WORKER = """
import json, sys, time
import decode
target, drafter, new = json.loads(sys.argv[1])
ours = {"plain": decode.load(target, None, dtype="float32", device="cpu")}
if drafter:
    ours["drafted"] = decode.load(ours["plain"].target, drafter)
for line in sys.stdin:
    method, prompt = json.loads(line)
    out = ours[method].generate(prompt, max_new_tokens=new)
    tokens = list(map(int, out.tokens))
    print("answer:" + json.dumps([tokens, out.seconds / max(1, len(tokens) - 1)]), flush=True)
"""


class Checkout:
    """A process that decodes with the code of one folder."""

    def __init__(self, folder: Path, target: str, drafter: str, new: int) -> None:
        words = json.dumps([target, drafter, new])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, words], cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip

    def answer(self, method: str, prompt: Any) -> tuple[list[int], float]:
        """Tokens, and seconds a token after the first."""
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([method, prompt]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(MARK):
                tokens, seconds = json.loads(line.removeprefix(MARK))
                return tokens, seconds
        raise SystemExit("a checkout ended; its own line stands above")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.paired")
    parser.add_argument("other", type=Path)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--drafter", default=str(HERE / "pretrained/smollm2-135m-block"))
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    given = parser.parse_args(words)
    prompts = [
        p for suite in prompts_of(given.suite, None, None, given.limit)[0] for p in suite.prompts
    ]
    options = (given.target, given.drafter, given.max_new_tokens)
    both = {
        name: Checkout(folder, *options)
        for name, folder in (("other", given.other), ("here", HERE))
    }
    different = 0
    times: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for number, prompt in enumerate(prompts):
        for method in ("plain", "drafted") if given.drafter else ("plain",):
            found = {}
            for name in sorted(both, reverse=bool(number % 2)):
                found[name], seconds = both[name].answer(method, prompt.content)
                times.setdefault((name, method), {})["suite", prompt.id] = seconds
            if found["here"] != found["other"]:
                different += 1
                say(f"{prompt.id}, {method}: other tokens")
    for checkout in both.values():
        checkout.process.communicate()
    say(f"{len(prompts)} prompts, {different} outputs differ")
    for method in dict.fromkeys(method for _, method in times):
        ratio = paired_ratio(times["other", method], times["here", method])
        say(f"{method}: this checkout is {ratio} times as fast as the other one")
    return int(different > 0)


if __name__ == "__main__":
    cli(lambda: sys.exit(main(sys.argv[1:])))()
