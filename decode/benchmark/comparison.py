"""Recipes side by side: the drafters that their trainings saved on the way (`trainer.milestones`), decoded on the same prompts.

A recipe is read and trained by `align.train` in a process of its own. Records of finished prompts stay when a run is stopped; those of a
drafter that has changed since are measured again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from align.common.errors import UserError
from align.common.files import sha256_file, write_json
from align.common.schema import read_object
from align.common.strict_yaml import parse_yaml
from align.common.terminal import PlainConsole
from decode.benchmark import runner
from decode.benchmark.progress import TaskProgress
from decode.method_names import PLAIN
from decode.methods.registry import ANY
from decode.methods.spec import read_method
from decode.reporting.learning import Milestone
from decode.reporting.records import AS_JSON, Record, add, read_records, write_records
from decode.suites.sources import Loaded
from decode.suites.tokenized import tokenize_prompts

if TYPE_CHECKING:
    from align.target.model import Target

SETTINGS = "compare.json"
_WEIGHTS = "model.safetensors"
_SAME = {
    "drafter": ("block_size", "layers", "draft_vocab"),
    "trainer": ("max_steps", "batch_size", "accumulate", "milestones"),
}
"""What recipes that are compared have in common, besides target, text and seed."""


@dataclass(frozen=True)
class Candidate:
    """A recipe as `align.train` reads it. words: what it was asked with. values: its resolved keys."""

    words: tuple[str, ...]
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def milestones(self) -> list[Milestone]:
        return [Milestone(self.name, tokens) for tokens in self.values["trainer"]["milestones"]]

    @property
    def reached(self) -> list[Milestone]:
        """Milestones whose drafters are there."""
        missing = self.missing
        return [m for m in self.milestones if m not in missing]

    def folder(self, milestone: Milestone) -> Path:
        """Where the drafter of a milestone lies."""
        return Path(self.values["output"]) / "milestones" / str(milestone.tokens)

    @property
    def missing(self) -> list[Milestone]:
        """Milestones without a drafter yet."""
        return [m for m in self.milestones if not (self.folder(m) / _WEIGHTS).is_file()]

    @property
    def parameters(self) -> int:
        """How many weights are trained, from a milestone's file."""
        with safe_open(self.folder(self.reached[-1]) / _WEIGHTS, "pt") as file:
            names = set(file.keys()) - {"draft_vocab"}
            return sum(prod(file.get_slice(name).get_shape()) for name in names)


def _align(*words: str, capture: bool = False, command: str = "align.train") -> str:
    """Run `align.train`, or another command of its room; what it printed, where that is captured. Raises UserError where it fails:
    its own line, or that this is on the terminal already."""
    pipe = subprocess.PIPE if capture else None
    done = subprocess.run([sys.executable, "-m", command, *words], stdout=pipe, stderr=pipe, text=True)
    if lines := [line for line in (done.stderr or "").splitlines() if line.startswith("error: ")]:
        raise UserError(lines[-1].removeprefix("error: "))
    _check_ended(f"{command} {words[0]}", done.returncode)
    return done.stdout or ""


def _check_ended(what: str, code: int) -> None:
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        raise UserError(f"{what} ended with exit code {code}; its own line stands above")


def candidates(recipes: Sequence[str], words: Sequence[str]) -> list[Candidate]:
    """Read the recipes, each with the same `words`.

    Raises:
        UserError: they have no milestones, or are not alike but for what is to be compared, or `align.train` refuses
            one.
    """
    found = []
    for recipe in recipes:
        own = (f"recipe={recipe}", *words)
        values = parse_yaml(_align(*own, "--print", capture=True), recipe)
        if not values["trainer"].get("milestones"):
            raise UserError(f"{recipe}: trainer.milestones is empty: after how many tokens is it measured?")
        found.append(Candidate(own, values))
    names = [candidate.name for candidate in found]
    if len(set(names)) < len(names):
        raise UserError(f"recipes of one name can't be told apart: {', '.join(names)}")
    for other in found[1:]:
        _check_alike(found[0], other)
    return found


def _check_alike(one: Candidate, other: Candidate) -> None:
    """Raises UserError naming the first key in which two recipes must not differ and do."""

    def shared(candidate: Candidate) -> dict[str, Any]:
        v = candidate.values
        data = {**v["data"], "path": v["data"]["path"] or f"{v['output']}/data"}
        groups = {"target": v["target"], "data": data}
        groups |= {group: {key: v[group][key] for key in keys} for group, keys in _SAME.items()}
        flat = {f"{group}.{key}": value for group, own in groups.items() for key, value in own.items()}
        return {"seed": v["seed"], **flat}

    theirs = shared(other)
    for key, value in shared(one).items():
        if theirs[key] != value:
            raise UserError(
                f"{other.name}: {key}={theirs[key]}, {one.name} has {value}: only recipes that are alike in this can be compared"
            )
    if one.values["output"] == other.values["output"]:
        raise UserError(f"{one.name} and {other.name} have one output, {one.values['output']}")


