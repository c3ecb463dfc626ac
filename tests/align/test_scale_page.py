"""Commands of docs/scale.md and docs/data.md at tiny size, as written there. Those that start training:
tests/align/training/parallel/test_launchers.py."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from specalign.lm.loading import load_target
from tests.loopback_server import Loopback

ROOT = Path(__file__).resolve().parents[2]


def commands(page: str, *headings: str) -> list[str]:
    """Lines of these sections that run a module of `align`, without comments."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    chosen = [section for section in sections if section.partition("\n")[0] in headings]
    assert len(chosen) == len(headings)
    lines = "".join(chosen).splitlines()
    return [
        line.partition("  #")[0].strip()
        for line in lines
        if line.startswith("    python -m align.")
    ]


LINES = [
    *commands("scale.md", "Estimate the cost", "Store the target's outputs", "Sweeps"),
    *commands("data.md", "Generating with several processes", "Generating with a server"),
]
TINY = ["trainer.max_steps=2", "trainer.warmup_steps=1", "trainer.validation_rows=2"]
WRITTEN = ["data.samples=12", "data.batch_size=4", "data.max_answer_tokens=6"]


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_options_of_every_training_command_are_valid(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for line in re.findall(r"^    .*align\.(?:train|synthesize|features) .*", text, re.MULTILINE):
        words = shlex.split(line.partition("  #")[0].removesuffix(" &").partition("align.")[2])
        load_recipe([word for word in words if "=" in word])


def few_trials(folder: Path) -> str:
    """The sweep with two trials instead of six."""
    text = (ROOT / "recipes/sweeps/block_objective.yaml").read_text(encoding="utf-8")
    for values, fewer in (
        ("[d_pace, exponential, uniform]", "[uniform]"),
        ("[0.0004, 0.0008]", "[0.0004, 0.02]"),
    ):
        assert values in text
        text = text.replace(values, fewer)
    (folder / "few.yaml").write_text(text)
    return str(folder / "few.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_command(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    _, _, module, *words = shlex.split(LINES[number])
    folder = tmp_path / "target"
    folder.mkdir()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 300, **sizes})
    )
    with Loopback(load_target("debug")) as server:
        for theirs, mine in (
            ("20", "2"),  # before the ports and paths of this machine, which may hold it too
            ("smollm2_block", "debug_block"),
            ("smollm2_taps", "debug_taps"),
            ("recipe=block", "recipe=debug_block"),
            ("recipe=taps", "recipe=debug_taps"),
            ("runs/mine", str(tmp_path / "run")),
            ("FOLDER", str(folder)),
            ("YOUR/MODEL", "debug"),
            ("http://127.0.0.1:8000", server.url),
            ("devices=4", "devices=2"),
        ):
            words = [word.replace(theirs, mine) for word in words]
        if module == "align.sweep":
            words = [few_trials(tmp_path), *words[1:], *TINY, "--out", str(tmp_path / "sweep")]
        else:
            words += [*(TINY if module in ("align.features", "align.train") else []), *WRITTEN]
            words += (
                []
                if any(word.startswith("output=") for word in words)
                else [f"output={tmp_path / 'run'}"]
            )
        importlib.import_module(module).main(words)
    said = capsys.readouterr().out
    left = {
        "align.plan": "parameters",
        "align.synthesize": "12 samples",
        "align.features": "rows, ",
        "align.train": "the drafter is in",
        "align.sweep": "| runs |",
    }
    assert left[module] in said, said
