"""The kind of a drafter by the small files of its folder, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specalign.formats.kinds import DrafterKind, kind_of_config, kind_of_drafter

DREAM = {"architectures": ["DreamModel"], "model_type": "Dream"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("values", "record", "name"),
    [
        ({"model_type": "block_drafter", "context": "shared_kv"}, {}, "shared_kv"),
        ({"model_type": "block_drafter", "context": "taps"}, {}, "taps"),
        ({"architectures": ["DFlashDraftModel"]}, {}, "taps"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 4}, {}, "taps"),
        ({"speculators_model_type": "dflash"}, {}, "taps"),
        ({"model_type": "mdlm"}, {"block_size": 6}, "ddit"),
        ({"model": {"hidden_size": 8}, "tokens": 50257}, {}, "ddit"),
        (DREAM, {}, "masked_lm"),
        ({"architectures": ["AdaptedMaskedLM"]}, {"block_size": 8}, "masked_lm"),
        ({"architectures": ["SDARForCausalLM"]}, {}, "masked_lm"),
        (LLAMA, {}, "autoregressive"),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, "autoregressive"),
        (LLAMA, {"kind": "autoregressive", "block_size": 5}, "autoregressive"),
    ],
)
def test_a_config_says_its_kind(values: dict[str, Any], record: dict[str, Any], name: str) -> None:
    found = kind_of_config(values, record)
    assert found is not None and found.name == name
    assert found.block_size == record.get("block_size")


def test_what_is_no_drafter_has_no_kind(tmp_path: Path) -> None:
    assert kind_of_config({}, {}) is None
    assert kind_of_drafter(str(tmp_path)) is None
    assert kind_of_drafter(str(tmp_path / "nowhere")) is None


def test_training_checkpoints_and_the_shipped_drafter(tmp_path: Path) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "last.ckpt").touch()
    assert (
        kind_of_drafter(str(tmp_path / "run"))
        == kind_of_drafter(str(tmp_path / "last.ckpt"))
        == DrafterKind("ddit")
    )
    assert kind_of_drafter("pretrained/smollm2-135m-block") == DrafterKind("block", "shared_kv")


def test_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DREAM))
    code = f"import sys; from specalign.formats.kinds import kind_of_drafter as k; k({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
