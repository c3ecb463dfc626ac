"""The options of a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from decode.speculation.settings import Sampling
from decode.systems.drafter_folders import NamedDrafter
from decode.systems.parsing import MethodList, Sweep
from decode.systems.registry import COMBINED, DRAFTER, LOOKUP, PLAIN, GivenDrafter
from specalign.common.schema import JsonObject

DEFAULT_METHODS = (PLAIN, LOOKUP, DRAFTER, COMBINED)
TUNING_SUITE = "builtin"
"""The suite on which options are tuned: built-in prompts, not a benchmark."""
TUNING_PROMPTS = 12


@dataclass(frozen=True)
class EvalConfig:
    """The options of `decode.eval` (see its --help), and the results of tuning.

    tuning: this run chooses options and is no measurement. tuned: a line for each method whose
        options were tuned.
    """

    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    target: str | None = None
    drafters: tuple[NamedDrafter, ...] = ()
    methods: MethodList | None = None
    sweep: Sweep = Sweep()
    tune: int | None = None
    drafting: GivenDrafter = GivenDrafter()
    sampling: Sampling = Sampling(seed=0)
    limit: int | None = None
    max_new_tokens: int = 128
    repeats: int = 1
    warmup: int = 1
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    out: Path | None = None
    resume: bool = True
    no_hf_check: bool = False
    trust_remote_code: bool = False
    template_kwargs: JsonObject = field(default_factory=dict)
    system: str | None = None
    tuning: bool = False
    tuned: list[str] | None = None

    @property
    def recorded(self) -> JsonObject:
        """The options that run.json records as they were typed."""
        own = (
            "limit",
            "max_new_tokens",
            "repeats",
            "warmup",
            "tune",
            "system",
        )
        drafting = ("draft_tokens", "tree_nodes", "steps", "order")
        return {
            **{key: getattr(self, key) for key in own},
            **{key: getattr(self.sampling, key) for key in ("temperature", "top_p", "top_k")},
            **{key: getattr(self.drafting, key) for key in drafting},
            "seed": self.sampling.fixed_seed,
            "verifier": self.drafting.verifier_name,
            "trust_remote_code": self.trust_remote_code or None,
            "template_kwargs": self.template_kwargs or None,
        }
