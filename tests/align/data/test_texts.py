"""Text of several sources, mixed by weight, without what is excluded; a kill at any shard changes nothing."""

import json
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import texts
from align.writing.template import first_tokens
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.rows import shards as data

SECRET = "the quick brown fox jumps over the lazy dog every single morning before breakfast"


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Prose as a file of rows, code as a folder, and the passage that must not be met."""
    rows = [{"text": f"row {i} says {i * i} and {i % 7}"} for i in range(60)]
    rows[3]["text"] += f" {SECRET}"
    rows[5]["text"] = rows[4]["text"]
    (tmp_path / "prose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "code").mkdir()
    for i in range(40):
        (tmp_path / "code" / f"m{i:02d}.py").write_text(f"def f{i}(x):\n    return x + {i}\n")
    (tmp_path / "exclude.jsonl").write_text(json.dumps({"prompt": SECRET}) + "\n")
    return [str(tmp_path / "prose.jsonl"), str(tmp_path / "code")]


def recipe_of(folder: Path, sources: list[str], *words: str) -> Recipe:
    exclude = Path(sources[0]).parent / "exclude.jsonl"
    first = ["recipe=debug_block", f"output={folder}", f"data.text=[{', '.join(sources)}]"]
    return load_recipe([*first, f"data.exclude=[{exclude}]", "data.mixture=[3, 1]", *words])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_mixed_by_weight_and_excluded(tmp_path: Path, sources: list[str], target: Target) -> None:
    recipe = recipe_of(tmp_path / "run", sources, "data.text_tokens=1000")
    manifest = texts.read_texts(recipe, target, quiet=True)
    prose, code = (s["tokens"] for s in manifest["sources"])
    assert 1000 <= manifest["tokens"] < 1100 and 2.7 < prose / code < 3.3
    assert manifest["left_out"]["documents that contain a passage of data.exclude"] == 1
    assert manifest["left_out"]["documents that were there before"] == 1
    assert manifest["removed"] == {str(tmp_path / "exclude.jsonl"): 1}
    samples = texts.open_text(recipe, target)
    assert {int(samples[i][0]) for i in range(len(samples))} == {*first_tokens(target)}
    assert bool((samples.answer_start == 1).all())
    assert bool((samples.temperature == data.NOT_WRITTEN).all())
    said = " ".join(target.detokenize(samples[i].tolist()) for i in range(len(samples)))
    assert "row 4 says 16" in said and "lazy dog" not in said and texts.is_read(recipe)


def test_a_killed_reading_is_read_again(
    tmp_path: Path, sources: list[str], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "SHARD_TOKENS", 300)
    whole, killed = (recipe_of(tmp_path / n, sources, "data.text_tokens=1500") for n in ("a", "b"))
    texts.read_texts(whole, target, quiet=True)

    def kill(folder: Path, manifest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(texts.data, "write_manifest", kill)
        texts.read_texts(killed, target, quiet=True)
    assert not texts.is_read(killed)
    texts.read_texts(killed, target, quiet=True)
    assert contents(texts.text_folder(whole)) == contents(texts.text_folder(killed))


def test_damaged_text_is_refused(tmp_path: Path, sources: list[str], target: Target) -> None:
    recipe = recipe_of(tmp_path, sources, "data.text_tokens=400")
    texts.read_texts(recipe, target, quiet=True)
    with pytest.raises(UserError, match="length is 96, this recipe says 64"):
        texts.read_texts(recipe_of(tmp_path, sources, "data.length=64"), target)
    with pytest.raises(UserError, match="sources is .*this recipe says .*or another data.path"):
        texts.open_text(recipe_of(tmp_path, sources[::-1]), target)
    shard = data.shard_path(texts.text_folder(recipe), 0)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="not a readable data shard"):
        texts.read_texts(recipe, target)
    (tmp_path / "empty.txt").touch()
    empty = f"data.text=[{tmp_path}/empty.txt]"
    words = ["recipe=debug_block", f"output={tmp_path}/e", empty, "data.exclude=[]"]
    with pytest.raises(UserError, match="no text in it"):
        texts.read_texts(load_recipe(words), target)
