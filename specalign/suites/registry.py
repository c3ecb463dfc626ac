"""The suites by name, and the groups that name several at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specalign.common.errors import UserError, nearest
from specalign.suites.benchmarks import SUITES
from specalign.suites.prompt import Suite
from specalign.suites.sources import Loaded, choose, load_prompts_file, load_suite

GROUPS: dict[str, tuple[str, ...]] = {
    "chat": ("mtbench",),
    "reasoning": ("gpqa",),
    "coding": ("humaneval",),
    "math": ("gsm8k", "math500", "aime", "champ"),
}


def resolve(names: str) -> list[tuple[Suite, bool]]:
    """`a,b,group` → the suites in that order, each once, and whether each was named itself: one
    that only a group names may be left out if its prompts are unavailable.

    Raises:
        UserError: empty, or an unknown name.
    """
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UserError(f"--suite={names!r} names no suite{nearest('', [*SUITES, *GROUPS])}")
    found: dict[str, bool] = {}
    for name in wanted:
        if name not in SUITES and name not in GROUPS:
            raise UserError(f"--suite: unknown suite {name!r}{nearest(name, [*SUITES, *GROUPS])}")
        for member in GROUPS.get(name, (name,)):
            found[member] = found.get(member, False) or name in SUITES
    return [(SUITES[name], named) for name, named in found.items()]


def prompts_of(
    suite: str | None,
    prompts: Path | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    column: str | None = None,
) -> tuple[list[Loaded], list[str]]:
    """The suites with at most `limit` prompts each, and a line for each unavailable suite that only
    a group names.

    Args:
        suite: a comma list of suites and groups; with `prompts`, the name of that file's prompts.
        prompts: a file of prompts in place of suites. column: of it with the prompts.
        data_dir: local copies of the suites.

    Raises:
        UserError: an unknown name, or no prompts.
    """
    found: list[Loaded] = []
    skipped: list[str] = []
    if column is not None and prompts is None:
        raise UserError("--prompts-column is a column of --prompts FILE, which is not given")
    if prompts is not None:
        if suite is not None and ("," in suite or suite in GROUPS):
            raise UserError("--prompts replaces one suite: give --suite one name, or leave it out")
        if data_dir is not None:
            raise UserError("--prompts and --data-dir are two sources of prompts: give one")
        found.append(load_prompts_file(prompts, suite, column))
    else:
        for one, named in resolve(suite or "builtin"):
            try:
                found.append(load_suite(one, data_dir))
            except UserError as error:
                if named:
                    raise
                skipped.append(str(error))
        if not found:
            raise UserError(skipped[0])
    return [replace(suite, prompts=choose(suite.prompts, limit)) for suite in found], skipped
