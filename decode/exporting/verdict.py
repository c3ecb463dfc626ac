"""What was found of one export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Verdict:
    """Of one export. lines: what was compared; same: nothing differs; serve: lines that serve the folder."""

    format: str
    folder: Path
    same: bool = True
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    serve: list[str] = field(default_factory=list)

    def add(self, reader: str, same: bool, line: str) -> None:
        """A comparison with one reader."""
        self.same &= same
        self.lines.append(f"{reader}: {line}")
