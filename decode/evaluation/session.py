"""A measurement: its folder is created or continued, the missing tasks run, the report is made."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from decode.engine.decoder import Decoder
from decode.evaluation import runner
from decode.evaluation.baseline import time_against_transformers
from decode.evaluation.config import EvalConfig
from decode.evaluation.folder import (
    TokenizedSuite,
    choose_date,
    describe_settings,
    name_folder,
    open_folder,
)
from decode.evaluation.plan import EvalPlan
from decode.evaluation.progress import TaskProgress
from decode.evaluation.records import Record, Run, add, write_run
from decode.evaluation.render import make_report
from decode.evaluation.summary import Summary
from decode.evaluation.tokenized import tokenize_prompts
from decode.systems.registry import PLAIN
from specalign.common.claims import Claim
from specalign.common.errors import UserError
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.common.terminal import PlainConsole
from specalign.common.text import plural
from specalign.suites.sources import Loaded


@dataclass
class Measurement:
    """A measurement's folder and what it holds so far. Made by `begin`."""

    config: EvalConfig
    folder: Path
    run: Run
    records: list[Record]
    tasks: list[runner.Task]
    decoders: dict[str, Decoder]
    console: PlainConsole
    claim: Claim

    @property
    def settings(self) -> runner.GenerationSettings:
        return runner.GenerationSettings(self.config.sampling, self.config.max_new_tokens)

    def finish(self) -> tuple[Summary, Path]:
        """Run the missing tasks. Returns the summary and its folder, which is free for other
        processes afterwards."""
        with self.claim:
            self._run_missing()
            return make_report(self.folder)[0], self.folder

    def _run_missing(self) -> None:
        missing = list(runner.missing_tasks(self.tasks, self.records))
        done = len(self.tasks) - len(missing)
        if self.records:
            note = "" if missing else " (--no-resume measures again)"
            self.console.say(
                f"continuing {self.folder}: {done} of {len(self.tasks)} rounds are there{note}"
            )
        if not missing:
            return
        self._warm_up(missing[0])
        progress = TaskProgress(self.console, len(self.tasks), done)
        for task in missing:
            progress.finish_task(self.run_task(task))

    def run_task(self, task: runner.Task) -> list[Record]:
        """Run a task and write its records, replacing those that an interrupted run left of it."""
        records = runner.run_task(self.decoders, task, self.settings)
        self.records = add(self.folder, self.records, records)
        return records

    def _warm_up(self, task: runner.Task) -> None:
        """Untimed rounds, and once per folder the time of transformers' own `generate`."""
        tokens = list(task.tokens)
        runner.warm_up(self.decoders, tokens, self.settings, self.config.warmup)
        if not self.config.no_hf_check and self.run.baseline is None:
            self.console.say("timing plain decoding against transformers' own generate …")
            limit = min(self.settings.max_new_tokens, 64)
            self.run.baseline = time_against_transformers(self.decoders[PLAIN], tokens, limit)
            write_run(self.folder, self.run)


def begin(
    config: EvalConfig,
    plan: EvalPlan,
    decoders: dict[str, Decoder],
    suites: Sequence[Loaded],
    skipped: Sequence[str],
    console: PlainConsole,
    command: str,
) -> Measurement:
    """A measurement in the folder `config.out`, or in one named after the settings.

    Args:
        decoders: by method, plain decoding among them.
        skipped: a line for everything that was left out so far.

    Raises:
        UserError: no prompt fits, or the folder holds a measurement under other settings.
    """
    target = decoders[PLAIN].target
    if target.reads_clock:
        for decoder in decoders.values():
            decoder.target.fix_date(choose_date(config))
    tokenized, refused = _tokenize(decoders[PLAIN], suites)
    for line in refused:
        console.say(f"left out: {line}", wrap=False)
    skipped = [*skipped, *refused]
    if not any(pairs for _, pairs in tokenized):
        raise UserError(f"no prompt can be answered: {skipped[0]}")
    settings = describe_settings(
        config, plan, target, list(decoders), tokenized, torch.get_num_threads()
    )
    folder = config.out or Path("runs/eval") / name_folder(suites, settings)
    run = Run(
        settings=settings,
        suites=[
            {
                "name": s.name,
                "title": s.title,
                "group": s.group,
                "prompts": len(pairs),
                "source": s.source,
            }
            for s, pairs in tokenized
        ],
        command=command,
        machine=machine(),
        versions=decoding_versions(),
        git_commit=git_commit(),
        skipped=skipped,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    claim = Claim(folder, "--out")
    run, records = open_folder(folder, run, not config.resume)
    named = [(suite.name, pairs) for suite, pairs in tokenized]
    tasks = runner.plan_tasks(named, list(decoders), config.repeats, config.sampling.fixed_seed)
    return Measurement(config, folder, run, records, tasks, decoders, console, claim)


def _tokenize(plain: Decoder, suites: Sequence[Loaded]) -> tuple[list[TokenizedSuite], list[str]]:
    """The suites with their prompts' tokens, and a line for each suite with prompts that the target
    can't take."""
    tokenized: list[TokenizedSuite] = []
    lines = []
    for suite in suites:
        pairs, refused = tokenize_prompts(plain.target, suite.prompts)
        tokenized.append((suite, pairs))
        if refused:
            count = f"{len(refused)} of {plural(len(suite.prompts), 'prompt')}"
            lines.append(
                f"{suite.name}: {count}, which this target can't take; the first is {refused[0]}"
            )
    return tokenized, lines
