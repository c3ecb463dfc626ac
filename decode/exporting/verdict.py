"""What was found about one export, and the exit code of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from decode.exporting.serving import Snippet

FILES_WRONG, ENGINE_DIFFERS = 1, 3
"""Exit codes; 0 = the same drafter, 2 = wrong input."""


@dataclass
class ExportVerdict:
    """What was found about one export.

    files_same: the files hold the drafter; None = not checked. engine_same: the engine computes the
    same with them. serve: lines that serve the folder.
    """

    format: str
    folder: Path
    files_same: bool | None = None
    engine_same: bool = True
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    serve: list[Snippet] = field(default_factory=list)

    def add(self, reader: str, same: bool, line: str, engine: bool = False) -> None:
        """Add a comparison. engine: made with an engine's own code, so that a difference is the
        engine's."""
        if engine:
            self.engine_same &= same
        else:
            self.files_same = same and self.files_same is not False
        self.lines.append(f"{reader}: {line}")

    def add_contents(self, other: str) -> None:
        """Add the comparison of config and tensors: the first that differs, or empty."""
        line = f"DIFFERENT: {other}" if other else "the same"
        self.add("the files", not other, f"settings and tensors: {line}")

    @property
    def exit_code(self) -> int:
        if self.files_same is False:
            return FILES_WRONG
        return 0 if self.engine_same else ENGINE_DIFFERS

    @property
    def conclusion(self) -> str:
        """The last line."""
        if self.files_same is False:
            return "NOT THE SAME DRAFTER"
        if self.engine_same:
            return "THE SAME DRAFTER"
        files = "FILES NOT CHECKED" if self.files_same is None else "FILES RIGHT"
        return f"{files}, THE ENGINE DRAFTS DIFFERENTLY"
