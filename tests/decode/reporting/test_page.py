"""The page stands alone."""

from __future__ import annotations

import re
from pathlib import Path

from decode.reporting.render import make_report
from tests.measurements import fill_report as fill


def test_the_page_stands_alone(tmp_path: Path) -> None:
    make_report(fill(tmp_path / "o"))
    page = (tmp_path / "o/report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert "t/&lt;model&gt;" in page and "<model>" not in page
    assert "6 of 9" in page and "2.00×" in page
    assert (tmp_path / "o/report.png").read_bytes().startswith(b"\x89PNG")