def check_method(name: str, found: Sequence[Candidate]) -> None:
    """Whether every recipe's drafter can decode this way by itself, before hours of training.

    Raises:
        UserError: an unknown method or option, or one that is made of another drafter than this, or of more than one.
    """
    method = read_method(name)
    for candidate in found:
        values = candidate.values
        kind = "variable_prefix" if values["objective"]["prefix_decay"] else values["drafter"]["kind"]
        if method.needs not in ((ANY,), (kind,)):
            made = (
                f"needs {' and '.join(f'a {need} drafter' for need in method.needs)}"
                if method.needs
                else "takes no drafter"
            )
            raise UserError(
                f"--method {name} {made}; {candidate.name} trains one of the kind {kind}: try --method drafter"
            )


def train(found: Sequence[Candidate], console: PlainConsole, jobs: int = 1) -> None:
    """Train what has milestones missing, `jobs` recipes at a time, going on where it stopped. Of several, each line that they print
    begins with the recipe's name, and one that fails does not end the others.

    Raises:
        UserError: a training failed, or reached none of its milestones.
    """
    left = [candidate for candidate in found if candidate.missing]
    together = min(jobs, len(left)) > 1
    if together:
        _align(*left[0].words, command="align.synthesize")  # the text that all of them share has one writer
        _train_together(left, console, jobs)
    for candidate in found:
        if candidate.missing and not together:
            console.say(f"training {candidate.name}")
            _align(*candidate.words)
        if missing := candidate.missing:
            line = f"{candidate.name}: its training ended before {missing[0].tokens:,} tokens (trainer.max_steps)"
            if not candidate.reached:
                raise UserError(line)
            console.say(f"left out: {line}", wrap=False)


def _train_together(found: Sequence[Candidate], console: PlainConsole, jobs: int) -> None:
    running: list[subprocess.Popen[str]] = []

    def one(candidate: Candidate) -> None:
        console.say(f"training {candidate.name}")
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "align.train", *candidate.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        running.append(process)
        for line in process.stdout or ():
            console.say(f"{candidate.name}: {line.rstrip()}", wrap=False)
        _check_ended(f"align.train {candidate.words[0]}", process.wait())

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, candidate) for candidate in found]
        try:
            wait(waiting)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in (
                running
            ):  # the terminal's Ctrl-C has reached them already, a signal to this process alone has not
                process.send_signal(signal.SIGINT)
            raise
    for ended in waiting:
        ended.result()


def measure(
    found: Sequence[Candidate],
    target: Target,
    suites: Sequence[Loaded],
    settings: runner.Settings,
    folder: Path,
    console: PlainConsole,
    method: str | None = None,
    batch: int = 1,
) -> list[Record]:
    """Decode every prompt plainly and with every milestone's drafter alone, no copies in front; the records of all, also in `folder`.
    `method`: how all drafters decode, a name of `decode.methods.registry` with its options; None: as `decode.load` does. `batch`: how
    many prompts are decoded at a time.

    Raises:
        UserError: no prompt fits, or the folder holds a comparison under other settings.
    """
    from decode.methods.load import load

    named, refused = [], []
    for suite in suites:
        pairs, lines = tokenize_prompts(target, suite.prompts)
        named.append((suite.name, pairs))
        refused += lines
    if not any(pairs for _, pairs in named):
        raise UserError(f"no prompt can be answered: {refused[0]}")
    places = {m.method: c.folder(m) for c in found for m in c.reached}
    records = _kept(folder, places, {**_described(target, suites, settings), "method": method})
    decoders = {PLAIN: load(target, None)}
    decoders |= {name: load(target, place, copying=False, method=method) for name, place in places.items()}
    tasks = list(
        runner.remaining(runner.plan(named, list(decoders), 1, settings.sampling.fixed_seed), records)
    )
    with TaskProgress(console, len(tasks), list(decoders), rates=batch == 1) as progress:
        for several in (tasks[i : i + batch] for i in range(0, len(tasks), batch)):
            step = partial(progress.step, several[0].prompt.id)
            if batch == 1:
                each = [runner.run_task(decoders, several[0], settings, step)]
            else:
                each = runner.run_together(decoders, several, settings, step)
            for new in each:
                records = add(folder, records, new)
                progress.done(new)
    return records


def _described(target: Target, suites: Sequence[Loaded], settings: runner.Settings) -> dict[str, Any]:
    sampling = settings.sampling
    return {
        "target": target.hash,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": {suite.name: [prompt.id for prompt in suite.prompts] for suite in suites},
        "max_new_tokens": settings.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.fixed_seed,
        "chat": target.chat.description or None,
    }


def _kept(folder: Path, places: dict[str, Path], settings: dict[str, Any]) -> list[Record]:
    """The records in the folder that still hold; its settings are written."""
    folder.mkdir(parents=True, exist_ok=True)
    path, hashes = folder / SETTINGS, {m: sha256_file(place / _WEIGHTS) for m, place in places.items()}
    records: list[Record] = []
    if path.is_file():
        before = read_object(path)
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(f"{folder} holds a comparison with another {key}: give another --out")
        drafters = before.get("drafters")
        same = {m for m, value in hashes.items() if isinstance(drafters, dict) and drafters.get(m) == value}
        there = read_records(folder, mend=True)
        records = [r for r in there if r.method in same or r.method == PLAIN]
        if len(records) < len(there):
            write_records(folder, records)
    write_json(path, {**settings, "drafters": hashes}, **AS_JSON)
    return records
