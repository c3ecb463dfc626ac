"""The options of `decode.verify`, and the methods that it decodes with. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from decode.systems.drafter_folders import (
    BLOCKS,
    check_there,
    drafters_by_kind,
    drafters_for,
    kind_of,
    read_drafters,
    shipped_for,
)
from decode.systems.parsing import Method, check_drafters, read_method, read_methods
from decode.systems.registry import DIFFUSION, LOOKUP, LOSSY, ORDERS
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.names import DEFAULT_TARGET, check_given
from specalign.suites.prompt import Prompt
from specalign.suites.registry import prompts_of

LIMIT, NEW_TOKENS = 4, 32
"""For a verdict within 90 seconds on two cores with the shipped pair."""
_CHAIN, _TREE, _COPIES = "drafter:tree_nodes=0", "drafter:tree_nodes=5", "drafter:copying=true"
BLOCK_METHODS = [
    f"{_CHAIN}:verifier=token", _CHAIN, _TREE, f"{_TREE}:copying=true",
    *(f"{_TREE}:verifier={name}" for name in ("recursive", "traversal", "k_seq")),
    f"{_COPIES}:verifier=token",
]  # fmt: skip
DIFFUSION_METHODS = [
    "drafter:verifier=token", "drafter", "drafter:steps=2", _COPIES, f"{_COPIES}:verifier=token",
    *(f"drafter:steps=2:order={order}" for order in ORDERS[1:]),
]  # fmt: skip


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
    trust_remote_code: bool = False
    template_kwargs: JsonObject = field(default_factory=dict)
    system: str | None = None
    out: Path = Path("runs/verify")

    def load_prompts(self) -> list[Prompt]:
        """The prompts. Raises UserError for none."""
        check_given(self.target, self.device)
        suite = self.suite or (None if self.prompts else "mtbench")
        suites, _ = prompts_of(suite, self.prompts, self.data_dir, self.limit, self.prompts_column)
        return [prompt for one in suites for prompt in one.prompts]

    def find_methods(self) -> tuple[dict[str, str], list[Method], list[str]]:
        """Drafters' folders by kind, the methods, and a line for each of `all` that is left out.
        Raises UserError for a misspelt method, one that changes the distribution, or a drafter that
        is not there."""
        target = self.target or DEFAULT_TARGET
        if self.methods is not None:
            if self.drafter_tokenizer:
                raise UserError("--drafter-tokenizer can't be combined with --methods")
            given = read_methods(self.methods)
            drafters = drafters_by_kind(drafters_for(read_drafters(self.drafter), target))
            check_drafters(given.methods, drafters)
            chosen, left_out = given.expand(drafters)
            reasons = {method: _why_unverifiable(method) for method in chosen}
            for method in given.methods:
                if reasons[method]:
                    raise UserError(reasons[method])
            left_out += filter(None, reasons.values())
            return drafters, [method for method in chosen if not reasons[method]], left_out
        if self.drafter == "none":
            what = "--drafter=none: there are no drafts to verify"
            raise UserError(f"{what}: name a drafter, or lookup")
        if self.drafter is not None:
            check_there(self.drafter)
        name = self.drafter or shipped_for(target) or LOOKUP
        drafters = {} if name == LOOKUP else {kind_of(name): name}
        methods = ["drafter" if drafters else LOOKUP]
        if any(kind in drafters for kind in BLOCKS):
            methods = BLOCK_METHODS
        elif DIFFUSION in drafters and self.drafter_tokenizer is None:
            methods = DIFFUSION_METHODS
        return drafters, list(map(read_method, methods)), []


def _why_unverifiable(method: Method) -> str:
    if not method.system.drafts:
        return f"method {method.name!r}: it drafts nothing"
    if method.verifier.startswith(LOSSY):
        return f"method {method.name!r}: it changes the output's distribution on purpose"
    return ""
