"""What hostile cases begin with: whole files of every kind that commands read, and a way to call a command."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import yaml

from align import features, train
from decode import compare, eval, export
from tests.published_blocks import (
    backbone,
    dflash_config,
    dspark_config,
    markov_tensors,
    pruned,
    speculators_config,
    write,
)
from tests.target_models import write_gguf

QUICK = [
    "--target", "debug", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "4", "--threads", "1",
]  # fmt: skip
DATA = ["data.samples=12", "data.batch_size=6"]
COMPARED = ["--engine", "transformers", "--limit", "1", "--max-new-tokens", "2"]
STEPS = ["trainer.batch_size=1", "trainer.anchors=8", "trainer.warmup_steps=1", "trainer.validation_rows=1"]
_RECIPES = Path(__file__).parents[2] / "recipes"
TWINS = [
    *(str(_RECIPES / f"compare/debug_{name}.yaml") for name in ("ours", "dflash")), "target.device=cpu", "target.dtype=float32",
    "--limit", "2", "--max-new-tokens", "4", "--device", "cpu", "--out", "out",
]  # fmt: skip
PROMPTS = [
    {"prompt": "Say one one one.", "id": "a"},
    {"prompt": "Why is the sky blue?", "category": "why"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 2 3 1 2"}]},
]


_subprocess_run = subprocess.run


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
        rows = [{"prompt": "Say one."}, {"prompt": "Say two."}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.whole / "prompts/p.parquet")
        packed(self.whole / "prompts")
        (self.whole / "texts").mkdir()
        rows = [{"text": f"Text {i} is about the moon and the tides of {i} seas. " * 3} for i in range(4)]
        (self.whole / "texts/t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.whole / "texts/t.json").write_text(json.dumps(rows))
        (self.whole / "texts/t.csv").write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.whole / "texts/t.parquet")
        for suffix in ("txt", "md", "html", "py"):
            (self.whole / f"texts/t.{suffix}").write_text("# A text\n" + rows[0]["text"])
        packed(self.whole / "texts")
        base = yaml.safe_load((_RECIPES / "debug_block.yaml").read_text())
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
        target = self.target
        (self.whole / "gguf").mkdir()
        write_gguf(self.whole / "gguf/t.gguf", target)
        target.model.save_pretrained(str(self.whole / "target"))
        target.tokenizer.save_pretrained(str(self.whole / "target"))

    @functools.cached_property
    def target(self) -> Any:
        from align.target.loading import load_target

        return load_target("debug", device="cpu")

    @functools.cached_property
    def drafters(self) -> Path:
        """A folder with one trained drafter of each kind, made when it is first asked for."""
        folder = self.whole / "drafters"
        folder.mkdir()
        words = [*DATA, *STEPS, "trainer.max_steps=1", f"data.path={self.whole / 'run/data'}"]
        for name in ("sedd", "mdlm", "autoregressive", "taps", "confidence"):
            output = self.whole / "trained" / name
            self.run(train.main, [f"recipe=debug_{name}", f"output={output}", *words])
            (output / "drafter").rename(folder / name)
        return folder

    @functools.cached_property
    def published(self) -> Path:
        """A folder with block drafters as other engines publish them, one of each layout."""
        folder, target = self.whole / "published", self.target
        write(folder / "dflash", dflash_config(target), backbone(target))
        tensors = backbone(target) | markov_tensors(target, "gated", 4, target.vocab_size)
        write(folder / "dspark", dspark_config(target, "gated", 4), tensors)
        write(folder / "speculators", speculators_config(target), backbone(target) | pruned(target))
        return folder

    @functools.cached_property
    def exports(self) -> Path:
        """A folder with one export of each format that has a reader in this process."""
        folder = self.whole / "exports"
        names = "dflash,transformers,speculators,custom_generate"
        words = ["--format", names, "--no-check", "--dtype", "float32", "--out", str(folder)]
        self.run(export.main, [*self.taps, *words])
        return folder

    @property
    def taps(self) -> list[str]:
        """Words that name a drafter which other engines' formats hold."""
        return ["--drafter", str(self.drafters / "taps"), "--target", "debug", "--device", "cpu"]

    @functools.cached_property
    def compared(self) -> Path:
        """A folder in which two recipes were compared."""
        folder = self.whole / "compared"
        folder.mkdir()
        os.chdir(folder)
        self.run(compare.main, TWINS)
        os.chdir(self.place)
        return folder

    @functools.cached_property
    def features(self) -> Path:
        """A run's folder with stored outputs of the target."""
        folder = self.whole / "stored"
        self.run(features.main, self.stores(folder))
        return folder

    def stores(self, folder: Path) -> list[str]:
        """Words of a recipe that stores such outputs in the run's folder."""
        text = ["recipe=debug_block", f"output={folder}", *DATA, f"data.path={self.whole / 'run/data'}"]
        return [*text, *STEPS, "trainer.max_steps=2", "trainer.features_gb=0.1"]

    def run(self, main: Callable[[list[str]], object], words: Sequence[str]) -> tuple[int | None, str, str]:
        """Exit code, standard output and standard error of a command."""
        out, err = io.StringIO(), io.StringIO()
        code: int | None = 0
        trials = mock.patch("align.sweeping.run.subprocess.run", self._trial)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), trials:
            try:
                main(list(words))
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            except BaseException:
                code = None
                err.write(traceback.format_exc())
        return code, out.getvalue(), err.getvalue()

    def _trial(self, command: Sequence[str], **named: Any) -> subprocess.CompletedProcess[Any]:
        """A sweep's trial in this process: a fresh one would take seconds to import torch."""
        if "align.train" not in command:
            return _subprocess_run(command, **named)
        code, out, err = self.run(train.main, command[3:])
        if code is None:
            raise RuntimeError(f"a trial ended in a traceback: {err}")
        if hasattr(named["stdout"], "write"):
            named["stdout"].write((out + err).encode("utf-8", "surrogateescape"))
        else:
            sys.stderr.write(err)
        return subprocess.CompletedProcess(list(command), code, out)


def packed(folder: Path) -> None:
    """Beside each file of text in a folder the same one as `.gz`."""
    for path in sorted(folder.iterdir()):
        if path.suffix != ".parquet":
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
