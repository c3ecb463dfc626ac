"""Target-written data: exact draws, the same text whatever the batch, and a kill that changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.data import packing
from align.data import shards as data
from align.data.generation import Row, Writer, WriterSettings, draw
from align.data.prompts import NearDuplicates, read_prompts
from align.data.synthesis import chat_template, synthesize
from align.target.model import Target


def test_draw_has_the_softmax_law() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 300, generator=generator) * 2
    for temperature in (0.7, 1.0):
        uniform = (
            torch.arange(20000) + 0.5
        ) / 20000  # a grid instead of noise: frequencies are exact to 1/20000
        heat = torch.full((20000,), temperature)
        drawn = draw(logits.expand(20000, -1).clone(), heat, uniform)
        counts = torch.bincount(drawn, minlength=300) / 20000
        assert (counts - (logits[0] / temperature).softmax(-1)).abs().max() < 1.5e-4


def test_draw_limits() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    uniform = (torch.arange(1000) + 0.5) / 1000
    many = logits.expand(1000, -1)
    assert set(draw(many.clone(), torch.ones(1000), uniform, top_k=2).tolist()) == {0, 1}
    assert set(draw(many.clone(), torch.ones(1000), uniform, top_p=0.85).tolist()) == {0, 1, 2}
    assert set(draw(many.clone(), torch.zeros(1000), uniform).tolist()) == {0}
    edge = torch.tensor([[0.0, -torch.inf, -torch.inf]]).expand(3, -1)
    assert draw(edge.clone(), torch.ones(3), torch.tensor([0.0, 0.5, 0.9999999])).tolist() == [0, 0, 0]


def _write(target: Target, count: int, heat: float) -> list[Row]:
    settings = WriterSettings(1.0, 1.0, 0, 20, 24)
    rows = [Row(i, heat, list(range(40 + i, 46 + i)), writes_prompt=False) for i in range(count)]
    Writer(target, [1, 5], [6], settings, 60).write(rows, torch.Generator().manual_seed(3))
    return rows


def test_batched_greedy_writing_equals_one_at_a_time(target: Target) -> None:
    for row in _write(target, 9, 0.0):
        cache = target.new_cache(1, 60)
        tokens = list(row.tokens[: row.answer_start])
        logits = target.forward(torch.tensor([tokens]), cache=cache).logits_BLV
        while len(tokens) < len(row.tokens):
            tokens.append(int(logits[0, -1].argmax()))
            logits = target.forward(torch.tensor([tokens[-1:]]), cache=cache).logits_BLV
        assert tokens == row.tokens
        assert row.tokens[-1] in target.eos_ids or len(row.tokens) - row.answer_start == 24


def test_near_duplicates() -> None:
    seen = NearDuplicates(0.8)
    assert seen.add(list(range(30)))
    assert not seen.add(list(range(30)))
    assert not seen.add([*range(29), 99])
    assert seen.add(list(range(15)) + list(range(50, 65)))
    assert seen.add([1]) and not seen.add([1]) and seen.add([2])


def test_shards_round_trip_and_pack(tmp_path: Path) -> None:
    samples = data.from_lists([[1, 2, 3, 4], [5, 6], list(range(10, 22))], [2, 1, 4], [0.0, 1.0, 0.5])
    data.write_shard(tmp_path, 0, samples)
    data.write_manifest(tmp_path, {"shards": 1})
    again = data.read_samples(tmp_path)
    assert again.tokens.tolist() == samples.tokens.tolist() and len(again) == 3
    rows = packing.pack(again, 8, seed=0)
    seen = sorted(t for r in rows for t in r.tokens_L[r.document_L >= 0].tolist())
    assert seen == sorted([1, 2, 3, 4, 5, 6, *range(10, 18)])  # the long one is cut at the row's length
    batch = packing.collate(rows)
    mask = batch.attention_mask()[:, 0]
    for b in range(len(rows)):
        for i in range(8):
            for j in range(8):
                same = batch.document_BL[b, i] == batch.document_BL[b, j] >= 0
                assert bool(mask[b, i, j]) == bool((j <= i and same) or i == j)


def test_torn_and_missing_data_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        data.read_samples(tmp_path)
    data.write_manifest(tmp_path, {"shards": 1})
    with pytest.raises(UserError, match="not a readable data shard"):
        data.read_samples(tmp_path)
    data.shard_path(tmp_path, 0).write_bytes(b"torn")
    with pytest.raises(UserError, match="not a readable data shard"):
        data.read_samples(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        data.read_manifest(tmp_path)


def test_prompts_from_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a"}\n{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}\n'
    )
    with pytest.raises(UserError, match="no column 'promt'.*did you mean 'prompt'"):
        read_prompts(str(path), "train", "promt")
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read_prompts(str(path), "train", "prompt") == ["a", "b"]
    for name, says in [
        ("none.jsonl", "no such file"),
        ("no/such/id", "no such file"),
        ("x.txt", "no such file"),
    ]:
        with pytest.raises(UserError, match=says):
            read_prompts(name if name.count("/") else str(tmp_path / name), "train", "prompt")
    path.write_text("not json\n")
    with pytest.raises(UserError, match="can't be read"):
        read_prompts(str(path), "train", "prompt")


def test_written_prompts_begin_as_asked(tmp_path: Path, target: Target) -> None:
    openings = ["", "ab", "xyz"]
    words = ["recipe=debug_block", "data.samples=24", "data.answer_temperatures=[0.0, 1.0]"]
    recipe = load_recipe([*words, "data.prompt_openings=['', 'ab', 'xyz']"])
    synthesize(recipe, target, tmp_path / "data", quiet=True)
    samples = data.read_samples(tmp_path / "data")
    prefix = len(chat_template(target).prefix)
    met = set()
    for i in range(len(samples)):
        prompt = samples[i][prefix : int(samples.answer_start[i])].tolist()
        for text in openings[1:]:
            tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            if prompt[: len(tokens)] == tokens:
                met.add((text, float(samples.temperature[i])))
    assert {("ab", 0.0), ("ab", 1.0), ("xyz", 0.0), ("xyz", 1.0)} <= met
    with pytest.raises(UserError, match="leaves no room"):
        many = load_recipe([*words, f"data.prompt_openings=['{'a b ' * 40}']"])
        synthesize(many, target, tmp_path / "more", quiet=True)
    with pytest.raises(UserError, match="(prompt_openings|answer_temperatures) is"):
        synthesize(
            load_recipe(["recipe=debug_block", "data.samples=30"]), target, tmp_path / "data", quiet=True
        )


def test_a_folder_older_than_openings_goes_on(tmp_path: Path, target: Target) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.samples=8"])
    synthesize(recipe, target, tmp_path / "data", quiet=True)
    manifest = data.read_manifest(tmp_path / "data")
    del manifest["prompt_openings"]
    data.write_manifest(tmp_path / "data", manifest)
    more = load_recipe(["recipe=debug_block", "data.samples=12"])
    assert synthesize(more, target, tmp_path / "data", quiet=True)["samples"] == 12


def test_a_data_set_of_several_configurations(tmp_path: Path) -> None:
    """As cnn_dailymail has them on the hub: without a name the line says which there are, and the key."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"Tell me {name}."}) + "\n")
    configs = "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("one", "two"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(UserError, match=r"one.*two.*\(data.prompts_config\)"):
        read_prompts(str(tmp_path), "train", "text")
    assert read_prompts(str(tmp_path), "train", "text", "two") == ["Tell me two."]


def test_a_data_set_that_is_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "lm1b"
    folder.mkdir()
    (folder / "lm1b.py").write_text("raise SystemExit('never run')\n")
    with pytest.raises(UserError, match="prompts_revision=refs/convert/parquet"):
        read_prompts(str(folder), "train", "text")
