"""What `decode.verify` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VerifyConfig:
    """The options of `decode.verify`; its --help says what they mean."""

    target: str | None = None
    drafter: str | None = None
    methods: str | None = None
    drafter_tokenizer: str | None = None
    suite: str | None = None
    prompts: Path | None = None
    data_dir: Path | None = None
    limit: int = 16
    max_new_tokens: int = 64
    samples: int = 400
    seed: int = 0
    device: str = "auto"
    out: Path = Path("runs/verify")
