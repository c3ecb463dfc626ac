"""Where files are looked for: the hub and what a machine without it is told, the shipped drafter."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.preflight import check_training
from align.data.sources import check_prompts, check_text_source
from align.planning.drafter_sizes import read_init_config
from align.planning.target_sizes import read_target_sizes
from decode.systems.drafter_folders import check_there, kind_of
from specalign.common import hub
from specalign.common.errors import UserError
from specalign.common.hub import local_path, model_folder
from specalign.formats.masked_lm import load_masked_lm
from specalign.formats.sedd_mdlm import load_published
from specalign.lm.loading import load_target, load_tokenizer, resolve_folder
from specalign.lm.names import check_name


def test_the_shipped_drafter_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    name = "pretrained/smollm2-135m-block"
    assert (local_path(name) / "config.json").is_file() and kind_of(name) == "block"
    assert local_path("pretrained/other") == Path("pretrained/other")
    (tmp_path / "pretrained/smollm2-135m-block").mkdir(parents=True)  # the user's own comes first
    assert local_path(name) == Path(name)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[object]]:
    """What was asked of other machines; in a folder with runs/code, models/small and a text, and a hub's cache that is empty."""
    names: list[object] = []

    def nobody(host: object, *rest: object, **words: object) -> None:
        names.append(host)
        raise OSError("no network in this test")

    for folder in ("runs/code", "models/small"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models/prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", nobody)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub.hub_reachable.cache_clear()
    yield names
    hub.hub_reachable.cache_clear()


def _preflight(name: str) -> None:
    check_training(load_recipe(["recipe=debug_adapt", f"drafter.init={name}"]))


def _drafts(name: str) -> None:
    model_folder(name, "drafter", ["config.json"])


PLACES: dict[str, Callable[[str], object]] = {
    "check_name": check_name, "load_target": load_target, "resolve_folder": resolve_folder, "read_target_sizes": read_target_sizes,
    "load_tokenizer": load_tokenizer, "check_there": check_there, "kind_of": kind_of, "model_folder": _drafts,
    "load_masked_lm": load_masked_lm, "load_published": load_published, "preflight": _preflight, "read_init_config": read_init_config, "check_text_source": check_text_source,
    "check_prompts": check_prompts,
}  # fmt: skip
"""Everything that takes a folder or a hub id."""


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_that_is_gone_is_no_hub_id(asked: list[object], place: str) -> None:
    """Whatever reads a folder or a hub id says what is nearby, in one line, and asks nobody."""
    for name, says in (
        ("runs/coda", r"(no such|no folder|no file).*did you mean 'runs/code'.*if that is a hub id.*hf download runs/coda"),
        ("exported/dflash", "no such (file or )?folder: exported/dflash; if that is a hub id"),
        ("rums/code/drafter", ": (no such|neither)"),
        ("./models/smal", "did you mean 'models/small'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says) as error:
            PLACES[place](name)
        assert "\n" not in str(error.value) and repr(name) in str(error.value)
    assert asked == []
