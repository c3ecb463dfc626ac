"""What several files of decoding tests share."""

from pathlib import Path

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.makers.block import from_target
from decode.evaluation import figures
from decode.systems.opening import OpenDrafters
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import diffusion_drafter, shallow_target
from tests.builders import sharp_block_network as network


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def endless(target: Target) -> None:
    """The target's texts do not end by themselves."""
    target.eos_ids = ()


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
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a record of its training."""
    options = DrafterConfig(block_size=3, layers=1, markov_rank=0)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(from_target(target, options, None), folder, dtype=torch.float32)
    return folder


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
        "diffusion": diffusion_drafter(target, "ddit"),
        "autoregressive": load_target("debug", dtype="float32", device="cpu"),
    }
    return OpenDrafters(target, drafters)
