"""Compares recipes: the drafters saved during training (`trainer.milestones`) decode the same
prompts. Each recipe is read and trained by `align.train` in its own process. Records survive an
interruption; those of a drafter that has changed since are measured again."""

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
from decode.evaluation.records import AS_JSON, Record, add, read_records, write_records
from decode.evaluation.tokenized import tokenize_suites
from decode.systems.construction import load
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
        if self.values["objective"]["prefix_decay"]:
            return "variable_prefix"
        return str(self.values["drafter"]["kind"])

    @property
    def milestones(self) -> list[Milestone]:
        return [Milestone(self.name, tokens) for tokens in self.values["trainer"]["milestones"]]

    @property
    def reached(self) -> list[Milestone]:
        """Milestones with a drafter."""
        return [m for m in self.milestones if (self.folder(m) / _WEIGHTS).is_file()]

    def folder(self, milestone: Milestone) -> Path:
        """The folder of a milestone's drafter."""
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
        shared = {"seed": values["seed"]}
        for group in ("target", "data"):
            shared |= {f"{group}.{key}": value for key, value in values[group].items()}
        for group, keys in _SHARED.items():
            shared |= {f"{group}.{key}": values[group][key] for key in keys}
        shared["data.path"] = shared["data.path"] or f"{values['output']}/data"
        return shared


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
    """Read the recipes, each with the same `words`. Raises UserError for recipes without
    milestones, or that differ in more than what is compared, or that `align.train` refuses."""
    found: list[ComparedRecipe] = []
    for recipe in recipes:
        arguments = (f"recipe={recipe}", *words)
        values = parse_yaml(_run_align(*arguments, "--print", capture=True), recipe)
        if not values["trainer"].get("milestones"):
            raise UserError(
                f"{recipe}: trainer.milestones is empty: list the token counts at which to measure"
            )
        found.append(ComparedRecipe(arguments, values))
    first = found[0]
    for key in ("name", "output"):
        chosen = [str(candidate.values[key]) for candidate in found]
        if len(set(chosen)) < len(chosen):
            raise UserError(f"recipes need different {key}s: {', '.join(chosen)}")
    for other in found[1:]:
        for key, value in first.shared.items():
            if other.shared[key] != value:
                raise UserError(
                    f"{other.name}: {key}={other.shared[key]}, {first.name} has {value}: compared "
                    "recipes must use the same value"
                )
    return found


def check_method(method: Method, candidates: Sequence[ComparedRecipe]) -> None:
    """Raises UserError, before hours of training, for a method that is not made of one drafter of
    the kind that every recipe trains."""
    for candidate in candidates:
        if method.needs not in ((ANY,), (candidate.kind,)):
            raise UserError(
                f"--method {method.name} can't use the {candidate.kind} drafter "
                f"that {candidate.name} trains: try --method drafter"
            )


def train(candidates: Sequence[ComparedRecipe], console: PlainConsole) -> None:
    """Train what has milestones missing, one recipe after the other, resuming. Raises UserError: a
    training failed, or reached none of its milestones."""
    for candidate in candidates:
        if candidate.reached != candidate.milestones:
            console.say(f"training {candidate.name}")
            _run_align(*candidate.words)
        missing = [m.tokens for m in candidate.milestones if m not in candidate.reached]
        if missing:
            line = (
                f"{candidate.name}: its training ended before {missing[0]:,} tokens "
                "(trainer.max_steps)"
            )
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
    """Decode every prompt plainly and with each milestone's drafter, without copying, by `method`
    (None: as `decode.load` does), `batch` prompts at a time; the records, which `folder` holds too.
    Raises UserError: no prompt fits, or the folder holds a comparison under other settings."""
    tokenized, _ = tokenize_suites(target, suites)
    folders = {m.method: candidate.folder(m) for candidate in candidates for m in candidate.reached}
    sampling = settings.sampling
    described = {
        "target": target.hash,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": {suite.name: [prompt.id for prompt in suite.prompts] for suite in suites},
        "max_new_tokens": settings.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.fixed_seed,
        "chat": target.chat.description or None,
        "method": method,
    }
    records = _open_folder(folder, folders, described)
    decoders = {PLAIN: load(target, None)}
    for name, drafter in folders.items():
        decoders[name] = load(target, drafter, copying=False, method=method)
    planned = runner.plan_tasks(tokenized, list(decoders), 1, sampling.fixed_seed)
    tasks = runner.missing_tasks(planned, records)
    groups = [tasks[start : start + batch] for start in range(0, len(tasks), batch)]
    for group in runner.track(groups, len(groups), console):
        for of_task in runner.run_task_batch(decoders, group, settings):
            records = add(folder, records, of_task)
    return records


def _open_folder(folder: Path, drafters: dict[str, Path], settings: JsonObject) -> list[Record]:
    """The folder's records that are still valid. Writes its settings. Raises UserError: it holds a
    comparison under other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    hashes = {method: sha256_file(drafter / _WEIGHTS) for method, drafter in drafters.items()}
    records: list[Record] = []
    if path.is_file():
        before = read_object(path)
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(
                    f"{folder} contains a comparison with another {key}: choose another --out"
                )
        old = before["drafters"]
        valid = {PLAIN, *(method for method, value in hashes.items() if old.get(method) == value)}
        found = read_records(folder, mend=True)
        records = [record for record in found if record.method in valid]
        if len(records) < len(found):
            write_records(folder, records)
    write_json(path, {**settings, "drafters": hashes}, **AS_JSON)
    return records
