"""Parses drafter arguments (`--drafter FOLDER,KIND=FOLDER`) and determines their kinds. Does not
import torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.systems.parsing import Method, check_drafters
from decode.systems.registry import AUTOREGRESSIVE, BLOCK, DIFFUSION, LOOKUP, ROLES, VARIABLE_PREFIX
from specalign.common.errors import UserError, nearest
from specalign.common.hub import is_hub_id, local_path, missing, model_folder
from specalign.common.provenance import CHECKOUT
from specalign.common.schema import read_object
from specalign.formats.kinds import RECORD, kind_of_config, layout_of, made_for
from specalign.lm.names import DEFAULT_TARGET, WHEELS, check_name

AUTO = "auto"
"""The shipped drafter where it was made for the target, else lookup."""
DEFAULT_DRAFTER = CHECKOUT / "pretrained" / "smollm2-135m-block"
"""Shipped with the repository for the default target."""
NO_FOLDERS = (LOOKUP, "none")
"""Given in place of a drafter, these name no trained one."""
BLOCKS = (BLOCK, VARIABLE_PREFIX)
"""Block drafters that differ in their training; each may be used as the other."""


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter's folder or hub id, and its kind if that was typed."""

    folder: str
    kind: str | None = None

    def __str__(self) -> str:
        return self.folder if self.kind is None else f"{self.kind}={self.folder}"


def read_drafters(text: str | None) -> tuple[NamedDrafter, ...]:
    """The drafters of a comma list. Raises UserError for an unknown kind, or a drafter that does
    not exist."""
    found = []
    for word in filter(None, (part.strip() for part in (text or "").split(","))):
        kind, equals, folder = word.partition("=")
        if not equals:
            kind, folder = "", word
        elif kind not in ROLES:
            raise UserError(f"--drafter: unknown kind {kind!r}{nearest(kind, ROLES)}")
        if folder in NO_FOLDERS:
            hint = "(lookup and plain are methods: --methods)"
            raise UserError(f"--drafter={folder!r}: must be a folder {hint}")
        if kind != AUTOREGRESSIVE:  # which may be any target: a package or a GGUF file too
            check_there(folder)
        found.append(NamedDrafter(folder, kind or None))
    return tuple(found)


def drafters_for(named: Sequence[NamedDrafter], target: str) -> tuple[NamedDrafter, ...]:
    """The drafters, or the one that is shipped for the target where none is named."""
    shipped = None if named else shipped_for(target)
    return (NamedDrafter(shipped),) if shipped else tuple(named)


def drafters_by_kind(
    named: Sequence[NamedDrafter], note: Callable[[str], object] = lambda line: None
) -> dict[str, str]:
    """The folders by kind, in their order. `note` receives a line for a second drafter that was not
    trained as one. Raises UserError for another kind than was typed, or two of one kind."""
    found: dict[str, str] = {}
    for drafter in named:
        folder, kind = drafter.folder, drafter.kind or kind_of(drafter.folder)
        if drafter.kind and (local_path(folder) / "config.json").is_file():
            own = kind_of(folder)
            if (kind in BLOCKS) != (own in BLOCKS) or (kind, own) == (DIFFUSION, AUTOREGRESSIVE):
                raise UserError(f"--drafter {kind}={folder}: that drafter is of kind {own}")
            if kind == VARIABLE_PREFIX != own:
                what = "was not trained to continue a drafted prefix (recipe=variable_prefix)"
                note(f"note: {folder} {what}")
        if kind in found:
            both = f"{found[kind]} and {folder} are both of kind {kind}"
            raise UserError(f"--drafter: {both}: use KIND=FOLDER")
        found[kind] = folder
    return found


def check_methods(
    methods: Sequence[Method], named: Sequence[NamedDrafter], target: str | None = None
) -> None:
    """Raises UserError for a method whose drafter is not among these. `target` None: the
    default."""
    check_drafters(methods, drafters_by_kind(drafters_for(named, target or DEFAULT_TARGET)))


def check_there(spec: str) -> None:
    """Raises UserError for a name that is neither a drafter's folder nor a hub id."""
    folder = local_path(spec)
    if spec in NO_FOLDERS or (folder / "config.json").exists():
        return
    if folder.is_dir():
        inside = next(folder.glob("drafter/config.json"), None)
        hint = f" (did you mean {str(inside.parent)!r}?)" if inside else ""
        raise UserError(f"drafter {spec!r}: no config.json in that folder{hint}")
    if not is_hub_id(spec):
        hint = "" if "/" in spec else nearest(spec, NO_FOLDERS[:1])
        raise missing(f"drafter {spec!r}", spec, hint=hint)


def kind_of(spec: str) -> str:
    """A drafter's kind by its small files: neither a block drafter nor a causal language model is a
    standalone diffusion drafter. Raises UserError for a file, or an unavailable hub id."""
    path = local_path(spec)
    if path.is_file():
        raise UserError(f"--drafter={spec}: a drafter is a folder with config.json, not a file")
    if not path.is_dir():
        if spec in WHEELS:  # a language model of a package
            return AUTOREGRESSIVE
        path = model_folder(spec, "drafter", ("config.json", RECORD))
    if not (path / "config.json").is_file():
        return DIFFUSION
    values = read_object(path / "config.json")
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    kind = kind_of_config(values, record)
    if kind is not None and kind.kind == BLOCK:
        extra = values.get("extra")  # written by training
        return VARIABLE_PREFIX if isinstance(extra, dict) and extra.get("prefix_decay") else BLOCK
    return AUTOREGRESSIVE if kind is not None and kind.kind == AUTOREGRESSIVE else DIFFUSION


def shipped_for(target: str) -> str | None:
    """The shipped drafter's folder, if it is there and was made for this target."""
    found = target == DEFAULT_TARGET and (DEFAULT_DRAFTER / "config.json").is_file()
    return str(DEFAULT_DRAFTER) if found else None


def target_of(spec: str) -> str | None:
    """The target that a drafter's folder names; None where it names none."""
    folder = local_path(spec)
    files = [folder / name for name in ("config.json", RECORD)]
    config, record = (read_object(file) if file.is_file() else {} for file in files)
    for target in (config.get("target"), record.get("target")):
        if isinstance(target, str) and target:
            return target
    return (made_for(folder, config) or None) if layout_of(config) else None


def target_for(given: str | None, drafter: str) -> str:
    """The target that is asked for, else the one that the drafter's folder names, else the default
    one. Raises UserError where the folder names a target that can't exist here."""
    if given:
        return given
    named = target_of(drafter) or DEFAULT_TARGET
    try:
        check_name(named)
    except UserError as error:
        made = f"drafter {drafter!r} was trained for it; use --target to choose another"
        raise UserError(f"{error}; {made}") from None
    return named
