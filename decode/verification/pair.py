"""The options of `decode.verify`, checked before torch is imported."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args, get_type_hints

from decode.systems.drafter_folders import check_methods, check_there, read_drafters
from decode.systems.parsing import Method, read_methods
from decode.systems.registry import LOSSY
from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject, convert
from specalign.common.text import say
from specalign.lm.names import check_given
from specalign.suites.prompt import Prompt
from specalign.suites.registry import prompts_of

LIMIT, NEW_TOKENS = 3, 32
"""For a verdict within 90 seconds on two cores with the shipped pair."""


@dataclass(frozen=True)
class VerifyConfig:
    """The options of `decode.verify`, which its --help explains."""

    target: str | None = None
    drafter: str | None = None
    methods: str | None = None
    drafter_tokenizer: str | None = None
    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    limit: int = LIMIT
    max_new_tokens: int = NEW_TOKENS
    self_test: bool = False
    dtype: str = "float32"
    device: str = "auto"
    engine: str = "auto"
    trust_remote_code: bool = False
    template_kwargs: JsonObject = field(default_factory=dict)
    system: str | None = None
    out: Path = Path("runs/verify")

    @staticmethod
    def read_options(options: JsonObject, where: str) -> JsonObject:
        """The options as a replay.json has them. Raises UserError for one that does not exist, or
        of another type."""
        kinds, found = get_type_hints(VerifyConfig), {}
        for key, value in options.items():
            if key not in kinds:
                raise UserError(f"{where}: options.{key} is unknown{nearest(key, kinds)}")
            is_path = Path in (kinds[key], *get_args(kinds[key]))
            kind = str | None if is_path else kinds[key]
            found[key] = convert(value, kind, f"options.{key}", where)
            if is_path and value is not None:
                found[key] = Path(value)
        return found

    def load_prompts(self) -> list[Prompt]:
        """Check the options, and read the prompts. Raises UserError for a misspelt method, one
        that changes the distribution, a drafter that is not there, or no prompts."""
        if self.engine == "compiled":
            raise UserError("--engine=compiled: what is compiled can't be recorded; use captured")
        if self.methods is not None:
            if self.drafter_tokenizer:
                raise UserError("--drafter-tokenizer can't be combined with --methods")
            methods = read_methods(self.methods).methods
            for method in methods:
                if reason := unverifiable(method):
                    raise UserError(reason)
            check_methods(methods, read_drafters(self.drafter), self.target)
        elif self.drafter == "none":
            what = "--drafter=none: there are no drafts to verify"
            raise UserError(f"{what}: name a drafter, or lookup")
        elif self.drafter is not None:
            check_there(self.drafter)
        check_given(self.target, self.device)
        suite = self.suite or (None if self.prompts else "mtbench")
        given = (self.prompts, self.data_dir, self.limit, self.prompts_column)
        suites, skipped = prompts_of(suite, *given)
        for line in skipped:
            say(f"skipped: {line}")
        return [prompt for one in suites for prompt in one.prompts]


def unverifiable(method: Method) -> str | None:
    """Why there is nothing to verify, or None."""
    if not method.system.drafts:
        return f"method {method.name!r}: it drafts nothing"
    if method.verifier.startswith(LOSSY):
        return f"method {method.name!r}: it changes the output's distribution on purpose"
    return None
