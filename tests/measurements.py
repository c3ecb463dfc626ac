"""Measurements that several test files look at: records made by hand, a folder of them, small runs of `decode.eval`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode import eval
from decode.evaluation.records import Divergence, Record, Run, append, write_run
from decode.evaluation.summary import Summary
from specalign.common.terminal import PlainConsole


def record(
    method: str = "plain",
    prompt: str = "a",
    seconds: float = 1.0,
    committed: int = 10,
    calls: int = 10,
    accepted: Sequence[int] = (),
    drafted: Sequence[int] = (),
    **more: Any,
) -> Record:
    fields: dict[str, Any] = {
        "suite": "s", "prompt": prompt, "method": method, "repeat": 0, "category": "", "prompt_tokens": 5,
        "new_tokens": committed + 1, "committed": committed, "seconds": seconds, "prefill_seconds": 0.5,
        "tokens_per_s": committed / seconds, "calls": calls, "accepted": list(accepted),
        "drafted": list(drafted), "tau": committed / calls if calls else None, "finish": "length",
        "tokens": list(range(committed + 1)),
    }  # fmt: skip
    return Record(**{**fields, **more})


def page_data(text: str) -> dict[str, Any]:
    """The charts and replays in a page."""
    found = re.search(r'id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def quiet(tokens: int) -> list[str]:
    """Options of a small measurement of the debug target: so many new tokens, and nothing else beside."""
    own = ["--target", "debug", "--device", "cpu", "--dtype", "float32", "--no-hf-check"]
    return [*own, "--max-new-tokens", str(tokens)]


QUIET = quiet(12)


def run_eval(*arguments: Any) -> tuple[Summary, Path]:
    config = eval.read_config([*QUIET, *map(str, arguments)])
    return eval.evaluate(config, PlainConsole(quiet=True), "command")


def fill_report(
    folder: Path, gain: float = 2.0, temperature: float = 0.0, change: Divergence | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {
        "target": "t/<model>", "methods": ["plain", "lookup", "drafter"], "temperature": temperature,
        "max_new_tokens": 20, "dtype": "float32", "seed": 0, "repeats": 1, "warmup": 1, "threads": 2,
        "target_hash": "ab", "drafter_hash": "cd",
    }  # fmt: skip
    source = {"name": "s", "title": "Suite S", "group": "chat", "prompts": 6}
    sources = [{**source, "source": "the package s==1 (6 of 9)"}]
    write_run(folder, Run(settings, sources, machine={"cores": 2}, versions={"torch": "2"}))
    rows: list[Record] = []
    for i in range(6):
        same = None if temperature else True
        slow = 1.0 + 0.1 * i
        none, few = [0] * 20, [1, 1, *[0] * 16]
        plain = record("plain", f"p{i}", slow, 20, 20, none, none, identical=same, load=0.2)
        copied = slow * (1 + (-0.1) ** (i % 2))
        lookup = record("lookup", f"p{i}", copied, 20, 18, few, [1] * 18, identical=same)
        parts = {"draft_seconds": 0.2 * slow / gain, "verify_seconds": 0.7 * slow / gain}
        ten = (slow / gain, 20, 10, [1] * 10, [3] * 10)
        mine = record("drafter", f"p{i}", *ten, identical=same, **parts)
        if change is not None and i == 0:
            mine.identical, mine.divergence = False, change
        rows += [plain, lookup, mine]
    append(folder, rows)
    return folder
