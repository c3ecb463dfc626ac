"""What a command lacks is named before it begins. (Before torch is imported: tests/decode/test_early.py.)"""

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.preflight import check_training
from specalign.common.errors import UserError


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("target.name=me/finetune", "target 'me/finetune'.*hf download me/finetune$"),
        ("drafter.init=lab/drafter", "drafter.init='lab/drafter'.*hf download lab/drafter$"),
        ("data.prompts=lab/p", "data.prompts='lab/p'.*hf download --repo-type dataset lab/p$"),
        ("data.text=lab/t", "data.text='lab/t'.*hf download --repo-type dataset lab/t$"),
        ("trainer.logger=csv,wandb", r"trainer.logger=wandb: not installed \(pip install"),
    ],
)
def test_what_is_missing_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specalign.common.hub.hub_reachable", lambda: False)
    monkeypatch.setattr("align.config.hardware.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        check_training(load_recipe(["recipe=debug_block", word, f"output={tmp_path / 'o'}"]))


def test_a_device_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Lines are added to it while training runs; a pipe would be waited for."""
    name = "metrics.csv"
    (tmp_path / name).symlink_to("/dev/null")
    with pytest.raises(OSError, match=f"is not a regular file.*{name}"):
        check_training(load_recipe(["recipe=debug_block", f"output={tmp_path}"]))
