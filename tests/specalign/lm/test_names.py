"""Names behind which no target can be are one line."""

import json
from pathlib import Path

import pytest

from specalign.common.errors import UserError
from specalign.lm.names import check_name


@pytest.mark.parametrize(
    "record", [{"drafter.json": {"kind": "ddit"}}, {"config.json": {"model_type": "block_drafter"}}]
)
def test_runs_and_drafters_are_refused(tmp_path: Path, record: dict[str, dict[str, str]]) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name, content in {"config.json": {}, **record}.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match="is a drafter, not a target"):
        check_name(str(folder))
    with pytest.raises(UserError, match=f"is the output of a training run.* --drafter {folder}"):
        check_name(str(tmp_path))
    (folder / "drafter.json").write_text('{"kind": "autoregressive"}')
    (folder / "config.json").write_text("{}")
    check_name(str(folder))  # a language model like any other


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    """transformers would open its base with it on top, unmerged."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="this is an adapter: merge it into its base"):
        check_name(str(tmp_path))
