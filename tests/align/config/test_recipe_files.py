"""Recipe files on disk: names, bases and sections for kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.config.recipe_files import find, list_recipes, read_with_bases
from specalign.common.errors import UserError
from tests.builders import write_recipe as write


def test_a_name_and_a_path_lead_to_a_file() -> None:
    assert "block" in list_recipes() and find("block", "here").is_file()
    with pytest.raises(
        UserError,
        match=r"here: recipe 'adapt_dflash': no such recipe or .yaml file \(did you mean 'adapt'\?\)",
    ):
        find("adapt_dflash", "here")


def test_bases_come_first_and_sections_are_flat(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "seed: 1\nkinds: {taps: {trainer: {max_steps: 3}}}\n")
    write(tmp_path, "b.yaml", "base: ./a.yaml\nseed: 2\n")
    (first, one), (second, two) = read_with_bases(tmp_path / "b.yaml")
    assert (first.name, second.name) == ("a.yaml", "b.yaml") and two == {"seed": 2}
    assert one == {"seed": 1, "kinds": {"taps": {"trainer.max_steps": 3}}}
