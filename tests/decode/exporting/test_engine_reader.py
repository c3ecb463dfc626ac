"""Engines' own classes are asked where they are installed; `test_ladder.py` and `test_reader.py` hold what they compute."""

from __future__ import annotations

import importlib.util

import pytest

from align.common.errors import UserError
from decode.exporting.engine_reader import PackageReader, TransformersReader, package

HERE = importlib.util.find_spec("dflash") is not None


def test_a_package_is_asked_for_where_it_is() -> None:
    assert TransformersReader.installed() and PackageReader.installed() == HERE


@pytest.mark.skipif(HERE, reason="the package is installed")
def test_a_package_that_is_not_installed_says_what_to_type() -> None:
    with pytest.raises(UserError, match="pip install dflash"):
        package()
