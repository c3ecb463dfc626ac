"""The prompts that a command's options name."""

from __future__ import annotations

from typing import Any

from align.errors import UserError
from decode.suites.registry import GROUPS, resolve
from decode.suites.sources import Loaded, choose, load_prompts_file, load_suite


def prompts_of(options: Any) -> tuple[list[Loaded], list[str]]:
    """The suites with their prompts, cut to `--limit`, and a line for each that a group named and no source
    has. Read are `suite`, `prompts`, `data_dir` and `limit`.
    """
    found: list[Loaded] = []
    skipped: list[str] = []
    if options.prompts is not None:
        if options.suite is not None and ("," in options.suite or options.suite in GROUPS):
            raise UserError("--prompts takes the place of one suite: give --suite one name, or leave it out")
        if options.data_dir is not None:
            raise UserError("--prompts and --data-dir are two places for prompts: give one")
        found.append(load_prompts_file(options.prompts, options.suite))
    else:
        for suite, named in resolve(options.suite or "builtin"):
            try:
                found.append(load_suite(suite, options.data_dir))
            except UserError as error:
                if named:
                    raise
                skipped.append(str(error))
        if not found:
            raise UserError(skipped[0])
    cut = [Loaded(s.name, s.title, s.group, choose(s.prompts, options.limit), s.source) for s in found]
    return cut, skipped
