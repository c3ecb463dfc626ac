"""The option --drafter, a comma list of `FOLDER` or `KIND=FOLDER`: whether each drafter is there, and of which kind it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from align.common.errors import UserError, nearest
from align.common.files import expanded, sha256_file
from align.common.hub import hub_id, is_hub_id, local_path, missing
from align.common.provenance import CHECKOUT
from align.common.schema import read_object
from align.gguf.files import gguf_of_folder, is_hub_layout
from align.importing.layouts import architectures_of, is_block, layout_of, made_for
from align.target.names import DEFAULT_TARGET, WHEELS, check_name
from decode.method_names import LOOKUP
from decode.methods.registry import ROLES
from decode.methods.spec import check_parts, read_method

AUTO = "auto"
"""In place of a drafter: the shipped one where it was made for the target, else lookup."""
DEFAULT_DRAFTER = CHECKOUT / "pretrained" / "smollm2-135m-block"
"""The drafter that the repository ships, made for the default target."""
NO_FOLDERS = (LOOKUP, "none")
"""Words that may stand where a drafter is named, and name no trained one."""
_PACKAGED = DEFAULT_TARGET
_MOST_HASHED = 1 << 28
"""Bytes of a file that may be the default target's."""
BLOCKS = ("block", "variable_prefix")
"""Both are block drafters, which differ in their training alone: either may be used as the other."""


def shipped_for(target: str) -> str | None:
    """The shipped drafter's folder, if it is there and was made for this target."""
    there = _is_default(target) and (DEFAULT_DRAFTER / "config.json").is_file()
    return str(DEFAULT_DRAFTER) if there else None


def choose_drafter(target: str) -> tuple[str, str]:
    """What `auto` stands for: the shipped drafter's folder, else lookup; and a note, empty for the shipped one."""
    shipped = shipped_for(target)
    if shipped is not None:
        return shipped, ""
    missing = f"at {DEFAULT_DRAFTER}" if _is_default(target) else f"is shipped for {target}"
    return LOOKUP, f"note: no drafter {missing}: drafting by prompt lookup"


def _is_default(target: str) -> bool:
    """Whether it names the default target: by its hub id, its folder in the hub's cache, or the GGUF file of its package."""
    if target == DEFAULT_TARGET or target == f"wheel:{WHEELS[_PACKAGED][0]}":
        return True
    path = expanded(target)
    with suppress(UserError):  # several files: loading says so
        if path.is_dir() and not is_hub_layout(path):
            path = gguf_of_folder(path) or path
    if path.is_file():
        return path.stat().st_size < _MOST_HASHED and sha256_file(path) == WHEELS[_PACKAGED][3]
    return path.is_dir() and hub_id(target) == DEFAULT_TARGET


def read_drafters(text: str | None, default: str | None = None) -> list[tuple[str | None, str]]:
    """A comma list as (kind or None, folder)."""
    found: list[tuple[str | None, str]] = []
    for word in (text or default or "").split(","):
        role, equals, folder = word.strip().partition("=")
        if not word.strip():
            continue
        if equals and role not in ROLES:
            raise UserError(f"--drafter: unknown kind {role!r}{nearest(role, ROLES)}")
        found.append((role, folder) if equals else (None, role))
    return found


def given_drafters(text: str | None, default: str | None = None) -> list[tuple[str | None, str]]:
    """`read_drafters`, after a check that each of them is there. Loads nothing.

    Raises:
        UserError: a drafter that is not there.
    """
    found = read_drafters(text, default)
    for role, folder in found:
        if folder in NO_FOLDERS:
            raise UserError(f"--drafter={folder!r}: name a drafter's folder; lookup and plain are --methods")
        if role != "autoregressive":  # which is a target's spec: a package or a GGUF file too
            check_there(folder)
    return found


def drafters_by_role(
    text: str | None, default: str | None = None, note: Callable[[str], object] = lambda line: None
) -> dict[str, str]:
    """The folders of `given_drafters` by kind, in their order. The files of a bare folder say its kind. `note` gets a line for a
    folder whose files do not confirm the kind that was given.

    Raises:
        UserError: a drafter that is not there or is of another kind than was given, or two of one kind.
    """
    found: dict[str, str] = {}
    for role, folder in given_drafters(text, default):
        if role is None:
            role = role_of(folder)
        else:
            _check_kind(role, folder, note)
        if role in found:
            raise UserError(
                f"--drafter: {found[role]} and {folder} are both of the kind {role}: say which with KIND=FOLDER"
            )
        found[role] = folder
    return found


def possible_roles(text: str | None, default: str | None = None) -> dict[str, str]:
    """The drafters of `given_drafters` by every kind that they may be of, as far as their names and config.json say it. Without
    torch: a command refuses a method at once for which there can be no drafter.

    Raises:
        UserError: as `given_drafters`.
    """
    found: dict[str, str] = {}
    for role, folder in given_drafters(text, default):
        config = local_path(folder) / "config.json"
        values = read_object(config) if config.is_file() else {}
        roles = [role] if role else ["block"] if is_block(values) else ["diffusion", "autoregressive"]
        if not role and not is_block(values) and values.get("model_type") is None:
            roles = list(ROLES)
        found.update(dict.fromkeys(roles, folder))
    return found


