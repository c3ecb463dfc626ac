"""What several files of decoding tests share."""

from pathlib import Path

import pytest

from decode.evaluation import figures
from decode.systems.opening import OpenDrafters
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import diffusion_drafter as drafter
from tests.builders import shallow_target
from tests.builders import sharp_block_network as network


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def shallow() -> Target:
    """For tests that decode hundreds of texts."""
    return shallow_target(2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("Say one one one one.\nWhy is the sky blue?\nCount: 1 2 3 1 2 3 1 2\n")
    return path


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/decode/evaluation/test_page.py draws them."""
    monkeypatch.setattr(figures, "share_card", lambda *args: b"png")


@pytest.fixture(scope="module")
def parts(target: Target) -> OpenDrafters:
    return parts_for(target)


@pytest.fixture(scope="module")
def shallow_parts(shallow: Target) -> OpenDrafters:
    return parts_for(shallow)


def parts_for(target: Target) -> OpenDrafters:
    """A drafter of every kind, untrained."""
    drafters = {
        "block": network(target, 0, "shared_kv"),
        "variable_prefix": network(target, 1, "shared_kv", block_layout="fill_in"),
        "diffusion": drafter(target, "ddit"),
        "autoregressive": load_target("debug", dtype="float32", device="cpu"),
    }
    return OpenDrafters(target, drafters)
