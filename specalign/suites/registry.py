"""The suites by name, and the groups that name several at once."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from specalign.common.errors import UserError, nearest
from specalign.suites import long, own, speedbench
from specalign.suites.prompt import Suite
from specalign.suites.sources import Loaded, choose, load_prompts_file, load_suite

_BENCHMARKS = (
    "mtbench", "humaneval", "mbpp", "livecodebench", "gsm8k", "math500", "aime", "champ", "gpqa",
    "arc", "bbh", "mmlu_pro", "ifbench", "alpaca", "arena_hard", "tools", "cnn_dm", "openwebtext",
    "lm1b", "specbench", "redhat", "speedbench", "long",
)  # fmt: skip
"""Modules of this package with a `SUITE`."""
_MODULES = [import_module(f"specalign.suites.{name}") for name in _BENCHMARKS]
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (*(one.SUITE for one in _MODULES), *speedbench.LONG, own.BUILTIN, own.TASKS)
}
_GROUPED = ("chat", "reasoning", "coding", "math", "summarization", "continuation")
ALL = "all"
GROUPS: dict[str, tuple[str, ...]] = {
    **{
        group: tuple(name for name, suite in SUITES.items() if suite.group == group)
        for group in _GROUPED
    },
    ALL: tuple(name for name in SUITES if name != long.SUITE.name),
}
"""Several suites by one name; of a group those that are unavailable are left out."""


def resolve(names: str) -> list[Suite]:
    """`a,b,group` → the suites in that order, each once. Raises UserError: empty, or an unknown
    name."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UserError(f"--suite={names!r} names no suite{nearest('', [*SUITES, *GROUPS])}")
    for name in wanted:
        if name not in SUITES and name not in GROUPS:
            raise UserError(f"--suite: unknown suite {name!r}{nearest(name, [*SUITES, *GROUPS])}")
    members = [member for name in wanted for member in GROUPS.get(name, (name,))]
    return [SUITES[name] for name in dict.fromkeys(members)]


def prompts_of(
    suite: str | None,
    prompts: Path | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    column: str | None = None,
    documents: Path | None = None,
    context: int = long.CONTEXT,
) -> tuple[list[Loaded], list[str]]:
    """The suites with at most `limit` prompts each, and a line for each unavailable suite.

    Args:
        suite: a comma list of suites and groups; with `prompts`, the name of that file's prompts.
        prompts: a file of prompts in place of suites. column: of it with the prompts.
        data_dir: local copies of the suites.
        documents, context: the texts of the suite `long`, and the tokens of its prompts.

    Raises:
        UserError: an unknown name, or no prompts.
    """
    found: list[Loaded] = []
    skipped: list[str] = []
    if column is not None and prompts is None:
        raise UserError("--prompts-column needs --prompts FILE")
    if prompts is not None:
        if suite is not None and ("," in suite or suite in GROUPS):
            raise UserError("with --prompts, --suite takes a single name")
        if data_dir is not None:
            raise UserError("--prompts and --data-dir are mutually exclusive")
        found.append(load_prompts_file(prompts, suite, column))
    else:
        for one in resolve(suite or "builtin"):
            try:
                if one.name == long.SUITE.name:
                    found.append(_load_long(documents, context))
                else:
                    found.append(load_suite(one, data_dir))
            except UserError as error:
                skipped.append(str(error))
        if not found:
            raise UserError(skipped[0])
    return [replace(suite, prompts=choose(suite.prompts, limit)) for suite in found], skipped


def _load_long(documents: Path | None, context: int) -> Loaded:
    if documents is None:
        raise UserError("suite 'long' needs --documents: a file or folder of your own texts")
    suite = long.SUITE
    prompts = long.load_documents(documents, context)
    return Loaded(suite.name, suite.title, suite.group, prompts, str(documents))
