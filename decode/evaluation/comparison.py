"""Recipes side by side: the drafters that their trainings saved (`trainer.milestones`) decode the
same prompts.

Each recipe is read and trained by `align.train` in its own process. Records of finished prompts
survive an interruption; those of a drafter that has changed since are measured again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from decode.evaluation import runner
from decode.evaluation.learning import Milestone
from decode.evaluation.progress import TaskProgress
from decode.evaluation.records import AS_JSON, Record, add, read_records, write_records
from decode.evaluation.tokenized import tokenize_prompts
from decode.systems.load import load
from decode.systems.parsing import Method
from decode.systems.registry import ANY, PLAIN
from specalign.common.errors import UserError
from specalign.common.files import sha256_file, write_json
from specalign.common.schema import JsonObject, read_object
from specalign.common.strict_yaml import parse_yaml
from specalign.common.terminal import PlainConsole
from specalign.lm.model import Target
from specalign.suites.sources import Loaded

SETTINGS = "compare.json"
_WEIGHTS = "model.safetensors"
_SHARED = {
    "drafter": ("block_size", "layers", "draft_vocab"),
    "trainer": ("max_steps", "batch_size", "accumulate", "milestones"),
}
"""What compared recipes have in common, besides target, data and seed."""


@dataclass(frozen=True)
class ComparedRecipe:
    """A recipe as `align.train` reads it. `words`: its arguments. `values`: its resolved keys."""

    words: tuple[str, ...]
    values: JsonObject

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def kind(self) -> str:
        """The kind of its drafter."""
        return str(
            "variable_prefix"
            if self.values["objective"]["prefix_decay"]
            else self.values["drafter"]["kind"]
        )

    @property
    def milestones(self) -> list[Milestone]:
        return [Milestone(self.name, tokens) for tokens in self.values["trainer"]["milestones"]]

    @property
    def reached(self) -> list[Milestone]:
        """Milestones with a drafter."""
        return [m for m in self.milestones if (self.folder(m) / _WEIGHTS).is_file()]

    @property
    def missing(self) -> list[Milestone]:
        """Milestones without a drafter yet."""
        return [m for m in self.milestones if not (self.folder(m) / _WEIGHTS).is_file()]

    def folder(self, milestone: Milestone) -> Path:
        """Where the drafter of a milestone is."""
        return Path(self.values["output"]) / "milestones" / str(milestone.tokens)

    @property
    def parameters(self) -> int:
        """The number of trained weights, from a milestone's file."""
        with safe_open(self.folder(self.reached[-1]) / _WEIGHTS, "pt") as file:
            names = set(file.keys()) - {"draft_vocab"}
            return sum(prod(file.get_slice(name).get_shape()) for name in names)

    @property
    def shared(self) -> JsonObject:
        """The keys that compared recipes must share."""
        values = self.values
        data = {**values["data"], "path": values["data"]["path"] or f"{values['output']}/data"}
        groups = {"target": values["target"], "data": data}
        for group, keys in _SHARED.items():
            groups[group] = {key: values[group][key] for key in keys}
        flat = {
            f"{group}.{key}": value for group, keys in groups.items() for key, value in keys.items()
        }
        return {"seed": values["seed"], **flat}


def _run_align(*words: str, capture: bool = False) -> str:
    """Run `align.train`; returns its captured output. Raises UserError if it fails: with its own
    error, unless that was printed."""
    pipe = subprocess.PIPE if capture else None
    command = [sys.executable, "-m", "align.train", *words]
    done = subprocess.run(command, stdout=pipe, stderr=pipe, text=True)
    errors = [line for line in (done.stderr or "").splitlines() if line.startswith("error: ")]
    if errors:
        raise UserError(errors[-1].removeprefix("error: "))
    if done.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode:
        code = done.returncode
        raise UserError(f"align.train {words[0]} ended with exit code {code}; see its error above")
    return done.stdout or ""


def read_candidates(recipes: Sequence[str], words: Sequence[str]) -> list[ComparedRecipe]:
    """Read the recipes, each with the same `words`.

    Raises:
        UserError: recipes without milestones, or that differ in more than what is compared, or that
            `align.train` refuses.
    """
    found: list[ComparedRecipe] = []
    for recipe in recipes:
        arguments = (f"recipe={recipe}", *words)
        values = parse_yaml(_run_align(*arguments, "--print", capture=True), recipe)
        if not values["trainer"].get("milestones"):
            raise UserError(
                f"{recipe}: trainer.milestones is empty: after how many tokens is it measured?"
            )
        found.append(ComparedRecipe(arguments, values))
    names = [candidate.name for candidate in found]
    if len(set(names)) < len(names):
        raise UserError(f"recipes need different names: {', '.join(names)}")
    first, *others = found
    for other in others:
        for key, value in first.shared.items():
            if other.shared[key] != value:
                raise UserError(
                    f"{other.name}: {key}={other.shared[key]}, {first.name} has {value}: compared "
                    "recipes must share it"
                )
        if first.values["output"] == other.values["output"]:
            raise UserError(
                f"{first.name} and {other.name} have the same output, {first.values['output']}"
            )
    return found


