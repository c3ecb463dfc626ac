"""Rows of hub data sets, with and without the hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from specalign.common.errors import UserError
from specalign.rows import hub_rows as module
from specalign.rows.hub_rows import hub_rows, hub_table, is_hub_usable


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []

    def load(name: str, config: str | None, **options: Any) -> Any:
        calls.append((name, config, options))
        return datasets.Dataset.from_dict({"prompt": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(module, "hub_reachable", lambda: False)
    yield calls


def test_offline_the_cache_is_asked(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = hub_rows("owner/name", "train", "en", "v1", "data.prompts", streaming=True)
    assert list(rows) == [{"prompt": "a"}, {"prompt": "b"}] and is_hub_usable()
    assert asked == [("owner/name", "en", {"split": "train", "revision": "v1", "streaming": False})]


def test_what_can_not_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(module, "hub_reachable", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("{}")
    says = r"data.prompts='owner/name': .*Hub is unreachable.*Config name is missing. .*\(data.prompts_config\)"
    with pytest.raises(UserError, match=says):
        list(hub_rows("owner/name", "train", None, None, "data.prompts"))
    with pytest.raises(UserError, match=r"did you mean 'prompts.jsonl'"):
        list(hub_rows("prompts.json", "train", None, None, "data.prompts"))
    monkeypatch.setattr(module, "hub_reachable", lambda: True)
    with pytest.raises(UserError, match="^Config name is missing. Please pick one$"):
        hub_table("owner/name", "train")


def test_images_and_sound_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = {"prompt": ["a"], "image": [{"bytes": b"no image", "path": None}]}
    table = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: table)
    monkeypatch.setattr(module, "hub_reachable", lambda: True)
    assert [row["prompt"] for row in hub_table("owner/name", "train")[0]] == ["a"]
