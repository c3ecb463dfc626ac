"""Standalone drafters as files: saved, loaded, published, refused."""

import json
from pathlib import Path

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.makers.standalone import make_standalone
from specalign.common.errors import UserError
from specalign.formats.standalone import load_standalone, save_standalone
from specalign.lm.model import Target
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from specalign.models.diffusion_context import DiffusionContext
from tests.builders import DIFFUSION_KINDS as KINDS
from tests.builders import diffusion_drafter as drafter
from tests.published_ddits import state, write_hub


@pytest.mark.parametrize("kind", KINDS)
def test_saved_drafters_come_back(target: Target, kind: str, tmp_path: Path) -> None:
    made = drafter(target, kind)
    save_standalone(made, tmp_path / "d")
    again = load_standalone(tmp_path / "d", target)
    assert again.config == made.config and again.mask_id == made.mask_id
    block = torch.full((3,), made.mask_id)
    rows = []
    for one in (made, again):
        context = DiffusionContext(one.eval(), 20)
        context.extend([5, 6, 7])
        rows.append(context.denoise(block))
    assert torch.equal(rows[0], rows[1])


FRESH = {"hidden_size": 32, "layers": 2, "heads": 2, "cond_dim": 16}


def write_mdlm(folder: Path, rows: int, mask_id: int) -> Path:
    """MDLM's hub layout."""
    network = DDiT(DDiTConfig(rows, 32, 2, 2, 16, time_input="zero"))
    config = {
        "model_type": "mdlm", "vocab_size": rows, "hidden_dim": 32, "n_blocks": 2, "n_heads": 2, "cond_dim": 16,
        "time_conditioning": False, "mask_token_id": mask_id,
    }  # fmt: skip
    return write_hub(folder, config, state(network, "backbone."))


def test_a_mask_inside_the_vocabulary_stays_where_it_is(target: Target, tmp_path: Path) -> None:
    """MDLM on LM1B: BERT's [MASK], id 103."""
    loaded = load_standalone(write_mdlm(tmp_path / "one", target.vocab_size, 103), target)
    save_standalone(loaded, tmp_path / "two")
    for made in (loaded, load_standalone(tmp_path / "two", target)):
        assert made.mask_id == 103
        assert float(made.target_logits(torch.zeros(target.vocab_size))[103]) <= -1e4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prediction": "score"}, "prediction='score' is unknown"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"window": "a"}, "window='a' must be"),
        ({"schedule": {"name": "linear"}}, "schedule 'linear' is unknown"),
        ({"mask_id": 9999}, "mask_id=9999 is not within"),
    ],
)
def test_a_broken_record_is_one_line(
    target: Target, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    save_standalone(make_standalone(target, DrafterConfig(kind="ddit", **FRESH)), tmp_path)  # type: ignore[arg-type]
    record = tmp_path / "drafter.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    with pytest.raises(UserError, match=says):
        load_standalone(tmp_path, target)


def test_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    write_mdlm(tmp_path, 320, 270)
    with pytest.raises(UserError, match="drafter 320 \\(with mask token\\)"):
        load_standalone(tmp_path, target)
