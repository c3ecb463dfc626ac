"""A machine without the hub says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.training.run import train


def test_a_machine_without_the_hub_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from align import synthesize
    from align.common.hub import hub_reachable

    words = ["recipe=gpt2xl_calib", f"output={tmp_path}"]
    hub_reachable.cache_clear()
    try:
        with pytest.raises(UserError, match="no data yet; write them with python -m align.synthesize"):
            train(load_recipe(words), quiet=True)
        with pytest.raises(SystemExit):
            synthesize.main(words)
        said = capsys.readouterr().err
        assert "gpt2-xl': the hub does not answer" in said and "name a folder in hub layout" in said
    finally:
        hub_reachable.cache_clear()
