"""The options of `decode.verify`, and the methods that it decodes with. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from decode.systems.drafter_folders import (
    BLOCKS,
    check_methods,
    check_there,
    drafters_by_kind,
    drafters_for,
    kind_of,
    read_drafters,
    shipped_for,
)
from decode.systems.parsing import Method, read_method, read_methods
from decode.systems.registry import DIFFUSION, LOOKUP, LOSSY, ORDERS
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.names import DEFAULT_TARGET, check_given
from specalign.suites.prompt import Prompt
from specalign.suites.registry import prompts_of

LIMIT, NEW_TOKENS = 4, 32
"""For a verdict within 90 seconds on two cores with the shipped pair."""
_CHAIN, _TREE, _COPIES = "drafter:tree_nodes=0", "drafter:tree_nodes=5", "drafter:copying=true"
_IN_ORDER = [f"drafter:steps=2:order={order}" for order in ORDERS[1:]]
OF_BLOCKS = (
    [_CHAIN, _TREE, f"{_TREE}:copying=true"],
    [
        *(f"{_CHAIN}:verifier={name}" for name in ("token", "block")),
        *(f"{_TREE}:verifier={name}" for name in ("point_mass", "recursive", "traversal", "k_seq")),
        f"{_COPIES}:verifier=token",
    ],
)
"""Of block drafters, the methods whose greedy and coupled texts are compared, and those that
sample."""
OF_DIFFUSION = (
    ["drafter", "drafter:steps=2", *_IN_ORDER, _COPIES],
    [
        *(f"drafter:verifier={name}" for name in ("token", "block")),
        "drafter:steps=2:verifier=block",
        *(f"{text}:verifier=hybrid" for text in _IN_ORDER),
        f"{_COPIES}:verifier=token",
    ],
)


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
        """Check the options, and read the prompts. Raises UserError for a misspelt method, one
        that changes the distribution, a drafter that is not there, or no prompts."""
        if self.methods is not None:
            if self.drafter_tokenizer:
                raise UserError("--drafter-tokenizer can't be combined with --methods")
            methods = read_methods(self.methods).methods
            for method in methods:
                if reason := why_unverifiable(method):
                    raise UserError(reason)
            check_methods(methods, read_drafters(self.drafter), self.target)
        elif self.drafter == "none":
            what = "--drafter=none: there are no drafts to verify"
            raise UserError(f"{what}: name a drafter, or lookup")
        elif self.drafter is not None:
            check_there(self.drafter)
        check_given(self.target, self.device)
        suite = self.suite or (None if self.prompts else "mtbench")
        suites, _ = prompts_of(suite, self.prompts, self.data_dir, self.limit, self.prompts_column)
        return [prompt for one in suites for prompt in one.prompts]

    def find_drafters(self) -> dict[str, str]:
        """The drafters' folders by kind."""
        target = self.target or DEFAULT_TARGET
        if self.methods is not None:
            return drafters_by_kind(drafters_for(read_drafters(self.drafter), target))
        name = self.drafter or shipped_for(target) or LOOKUP
        return {} if name == LOOKUP else {kind_of(name): name}

    def find_methods(
        self, drafters: dict[str, str]
    ) -> tuple[list[Method], list[Method], list[str]]:
        """The methods whose texts are compared at temperature 0 and coupled, those that sample,
        and a line for each of `all` that is left out."""
        if self.methods is not None:
            chosen, left_out = read_methods(self.methods).expand(drafters)
            reasons = {method: why_unverifiable(method) for method in chosen}
            left_out += [reason for reason in reasons.values() if reason]
            verified = [method for method, reason in reasons.items() if reason is None]
            return verified, verified, left_out
        method = "drafter" if drafters else LOOKUP
        compared, drawn = [method], [f"{method}:verifier=point_mass"]
        if any(kind in drafters for kind in BLOCKS):
            compared, drawn = OF_BLOCKS
        elif DIFFUSION in drafters and self.drafter_tokenizer is None:
            compared, drawn = OF_DIFFUSION
        return list(map(read_method, compared)), list(map(read_method, drawn)), []


def why_unverifiable(method: Method) -> str | None:
    """Why there is nothing to verify, or None."""
    if not method.system.drafts:
        return f"method {method.name!r}: it drafts nothing"
    if method.verifier.startswith(LOSSY):
        return f"method {method.name!r}: it changes the output's distribution on purpose"
    return None
