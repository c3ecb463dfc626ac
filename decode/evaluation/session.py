"""Runs a measurement: creates or resumes its folder, runs the missing tasks and writes the
report."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from decode.engine.decoder import Decoder
from decode.engine.stock import stock_model
from decode.evaluation import runner
from decode.evaluation.accuracy import CODE
from decode.evaluation.config import EvalConfig
from decode.evaluation.contamination import find_training
from decode.evaluation.page import make_report
from decode.evaluation.plan import EvalPlan
from decode.evaluation.records import (
    REPLAYS,
    RUN,
    Record,
    Run,
    add,
    open_folder,
    read_run,
    write_replays,
    write_run,
)
from decode.evaluation.replay import record_replay
from decode.evaluation.summary import Summary
from decode.evaluation.tokenized import TokenizedPrompts, continue_conversation, tokenize_suites
from decode.systems.registry import PLAIN, CorpusSystem
from specalign.common.checksums import folder_hash, hash_json
from specalign.common.claims import Claim
from specalign.common.errors import UserError
from specalign.common.files import expand_path, sha256_file
from specalign.common.hub import local_path
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.common.schema import JsonObject
from specalign.common.terminal import PlainConsole
from specalign.folder.chat import reads_clock
from specalign.lm.model import Target
from specalign.suites.sources import Loaded

MOST_REPLAYS = 4


def measure(
    config: EvalConfig,
    plan: EvalPlan,
    decoders: dict[str, Decoder],
    suites: Sequence[Loaded],
    skipped: Sequence[str],
    console: PlainConsole,
    command: str,
) -> tuple[Summary, list[Record], Path]:
    """Run the missing tasks of a measurement in the folder `config.out`, or in one named after the
    settings. Returns the summary, the records and the folder. `skipped`: a line for everything
    that was left out so far. Raises UserError: no prompt fits, or the folder holds a measurement
    under other settings."""
    target = decoders[PLAIN].target
    if reads_clock(target):
        for decoder in decoders.values():
            decoder.target.fix_date(choose_date(config))
    tokenized, refused = tokenize_suites(target, suites)
    few = [
        f"{name}: batch size {size} needs {size} prompts, not {len(prompts)}"
        for name, prompts in tokenized.items()
        for size in config.batch_sizes
        if 0 < len(prompts) < size
    ]
    if min(config.batch_sizes) > max(map(len, tokenized.values())):
        raise UserError(f"--batch-size: {few[0]}")
    refused += few
    for line in refused:
        console.say(f"skipped: {line}", wrap=False)
    settings = describe_settings(config, plan, target, list(decoders), tokenized)
    run = Run(
        settings=settings,
        suites=[_describe_suite(suite, tokenized[suite.name], config) for suite in suites],
        command=command,
        machine=machine(),
        versions=decoding_versions(),
        git_commit=git_commit(),
        skipped=[*skipped, *refused],
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    name = "-".join([*settings["suites"][:3], hash_json(settings)[:8]])
    folder = config.out or Path("runs/eval") / name
    with Claim(folder, "--out"):
        run, records = open_folder(folder, run, not config.resume)
        run.training = find_training(config, plan, decoders, tokenized, run.training)
        write_run(folder, run)
        seed = config.sampling.fixed_seed
        groups = [
            group
            for size in config.batch_sizes
            for group in runner.plan_tasks(tokenized, list(decoders), config.repeats, seed, size)
        ]
        settings_of = {suite.name: _settings_of(config, suite) for suite in suites}
        measurement = Measurement(config, folder, run, records, decoders, settings_of, console)
        measurement.run_missing(groups)
        measurement.record_replays(groups)
        return *make_report(folder), folder


def _describe_suite(suite: Loaded, prompts: TokenizedPrompts, config: EvalConfig) -> JsonObject:
    """A suite in run.json. `prompts`: with the later turns of conversations."""
    return {
        "name": suite.name,
        "title": suite.title,
        "group": suite.group,
        "source": suite.source,
        "prompts": sum(1 + len(prompt.later) for prompt, _ in prompts),
        "prompts_hash": hash_json([tokens for _, tokens in prompts]),
        "batch_sizes": [size for size in config.batch_sizes if size <= len(prompts)],
        "metric": suite.metric,
    }


def _settings_of(config: EvalConfig, suite: Loaded) -> runner.GenerationSettings:
    metric = suite.metric
    if metric == CODE and not config.execute_code:
        metric = ""
    return runner.GenerationSettings(config.sampling, config.limit_of(suite.name), metric)


def describe_settings(
    config: EvalConfig,
    plan: EvalPlan,
    target: Target,
    methods: Sequence[str],
    suites: Mapping[str, TokenizedPrompts],
) -> JsonObject:
    """All settings that the figures depend on."""
    prompts = [
        (name, prompt.id, ids, prompt.later)
        for name, pairs in suites.items()
        for prompt, ids in pairs
    ]
    systems = [method.system for method in plan.methods.values()]
    corpora = {s.corpus for s in systems if isinstance(s, CorpusSystem) and s.corpus}
    found = machine()
    return {
        "target": target.spec,
        **({"weights": target.weights} if target.weights else {}),
        **({"date": target.chat.date} if target.chat.date else {}),
        **config.recorded,
        "dtype": target.dtype_name,
        "drafter": dict(plan.drafters),
        "drafter_hash": {kind: folder_hash(local_path(f)) for kind, f in plan.drafters.items()},
        "methods": list(methods),
        "corpus_hash": {path: sha256_file(expand_path(path)) for path in sorted(corpora)},
        "sweep": list(config.sweep.words),
        "tuned": config.tuned,
        "tuning": config.tuning or None,
        "suites": list(suites),
        "prompts_hash": hash_json(prompts),
        "target_hash": target.hash,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "processor": found["processor"],
        "versions": decoding_versions(),
        "git_commit": git_commit(),
        "gpu": found.get("gpu") if target.device.type == "cuda" else None,
    }


def choose_date(config: EvalConfig) -> str:
    """The date in prompts whose chat template reads the clock: that of the measurement that is
    continued, else today's."""
    recorded = None
    if config.out is not None and config.resume and (config.out / RUN).is_file():
        recorded = read_run(config.out).settings.get("date")
    return str(recorded or datetime.date.today().isoformat())


