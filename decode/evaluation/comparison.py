"""Compares recipes: the drafters saved during training (`trainer.milestones`) decode the same
prompts; a table shows τ over the text tokens trained on. Each recipe is read and trained by
`align.train` in its own process. Records survive an interruption; those of a drafter that has
changed since are measured again."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from decode.evaluation import runner
from decode.evaluation.records import AS_JSON, Record, add, read_records, write_records
from decode.evaluation.statistics import accepted_ratio, counts, format_estimate, tau
from decode.evaluation.tokenized import tokenize_suites
from decode.systems.load import load
from decode.systems.registry import PLAIN
from specalign.common.errors import UserError
from specalign.common.files import sha256_file, write_json
from specalign.common.schema import JsonObject, read_object
from specalign.common.strict_yaml import parse_yaml
from specalign.common.terminal import PlainConsole
from specalign.common.text import markdown_table
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
class Milestone:
    """A drafter that a recipe's training saves after this many text tokens."""

    recipe: str
    tokens: int
    folder: Path

    @property
    def method(self) -> str:
        """Its name among a measurement's methods."""
        return f"{self.recipe}@{self.tokens}"

    @property
    def reached(self) -> bool:
        return (self.folder / _WEIGHTS).is_file()


@dataclass(frozen=True)
class ComparedRecipe:
    """A recipe as `align.train` reads it. `words`: its arguments. `values`: its resolved keys."""

    words: tuple[str, ...]
    values: JsonObject

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def milestones(self) -> list[Milestone]:
        folder = Path(self.values["output"]) / "milestones"
        found: list[int] = self.values["trainer"]["milestones"]
        return [Milestone(self.name, tokens, folder / str(tokens)) for tokens in found]

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
    if done.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode:
        errors = [line for line in (done.stderr or "").splitlines() if line.startswith("error: ")]
        seen = f"align.train {words[0]} failed; see its error above"
        raise UserError(errors[-1].removeprefix("error: ") if errors else seen)
    return done.stdout or ""


def read_candidates(recipes: Sequence[str], words: Sequence[str]) -> list[ComparedRecipe]:
    """Read the recipes, each with the same `words`. Raises UserError for recipes without
    milestones, or that differ in more than what is compared, or that `align.train` refuses."""
    found: list[ComparedRecipe] = []
    for recipe in recipes:
        arguments = (f"recipe={recipe}", *words)
        values = parse_yaml(_run_align(*arguments, "--print", capture=True), recipe)
        if not values["trainer"].get("milestones"):
            hint = "list the token counts at which to measure"
            raise UserError(f"{recipe}: trainer.milestones is empty: {hint}")
        found.append(ComparedRecipe(arguments, values))
    for key in ("name", "output"):
        chosen = [str(candidate.values[key]) for candidate in found]
        if len(set(chosen)) < len(chosen):
            raise UserError(f"recipes need different {key}s: {', '.join(chosen)}")
    first = found[0]
    for other in found[1:]:
        for key, value in first.shared.items():
            if other.shared[key] != value:
                differs = f"{other.name}: {key}={other.shared[key]}, {first.name} has {value}"
                raise UserError(f"{differs}: compared recipes must use the same value")
    return found


def train(candidates: Sequence[ComparedRecipe], console: PlainConsole) -> list[Milestone]:
    """Train what has milestones missing, one recipe after the other, resuming. Returns the
    milestones with a drafter. Raises UserError: a training failed, or reached no milestone."""
    found: list[Milestone] = []
    for candidate in candidates:
        if not all(milestone.reached for milestone in candidate.milestones):
            console.say(f"training {candidate.name}")
            _run_align(*candidate.words)
        reached = [milestone for milestone in candidate.milestones if milestone.reached]
        if len(reached) < len(candidate.milestones):
            line = f"{candidate.name}: its training ended before its last milestone"
            if not reached:
                raise UserError(f"{line}: raise trainer.max_steps")
            console.say(f"skipped: {line}", wrap=False)
        found += reached
    return found


def measure(
    milestones: Sequence[Milestone],
    target: Target,
    suites: Sequence[Loaded],
    settings: runner.GenerationSettings,
    folder: Path,
    console: PlainConsole,
) -> list[Record]:
    """Decode every prompt plainly and with each milestone's drafter, without copying; the records,
    which `folder` holds too. Raises UserError: no prompt fits, or the folder holds a comparison
    under other settings."""
    tokenized, _ = tokenize_suites(target, suites)
    sampling = settings.sampling
    described = {
        "target": target.hash,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": {suite.name: [prompt.id for prompt in suite.prompts] for suite in suites},
        "max_new_tokens": settings.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.fixed_seed,
        "chat": target.chat.description or None,
    }
    records = _open_folder(folder, milestones, described)
    decoders = {PLAIN: load(target, None)}
    for milestone in milestones:
        decoders[milestone.method] = load(target, milestone.folder, copying=False)
    first_turns = {
        name: [(replace(prompt, later=()), tokens) for prompt, tokens in pairs]
        for name, pairs in tokenized.items()
    }
    planned = runner.plan_tasks(first_turns, list(decoders), 1, sampling.fixed_seed)
    tasks = runner.missing_tasks(planned, records)
    for group in runner.track(tasks, len(planned), console):
        records = add(folder, records, runner.run_tasks(decoders, group, settings))
    return records


def _open_folder(
    folder: Path, milestones: Sequence[Milestone], settings: JsonObject
) -> list[Record]:
    """The folder's records that are still valid. Writes its settings. Raises UserError: it holds a
    comparison under other ones."""
    path = folder / SETTINGS
    hashes = {m.method: sha256_file(m.folder / _WEIGHTS) for m in milestones}
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
        records = [r for r in read_records(folder, mend=True) if r.method in valid]
        write_records(folder, records)
    write_json(path, {**settings, "drafters": hashes}, **AS_JSON)
    return records


def render_table(milestones: Sequence[Milestone], records: Sequence[Record]) -> str:
    """Markdown: a row for each milestone. Accepted tokens per call, τ − 1, are compared with the
    last recipe's after the same number of tokens."""
    reference = milestones[-1].recipe
    header = (
        "text tokens", "recipe", "τ [95%]", f"accepted, of {reference}'s", "identical", "prompts",
    )  # fmt: skip
    rows = []
    for milestone in sorted(milestones, key=lambda milestone: milestone.tokens):
        counted = counts(records, milestone.method)
        own = [r.identical for r in records if r.method == milestone.method]
        same = [one for one in own if one is not None]
        ratio = ""
        if milestone.recipe != reference:
            baseline = counts(records, f"{reference}@{milestone.tokens}")
            ratio = format_estimate(accepted_ratio(baseline, counted), "", ".3f")
        row = [f"{milestone.tokens:,}", milestone.recipe]
        row.append(format_estimate(tau(counted), "", ".3f"))
        row += [ratio, f"{sum(same)}/{len(same)}" if same else "", str(len(counted))]
        rows.append(row)
    return markdown_table(header, rows) + "\n"