def check_named(names: Sequence[str], drafters: str | None, target: str | None) -> None:
    """Raises UserError, without torch, for a method by name (`all` aside) for which there can be no drafter. `target`: None = the
    default one, for which a drafter is shipped."""
    known = possible_roles(drafters, shipped_for(DEFAULT_TARGET if target is None else target))
    check_parts([read_method(name) for name in names if name != "all"], known)


def check_there(spec: str) -> None:
    """Raises UserError, before a target is loaded, for a name that is neither a drafter's folder nor a hub id."""
    folder = local_path(spec)
    if (
        spec in NO_FOLDERS
        or folder.is_file()
        or any((folder / x).exists() for x in ("config.json", ".hydra"))
    ):
        return
    if folder.is_dir():
        # the folder of a run holds the drafter's folder
        inside = [p.parent for p in sorted(folder.glob("*/config.json"))]
        inside = [p for p in inside if p.name == "drafter"] or inside
        hint = f" (did you mean {str(inside[0])!r}?)" if len(inside) == 1 else ""
        raise UserError(f"drafter {spec!r}: no config.json in that folder{hint}")
    if not is_hub_id(spec):
        raise missing(f"drafter {spec!r}", spec, hint="" if "/" in spec else nearest(spec, NO_FOLDERS[:1]))


def _check_kind(role: str, folder: str, note: Callable[[str], object]) -> None:
    """Raises UserError where the folder's files say that it is of another kind than `role`."""
    if role != "variable_prefix" and not (local_path(folder) / "config.json").is_file():
        return
    said = role_of(folder)
    if (role in BLOCKS) != (said in BLOCKS) or (role, said) == ("diffusion", "autoregressive"):
        raise UserError(f"--drafter {role}={folder}: that is a drafter of the kind {said} ({said}={folder})")
    if role == "variable_prefix" != said:
        note(
            f"note: {folder} does not say that it was trained to go on from a drafted prefix (recipe=variable_prefix)"
        )


def role_of(spec: str) -> str:
    """A drafter's kind by its config.json: a block drafter, or D²SD's second one if its training says so; a causal language
    model; anything else counts as a standalone diffusion drafter.

    Raises:
        UserError: a file, or neither a folder nor a hub id that can be had.
    """
    from align.common.schema import read_config, read_object
    from align.importing.kinds import RECORD

    path = local_path(spec)
    if path.is_file():
        raise UserError(
            f"--drafter={spec}: that is a file; a drafter is a folder with its config.json and weights"
        )
    if not path.is_dir():
        path = _fetched(spec, ("config.json", RECORD))
    if not (path / "config.json").is_file():
        return "diffusion"
    values = read_config(path)
    if is_block(values):
        extra = values.get("extra")  # written by training
        return "variable_prefix" if isinstance(extra, dict) and extra.get("prefix_decay") else "block"
    record = path / RECORD
    if record.is_file() and read_object(record).get("kind") != "autoregressive":
        return "diffusion"
    return "autoregressive" if _causal("".join(architectures_of(values)[:1])) else "diffusion"


def _fetched(spec: str, files: Sequence[str]) -> Path:
    """A folder with these files of a hub id, or with the model of a registry package after its conversion."""
    from align.common.hub import model_folder
    from align.target.loading import resolve_folder

    try:
        found = resolve_folder(spec)
    except UserError:
        found = spec
    return found if isinstance(found, Path) else model_folder(spec, "drafter", files)


def _causal(architecture: str) -> bool:
    """Whether that class of transformers is an autoregressive language model's."""
    from align.models.families import FAMILIES

    masked = {name for family in FAMILIES.values() for name in family.architectures}
    return architecture.endswith(("ForCausalLM", "LMHeadModel")) and architecture not in masked


def target_of(spec: str) -> str | None:
    """The target that a drafter's folder names; None where it names none."""
    for name in ("config.json", "drafter.json"):
        file = local_path(spec) / name
        if file.is_file() and isinstance(made := read_object(file).get("target"), str) and made:
            return made
    config = local_path(spec) / "config.json"
    if config.is_file() and layout_of(values := read_object(config)):
        return made_for(local_path(spec), values) or None
    return None


def target_for(given: str | None, drafter: str) -> str:
    """The target that is asked for, else the one that the drafter's folder names, else the default one.

    Raises:
        UserError: the folder names one behind which there can be nothing here.
    """
    named = None if given else target_of(drafter)
    if named is not None:
        try:
            check_name(named)
        except UserError as error:
            raise UserError(f"{error}; drafter {drafter!r} was made for it: --target names another") from None
    return given or named or DEFAULT_TARGET