def check_method(method: Method, candidates: Sequence[ComparedRecipe]) -> None:
    """Whether every recipe's drafter alone can decode this way, before hours of training.

    Raises:
        UserError: a method that is made of another drafter, or of more than one.
    """
    for candidate in candidates:
        if method.needs in ((ANY,), (candidate.kind,)):
            continue
        needed = " and ".join(f"a {kind} drafter" for kind in method.needs)
        needs = f"needs {needed}" if needed else "takes no drafter"
        raise UserError(
            f"--method {method.name} {needs}; {candidate.name} trains one of the kind "
            f"{candidate.kind}: try --method drafter"
        )


def train(candidates: Sequence[ComparedRecipe], console: PlainConsole) -> None:
    """Train what has milestones missing, one recipe after the other, resuming.

    Raises:
        UserError: a training failed, or reached none of its milestones.
    """
    for candidate in candidates:
        if candidate.missing:
            console.say(f"training {candidate.name}")
            _run_align(*candidate.words)
        missing = candidate.missing
        if missing:
            line = f"{candidate.name}: its training ended before {missing[0].tokens:,} tokens (trainer.max_steps)"
            if not candidate.reached:
                raise UserError(line)
            console.say(f"left out: {line}", wrap=False)


def measure(
    candidates: Sequence[ComparedRecipe],
    target: Target,
    suites: Sequence[Loaded],
    settings: runner.GenerationSettings,
    folder: Path,
    console: PlainConsole,
    method: str | None = None,
    batch: int = 1,
) -> list[Record]:
    """Decode every prompt plainly and with each milestone's drafter, without copying; the records,
    which `folder` holds too.

    Args:
        method: how all drafters decode; None: as `decode.load` does.
        batch: prompts decoded at a time.

    Raises:
        UserError: no prompt fits, or the folder holds a comparison under other settings.
    """
    tokenized, refused = [], []
    for suite in suites:
        pairs, lines = tokenize_prompts(target, suite.prompts)
        tokenized.append((suite.name, pairs))
        refused += lines
    if not any(pairs for _, pairs in tokenized):
        raise UserError(f"no prompt can be answered: {refused[0]}")
    folders = {m.method: candidate.folder(m) for candidate in candidates for m in candidate.reached}
    records = _open_folder(
        folder, folders, {**_describe(target, suites, settings), "method": method}
    )
    decoders = {PLAIN: load(target, None)}
    for name, drafter in folders.items():
        decoders[name] = load(target, drafter, copying=False, method=method)
    planned = runner.plan_tasks(tokenized, list(decoders), 1, settings.sampling.fixed_seed)
    tasks = list(runner.missing_tasks(planned, records))
    progress = TaskProgress(console, len(tasks), rates=batch == 1)
    for start in range(0, len(tasks), batch):
        several = tasks[start : start + batch]
        if batch == 1:
            finished = [runner.run_task(decoders, several[0], settings)]
        else:
            finished = runner.run_together(decoders, several, settings)
        for of_task in finished:
            records = add(folder, records, of_task)
            progress.finish_task(of_task)
    return records


def _describe(
    target: Target, suites: Sequence[Loaded], settings: runner.GenerationSettings
) -> JsonObject:
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


def _open_folder(folder: Path, drafters: dict[str, Path], settings: JsonObject) -> list[Record]:
    """The folder's records that are still valid. Writes its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    hashes = {method: sha256_file(drafter / _WEIGHTS) for method, drafter in drafters.items()}
    records: list[Record] = []
    if path.is_file():
        before = read_object(path)
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(
                    f"{folder} holds a comparison with another {key}: give another --out"
                )
        old = before.get("drafters")
        old = old if isinstance(old, dict) else {}
        valid = {PLAIN, *(method for method, value in hashes.items() if old.get(method) == value)}
        found = read_records(folder, mend=True)
        records = [record for record in found if record.method in valid]
        if len(records) < len(found):
            write_records(folder, records)
    write_json(path, {**settings, "drafters": hashes}, **AS_JSON)
    return records
