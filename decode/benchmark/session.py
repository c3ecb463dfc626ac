"""A measurement under way: its folder begun or continued, the missing rounds run, the report made."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from align.common.errors import UserError
from align.common.provenance import decoding_versions, git_commit, machine
from decode.benchmark import runner as measure
from decode.benchmark.baseline import against_transformers
from decode.benchmark.folder import folder_name, open_folder, settings_of
from decode.benchmark.progress import RaceProgress, TaskProgress
from decode.benchmark.tuning import changed, race
from decode.method_names import PLAIN
from decode.reporting.records import Record, Run, append, write_run
from decode.reporting.render import make_report
from decode.reporting.summary import plural
from decode.suites.sources import Loaded
from decode.suites.tokenized import tokenize_prompts

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder
    from decode.speculation.sampling import Sampling


@dataclass
class Measurement:
    """A folder with what it holds so far (`begin`)."""

    folder: Path
    run: Run
    records: list[Record]
    tasks: list[measure.Task]
    decoders: dict[str, Decoder]
    settings: measure.Settings
    options: Any
    """`warmup` and `no_hf_check` are read."""
    console: Console

    def finish(self) -> tuple[dict[str, Any], Path]:
        """Run what is missing; the summary, and the folder that holds it."""
        missing = list(measure.remaining(self.tasks, self.records))
        if self.records:
            note = f"continuing {self.folder}: {len(self.tasks) - len(missing)} of {len(self.tasks)} rounds are there"
            self._say(note + ("" if missing else " (--no-resume measures again)"))
        if missing:
            self._warm_up(missing[0])
            done = len(self.tasks) - len(missing)
            with TaskProgress(self.console, len(self.tasks), list(self.decoders), done) as progress:
                for task in missing:
                    progress.done(self._run(task, partial(progress.step, task.prompt.id)))
        return make_report(self.folder)[0], self.folder

    def race(self, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Run the settings of every group against each other; the name of each group's fastest (decode/benchmark/tuning.py).

        Raises:
            UserError: no setting of a group can decode here.
            SystemExit: exit code 1, an output changed.
        """
        groups = self._able(groups)
        count = sum(map(len, groups.values()))
        what = f"{plural(count, 'setting')} of {plural(len(groups), 'method')}"
        self._say(f"tuning: {what} on {plural(len(self.tasks), 'prompt')}")
        progress = RaceProgress(self.console, len(self.tasks))

        def run(task: measure.Task) -> list[Record]:
            progress.begin()
            return self._run(task)

        def ended(left: int) -> None:
            progress.done(left)
            if wrong := changed(self.records):
                make_report(self.folder)
                self._say(
                    f"OUTPUT CHANGED beyond rounding by {', '.join(wrong)}: {self.folder / 'report.html'}"
                )
                raise SystemExit(1)

        won = race(groups, self.tasks, self.records, run, ended)
        make_report(self.folder)
        self._say(f"tuned: {', '.join(won.values())} ({self.folder / 'report.html'})")
        return won

    def _able(self, groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """The settings that can decode here, each warmed up; the others said. Those of a race that has begun took part in it.

        Raises:
            UserError: none of a group can: why the first one can't.
        """
        here = {record.method for record in self.records}
        if here:
            return {asked: [name for name in names if name in here] for asked, names in groups.items()}
        tokens, why = list(self.tasks[0].tokens), dict[str, UserError]()
        for name, decoder in self.decoders.items():
            try:
                measure.warm_up({name: decoder}, tokens, self.settings, max(1, self.options.warmup))
            except UserError as error:
                why[name] = error
        able = {asked: [name for name in names if name not in why] for asked, names in groups.items()}
        for asked, names in groups.items():
            if not able[asked]:
                raise why[names[0]]
        if why:
            self._say(f"not in the race, as the target or the settings don't allow it: {', '.join(why)}")
        return able

    def _run(self, task: measure.Task, ended: Any = lambda method: None) -> list[Record]:
        """One task, its records written when it is over."""
        records = measure.run_task(self.decoders, task, self.settings, ended)
        append(self.folder, records)
        self.records += records
        return records

    def _warm_up(self, task: measure.Task) -> None:
        """Untimed rounds, and plain decoding against transformers' own, once a folder."""
        tokens = list(task.tokens)
        measure.warm_up(self.decoders, tokens, self.settings, self.options.warmup)
        if not self.options.no_hf_check and self.run.baseline is None:
            self._say("timing plain decoding against transformers' own generate …")
            most = min(self.settings.max_new_tokens, 64)
            self.run.baseline = against_transformers(self.decoders[PLAIN], [tokens], most)
            write_run(self.folder, self.run)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)


def begin(
    options: Any,
    decoders: dict[str, Decoder],
    suites: Sequence[Loaded],
    skipped: Iterable[str],
    sampling: Sampling,
    drafters: dict[str, str],
    corpora: Sequence[str],
    console: Console,
    command: str,
) -> Measurement:
    """Plan it, and open its folder: `options.out`, or one named after the settings.

    Args:
        decoders: by method, plain decoding among them.
        skipped: a line for everything that was left out so far.
        drafters, corpora: folders by kind and files that a figure depends on.

    Raises:
        UserError: no prompt fits, or the folder holds a measurement under other settings.
    """
    prepared, skipped = [], list(skipped)
    for loaded in suites:
        pairs, refused = tokenize_prompts(decoders[PLAIN], loaded.prompts)
        if refused:
            skipped.append(f"{loaded.name}: {plural(len(refused), 'prompt')}, the first is {refused[0]}")
        prepared.append((loaded, pairs))
    if not any(pairs for _, pairs in prepared):
        raise UserError(f"no prompt can be answered: {skipped[0]}")
    settings = settings_of(options, decoders, drafters, prepared, corpora)
    folder = options.out or Path("runs/eval") / folder_name(suites, settings)
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
    run, records = open_folder(folder, run, not options.resume)
    tasks = measure.plan(
        [(s.name, pairs) for s, pairs in prepared], list(decoders), options.repeats, options.seed
    )
    return Measurement(
        folder,
        run,
        records,
        tasks,
        decoders,
        measure.Settings(sampling, options.max_new_tokens),
        options,
        console,
    )
