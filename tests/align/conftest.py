"""What several files of training tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.recipe_reader import load_recipe


@pytest.fixture(scope="session")
def debug_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from align.synthesize import synthesize
    from align.target import load_target

    folder = tmp_path_factory.mktemp("debug") / "data"
    synthesize(load_recipe(["recipe=debug_block"]), load_target("debug"), folder, quiet=True)
    return folder
