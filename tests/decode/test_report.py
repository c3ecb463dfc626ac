"""The report command needs no torch, and says at once where it can't write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.measurements import fill_report as fill

ROOT = Path(__file__).parents[3]


def test_report_imports_no_torch(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    code = (
        "import sys; from decode.report import main\n"
        f"main([{str(folder)!r}])\n"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Suite S" in done.stdout and "report.html" in done.stdout
