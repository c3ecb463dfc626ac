"""Every format has a name, a maker and lines that serve it."""

from __future__ import annotations

from decode.exporting.registry import FORMATS
from decode.method_names import EXPORTS


def test_names_are_those_of_the_command_and_every_line_names_the_folder() -> None:
    assert {*FORMATS, "draft_model"} == set(EXPORTS)
    for name, form in FORMATS.items():
        lines = form.serve("TARGET", "FOLDER", 4)
        assert lines and any("FOLDER" in line for line in lines), name
