"""A measurement: its folder is begun or continued, the missing rounds run, the report is made."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.common.claims import Claim
from align.common.errors import UserError
from align.common.provenance import decoding_versions, git_commit, machine
from align.common.terminal import PlainConsole
from decode.benchmark import runner
from decode.benchmark.baseline import against_transformers
from decode.benchmark.config import EvalConfig
from decode.benchmark.folder import date_of, folder_name, open_folder, settings_of
from decode.benchmark.plan import Plan
from decode.benchmark.progress import TaskProgress
from decode.method_names import PLAIN
from decode.reporting.records import Record, Run, add, write_run
from decode.reporting.render import make_report
from decode.reporting.summary import plural
from decode.suites.sources import Loaded
from decode.suites.tokenized import tokenize_prompts

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder


@dataclass
class Measurement:
    """A measurement's folder, and what it holds so far. Made by `begin`."""

    config: EvalConfig
    folder: Path
    run: Run
    records: list[Record]
    tasks: list[runner.Task]
    decoders: dict[str, Decoder]
    console: PlainConsole
    claim: Claim

    @property
    def settings(self) -> runner.Settings:
        return runner.Settings(self.config.sampling, self.config.max_new_tokens)

    def finish(self) -> tuple[dict[str, Any], Path]:
        """Run the missing rounds. Returns the summary and its folder, which other processes may write into from then on."""
        with self.claim:
            self._run_missing()
            return make_report(self.folder)[0], self.folder

    def _run_missing(self) -> None:
        missing = list(runner.remaining(self.tasks, self.records))
        if self.records:
            note = f"continuing {self.folder}: {len(self.tasks) - len(missing)} of {len(self.tasks)} rounds are there"
            self.console.say(note + ("" if missing else " (--no-resume measures again)"))
        if missing:
            self._warm_up(missing[0])
            done = len(self.tasks) - len(missing)
            with TaskProgress(self.console, len(self.tasks), list(self.decoders), done) as progress:
                for task in missing:
                    progress.done(self.run_task(task, partial(progress.step, task.prompt.id)))

    def run_task(self, task: runner.Task, ended: Any = lambda method: None) -> list[Record]:
        """Run one task and write its records; those that a kill or a full disk left of it before are replaced."""
        records = runner.run_task(self.decoders, task, self.settings, ended)
        self.records = add(self.folder, self.records, records)
        return records

    def _warm_up(self, task: runner.Task) -> None:
        """Untimed rounds, and once per folder the time of transformers' own `generate`."""
        tokens = list(task.tokens)
        runner.warm_up(self.decoders, tokens, self.settings, self.config.warmup)
        if not self.config.no_hf_check and self.run.baseline is None:
            self.console.say("timing plain decoding against transformers' own generate …")
            most = min(self.settings.max_new_tokens, 64)
            self.run.baseline = against_transformers(self.decoders[PLAIN], tokens, most)
            write_run(self.folder, self.run)


def begin(
    config: EvalConfig,
    plan: Plan,
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
    prepared, skipped = [], list(skipped)
    if decoders[PLAIN].target.reads_clock:
        for decoder in decoders.values():
            decoder.target.fix_date(date_of(config))
    for loaded in suites:
        pairs, refused = tokenize_prompts(decoders[PLAIN].target, loaded.prompts)
        if refused:
            skipped.append(
                f"{loaded.name}: {len(refused)} of {plural(len(loaded.prompts), 'prompt')}, which this target can't take; "
                f"the first is {refused[0]}"
            )
            console.say(f"left out: {skipped[-1]}", wrap=False)
        prepared.append((loaded, pairs))
    if not any(pairs for _, pairs in prepared):
        raise UserError(f"no prompt can be answered: {skipped[0]}")
    settings = settings_of(config, plan, decoders, prepared)
    folder = config.out or Path("runs/eval") / folder_name(suites, settings)
    run = Run(
        settings=settings,
        suites=[
            {"name": s.name, "title": s.title, "group": s.group, "prompts": len(pairs), "source": s.source}
            for s, pairs in prepared
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
    named = [(s.name, pairs) for s, pairs in prepared]
    tasks = runner.plan(named, list(decoders), config.repeats, config.seed)
    return Measurement(config, folder, run, records, tasks, decoders, console, claim)
