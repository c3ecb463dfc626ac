"""The options of a measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from decode.methods.options import DraftOptions
from decode.speculation.settings import Sampling

TUNING_SUITE = "builtin"
"""The suite on which settings are chosen: the prompts of this project, which are no benchmark."""
TUNING_PROMPTS = 12


@dataclass(frozen=True)
class EvalConfig:
    """The options of `decode.eval`, which its --help explains, and the results of tuning.

    Raises:
        UserError: more threads than a machine of this size can start.
    """

    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    target: str | None = None
    drafter: str | None = None
    methods: str | None = None
    sweep: list[str] = field(default_factory=list)
    tune: int | None = None
    drafting: DraftOptions = field(default_factory=DraftOptions)
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repeats: int = 1
    warmup: int = 1
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    out: Path | None = None
    resume: bool = True
    no_hf_check: bool = False
    trust_remote_code: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    race: bool = False
    """A race between settings, not a measurement."""
    tuned: list[str] | None = None
    """A line for each method whose setting was chosen by a race."""

    def __post_init__(self) -> None:
        most = 4 * (
            os.cpu_count() or 1
        )  # with far more threads than cores OpenMP ends the process without a message
        if self.threads is not None and self.threads > most:
            raise UserError(f"--threads={self.threads}: at most {most} on this machine")

    @property
    def sampling(self) -> Sampling:
        """Raises UserError for a number out of its range."""
        return Sampling(self.temperature, self.top_p, self.top_k, seed=self.seed)

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that are recorded as they were typed."""
        own = ("limit", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "repeats", "warmup")
        drafting = ("draft_tokens", "tree_nodes", "verifier", "steps", "order", "drafter_tokenizer")
        return (
            {key: getattr(self, key) for key in own}
            | {key: getattr(self.drafting, key) for key in drafting}
            | {"tune": self.tune, "trust_remote_code": self.trust_remote_code or None}
            | {"template_kwargs": self.template_kwargs or None, "system": self.system}
        )
