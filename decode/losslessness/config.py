"""The options of `decode.verify`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUICK = {"limit": 4, "max_new_tokens": 32, "samples": 18}
"""Five to seven minutes on two cores with the shipped pair."""
THOROUGH = {"limit": 16, "max_new_tokens": 64, "samples": 360}


@dataclass(frozen=True)
class VerifyConfig:
    """The options of `decode.verify`, which its --help explains."""

    target: str | None = None
    drafter: str | None = None
    methods: str | None = None
    drafter_tokenizer: str | None = None
    suite: str | None = None
    prompts: Path | None = None
    data_dir: Path | None = None
    limit: int = QUICK["limit"]
    max_new_tokens: int = QUICK["max_new_tokens"]
    samples: int = QUICK["samples"]
    self_test: bool = False
    seed: int = 0
    device: str = "auto"
    trust_remote_code: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    out: Path = Path("runs/verify")
