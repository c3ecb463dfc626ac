"""Recipe files as layers of dotted keys: a file, its bases, and their sections for the drafter's
kind; and the file in which a run records its recipe."""

import sys
from collections.abc import Sequence
from pathlib import Path

from align.config.recipe import GROUPS, Recipe, Values, keys, resolve
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path, read_text, write_json, write_text
from specalign.common.provenance import training_versions
from specalign.common.schema import JsonObject, convert
from specalign.common.strict_yaml import dump_yaml, parse_yaml
from specalign.common.text import short
from specalign.formats.kinds import DrafterKind, kind_of_drafter

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
KINDS = ("shared_kv", "taps", "masked_lm", "ddit", "autoregressive")
"""Sections under `kinds` in a recipe's file: the contexts of block drafters, and other kinds."""
_KINDS = dict[str, JsonObject]
Layer = tuple[str, Values]
"""A source of values, a file's name or the command line, and its values by dotted key."""


def list_recipes() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str, where: str, folder: Path | None = None) -> Path:
    """The file behind recipe=NAME or base: NAME: a shipped name, or a path to a .yaml (relative to
    `folder`). Raises UserError: there is none; the message begins with `where`."""
    path = FOLDER / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = (folder or Path()) / expand_path(name, f"{where}: recipe")
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return path
    near = nearest(Path(name).stem, list_recipes())
    raise UserError(f"{where}: recipe {short(name)}: no such recipe or .yaml file{near}")


def read_with_bases(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """The recipe's bases, the first one first, then the recipe. `above`: what is based on it."""
    content = parse_yaml(read_text(path), path.name)
    if not isinstance(content, dict):
        raise UserError(f"{path.name}: must contain `key: value` lines")
    flat = flatten_all(content, path.name)
    base = flat.pop("base", None)
    if base is None:
        return [(path.name, flat)]
    if not isinstance(base, str) or path.resolve() in above:
        raise UserError(f"{path.name}: base={short(base)} must be another recipe's name")
    below = find(base, f"{path.name}: base", path.parent)
    return [*read_with_bases(below, (*above, path.resolve())), (path.name, flat)]


def flatten_all(values: Values, where: str) -> Values:
    """Values with groups flattened to dotted keys; other mappings (objective.terms) are values.
    Raises UserError for a key given twice."""
    flat: Values = {}
    for key, value in values.items():
        entries: Values = {key: value}
        if key in GROUPS and key:
            if not isinstance(value, dict | None):
                names = nearest("", [name for name in keys() if name.startswith(f"{key}.")])
                raise UserError(f"{where}: {key}={short(value)}: {key} is a group of keys{names}")
            entries = {f"{key}.{name}": entry for name, entry in (value or {}).items()}
        for name, entry in entries.items():
            if name in flat:
                given = f"{short(flat[name])} and {short(entry)}"
                raise UserError(f"{where}: {name} is given twice ({given})")
            flat[name] = entry
    return flat


def insert_kinds(layers: list[Layer]) -> list[Layer]:
    """Replace each layer's `kinds` by its section for this drafter, after that layer.
    `drafter.kind: auto` becomes the kind of `drafter.init`; a missing drafter, which preflight
    reports, counts as a block drafter. Raises UserError."""
    given = {key: value for _, flat in layers for key, value in flat.items()}
    kind = str(given.get("drafter.kind", "block"))
    context = str(given.get("drafter.context", "shared_kv"))
    found = DrafterKind(kind, context if kind == "block" else None)
    if kind == "auto":
        init = given.get("drafter.init")
        if not isinstance(init, str):
            raise UserError("drafter.kind=auto needs drafter.init")
        found = kind_of_drafter(init) or DrafterKind("block", "shared_kv")
    inserted: list[Layer] = []
    for where, flat in layers:
        rest = dict(flat)
        kinds: dict[str, Values] = convert(rest.pop("kinds", {}), _KINDS, "kinds", where)
        for name in kinds.keys() - {*KINDS}:
            raise UserError(f"{where}: kinds: unknown kind {name!r}{nearest(name, KINDS)}")
        section = flatten_all(kinds.get(found.name, {}), where)
        if rest.get("drafter.kind") == "auto":
            rest["drafter.kind"] = found.kind
            if found.block_size is not None and "drafter.block_size" not in flat:
                section["drafter.block_size"] = found.block_size
        inserted += [(where, rest), (where, section)]
    return inserted


# ---- the record of a run in its output folder ----

_CHANGEABLE = (
    "name", "output", "launch", "target.name", "target.device", "target.revision",
    "target.trust_remote_code", "data.path", "data.write", "data.prompts_column",
    "data.max_prompt_tokens", "trainer.max_steps", "trainer.max_minutes", "trainer.warmup_steps",
    "trainer.resume", "trainer.validate_first", "trainer.validate_every", "trainer.validation_rows",
    "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.keep_features_gb",
    "trainer.features_gb", "trainer.features_path", "trainer.logger", "trainer.log_every",
    "trainer.milestones", "trainer.compile_target", "stage", "drafter.train",
)  # fmt: skip
"""Keys that may change when a run resumes: where and how far it runs and what it reports.
Checkpoints check their target and the last two."""


def save_run_record(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Write recipe.yaml (recipe=PATH repeats the run) and versions.json into the output folder."""
    folder = Path(recipe.output)
    record = {**training_versions(), "argv": list(sys.argv[1:] if argv is None else argv)}
    write_text(folder / "recipe.yaml", dump_yaml(resolve(recipe)))
    write_json(folder / "versions.json", record)


def check_record(recipe: Recipe) -> None:
    """Raises UserError if the run that `trainer.resume=auto` resumes started with other keys,
    except `_CHANGEABLE`, or its record can't be read."""
    output = Path(recipe.output)
    path = output / "recipe.yaml"
    has_run = path.is_file() and any((output / "checkpoints").glob("step-*.ckpt"))
    if recipe.trainer.resume != "auto" or not has_run:
        return
    record = parse_yaml(read_text(path), str(path))
    before = flatten_all(record if isinstance(record, dict) else {}, str(path))
    changes = [
        f"{key} was {short(before[key], 40)}, now {short(value, 40)}"
        for key, value in flatten_all(resolve(recipe), str(path)).items()
        if not {key, key.partition(".")[0]} & {*_CHANGEABLE} and before.get(key, value) != value
    ]
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"output={output} holds a run with other settings ({'; '.join(changes[:3])}{more}): "
            "give the same keys to resume it, trainer.resume=never to start over, or another output"
        )
