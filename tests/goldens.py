"""What the commands compute, to the bit, before and after a refactor. Run it at both commits on one machine: kernels round by processor.

    python -m tests.goldens --out before.json                            # at the old commit
    python -m tests.goldens --out after.json --against before.json       # at the new one; exit code 1 where they differ

It records the files of a generated data folder, each drafter's losses and weights, each export's files, the tokens of every system over
six prompts (greedy and sampled), and the counts of `decode.verify`. `--real` adds the systems of the shipped pair.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specalign.common.text import say
from tests.forks import ONE_THREAD

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("block", "taps", "variable_prefix", "mdlm", "sedd", "autoregressive")
RECIPES = {kind: f"recipe=debug_{kind}" for kind in KINDS}
RECIPES["anchor_first"] = "recipe=debug_taps drafter.block_layout=anchor_first"
ROLES = {
    "block": "block", "variable_prefix": "variable_prefix", "diffusion": "mdlm", "autoregressive": "autoregressive",
}  # fmt: skip
FORMATS = {
    "block": "custom_generate", "taps": "dflash,speculators,custom_generate", "anchor_first": "dspark",
}  # fmt: skip
RECORDED = ("suite", "prompt", "method", "tokens", "accepted", "drafted", "nodes", "finish")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args(words)
    with TemporaryDirectory() as folder:
        found = dict(record(Path(folder), options.real))
    options.out.write_text(json.dumps(found, indent=1))
    if options.against is not None:
        different = compare(json.loads(options.against.read_text()), found)
        differ = f"{len(different)} of {len(found)} differ: {', '.join(different)}"
        say(differ if different else "all equal")
        raise SystemExit(bool(different))


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose values differ or are missing."""
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


def record(folder: Path, real: bool) -> Iterator[tuple[str, Any]]:
    """Name and value of each golden."""
    data = folder / "data"
    run("align.synthesize", f"recipe=debug_block output={folder}/written data.path={data}")
    yield "data", hash_files(data, ".safetensors")
    for kind, words in RECIPES.items():
        output = folder / kind
        run("align.train", f"{words} output={output} data.path={data} trainer.max_steps=6")
        yield f"{kind}: losses", read_losses(output / "metrics.csv")
        yield f"{kind}: weights", hash_files(output / "drafter", ".safetensors")
    for kind, formats in FORMATS.items():
        for name in formats.split(","):
            out = folder / f"{kind}-{name}"
            pair = f"--drafter {folder / kind}/drafter --format {name} --out {out}"
            run("decode.export", f"{pair} --no-check")
            yield f"{kind} as {name}", hash_files(out, ".safetensors", "config.json")
    drafters = ",".join(f"{role}={folder / kind}/drafter" for role, kind in ROLES.items())
    yield from decode(folder, "debug", f"--target debug --drafter {drafters}")
    if real:
        yield from decode(folder, "shipped", "")
    out, drafter = folder / "verdict", f"{folder}/block/drafter"
    run("decode.verify", f"--target debug --drafter {drafter} --suite builtin --out {out}")
    checks = json.loads((out / "verdict.json").read_text())["checks"]
    yield "verify", {check["check"]: check["counts"] for check in checks}


def decode(folder: Path, name: str, pair: str) -> Iterator[tuple[str, Any]]:
    """Tokens of every system over six prompts."""
    length = "--limit 6 --max-new-tokens 32 --dtype float32"
    for temperature in ("0", "1"):
        out = folder / f"{name}-{temperature}"
        sampling = f"--methods all --temperature {temperature}"
        run("decode.eval", f"--suite builtin {pair} {sampling} {length} --out {out}")
        found: dict[str, list[str]] = {}
        for row in map(json.loads, (out / "records.jsonl").read_text().splitlines()):
            kept = json.dumps({key: row[key] for key in RECORDED})
            found.setdefault(row["method"], []).append(kept)
        for method, rows in sorted(found.items()):
            yield f"{name}, temperature {temperature}: {method}", sorted(rows)


def run(module: str, words: str) -> None:
    """Run a command on one thread. Raises CalledProcessError."""
    say(f"{module} {words}"[:120])
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module} {words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def hash_files(folder: Path, *endings: str) -> dict[str, str]:
    """SHA-256 of each file with one of these endings."""
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(endings))
    hashes = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return dict(zip((str(path.relative_to(folder)) for path in files), hashes, strict=True))


def read_losses(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["train/loss"] for row in csv.DictReader(file) if row.get("train/loss")]


if __name__ == "__main__":
    main()