@dataclass
class Measurement:
    """A measurement in its folder: the run, the records so far, and what runs the rest."""

    config: EvalConfig
    folder: Path
    run: Run
    records: list[Record]
    decoders: dict[str, Decoder]
    settings: Mapping[str, runner.GenerationSettings]
    console: PlainConsole

    def run_missing(self, groups: Sequence[Sequence[runner.Task]]) -> None:
        """Run the tasks that have no records yet, and write those. Untimed rounds come first, and
        once per folder the time of transformers' own `generate`."""
        missing = runner.missing_tasks(groups, self.records)
        if self.records:
            note = "" if missing else " (--no-resume measures again)"
            done = f"{len(groups) - len(missing)} of {len(groups)} rounds"
            self.console.say(f"resuming {self.folder}: {done} are done{note}")
        if not missing:
            return
        first = next(task for group in groups for task in group if task.tokens)
        tokens, limit = list(first.tokens), self.config.limit_of(first.suite)
        for _ in range(self.config.warmup):
            runner.warm_up(self.decoders, groups, self.config.sampling, limit)
        if not self.config.no_hf_check and self.run.baseline is None:
            self.console.say("timing plain decoding against transformers' own generate …")
            plain = self.decoders[PLAIN]
            self.run.baseline = time_against_transformers(plain, tokens, min(limit, 64))
            write_run(self.folder, self.run)
        for group in runner.track(missing, len(groups), self.console):
            tasks = [task for task in map(self._begin, group) if task is not None]
            if tasks:
                new = runner.run_tasks(self.decoders, tasks, self.settings[tasks[0].suite])
                self.records = add(self.folder, self.records, new)

    def record_replays(self, groups: Sequence[Sequence[runner.Task]]) -> None:
        """Record a replay of the first prompt of some suites, once per folder."""
        if self.config.tuning or (self.folder / REPLAYS).exists():
            return
        first = {task.suite: task for group in reversed(groups) for task in group if task.tokens}
        suites = [name for name in self.settings if name in first][:MOST_REPLAYS]
        replays = [record_replay(self.decoders, first[n], self.settings[n]) for n in suites]
        write_replays(self.folder, replays)

    def _begin(self, task: runner.Task) -> runner.Task | None:
        """The task with its prompt's tokens. Those of a later turn begin with the earlier ones and
        the target's own answer: plain decoding's. None if they don't fit into its context."""
        if not task.follows:
            return task
        plain = {
            one.prompt: one.tokens
            for one in self.records
            if one.key[2:] == (PLAIN, task.repeat, task.batch) and one.suite == task.suite
        }
        if any(earlier not in plain for earlier in task.follows):  # one was left out
            return None
        target = self.decoders[PLAIN].target
        assert isinstance(task.prompt.content, list)
        answers = [target.detokenize(plain[earlier]) for earlier in task.follows]
        try:
            tokens = continue_conversation(target, task.prompt.content, answers)
        except UserError as error:
            name = f"{task.suite}: {task.prompt.id}: "
            if not any(line.startswith(name) for line in self.run.skipped):
                self.run.skipped.append(f"{name}{error}")
                of_suite = next(one for one in self.run.suites if one["name"] == task.suite)
                of_suite["prompts"] -= 1 + len(task.prompt.later)
                write_run(self.folder, self.run)
            return None
        return replace(task, tokens=tuple(tokens))


@torch.no_grad()
def time_against_transformers(
    plain: Decoder, tokens: list[int], max_new_tokens: int = 64, repeats: int = 3
) -> JsonObject:
    """Greedy decoding of one prompt by both in turn, prefill included; the fastest repeat counts.
    The stock model is loaded for this, with its own linear layers and attention. `{"error": line}`
    if transformers can't run the model."""
    target = plain.target

    def generate(limit: int) -> list[int]:
        ids = torch.tensor([tokens], device=target.device)
        limit = min(limit, target.context_limit - len(tokens))
        mask = torch.ones_like(ids)
        output = stock.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False)
        return output[0, len(tokens) :].tolist()

    plain_seconds, stock_seconds = [], []
    try:
        stock = stock_model(target)
        generate(4)
        plain.generate(tokens, max_new_tokens=4)
        for _ in range(repeats):
            started = perf_counter()
            ours = plain.generate(tokens, max_new_tokens=max_new_tokens).tokens
            plain_seconds.append(perf_counter() - started)
            started = perf_counter()
            theirs = generate(max_new_tokens)
            stock_seconds.append(perf_counter() - started)
    except (RuntimeError, ValueError, TypeError, AttributeError, UserError) as error:
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    plain_speed = len(ours) / max(min(plain_seconds), 1e-9)
    stock_speed = len(theirs) / max(min(stock_seconds), 1e-9)
    return {
        "plain_tokens_per_s": plain_speed,
        "transformers_tokens_per_s": stock_speed,
        "ratio": plain_speed / stock_speed,
        "identical": ours == theirs,
        "repeats": repeats,
        "parameters": sum(weight.numel() for weight in stock.parameters()),
        "ratios": [b / a for a, b in zip(plain_seconds, stock_seconds, strict=True)],
    }
