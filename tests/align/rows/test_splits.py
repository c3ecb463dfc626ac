"""Splits are told by whole words of a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.rows.splits import NoSplit, files_of_split, names_phrase, split_of

NO_SPLIT = (
    "latest", "contest", "attested", "device_prompts", "developers", "restrained", "constrained", "validity", "tested", "tests",
    "trainer", "strained", "valet", "value", "interval", "evaluator", "medieval", "data", "grüntest", "ftest", "testé",
)  # fmt: skip


@pytest.mark.parametrize("name", NO_SPLIT)
def test_parts_of_words_are_no_splits(name: str) -> None:
    assert split_of(Path(f"{name}.jsonl")) is None and split_of(Path(f"{name}-0001.jsonl.gz")) is None


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00001.parquet", "train"),
        ("my_test_set.jsonl", "test"),
        ("TEST.jsonl", "test"),
        ("test2.jsonl", "test"),
        ("2024test.jsonl", "test"),
        ("prompts.val.jsonl.gz", "validation"),
        ("dev-1.csv", "validation"),
        ("valid/part-0.jsonl", "validation"),
        ("eval set.jsonl", "eval"),
        ("training.jsonl", "train"),
        ("test/train.jsonl", "train"),
        ("train/part_test.jsonl", "test"),
        ("train_test.jsonl", "test"),
        ("trainData.jsonl", "train"),
        ("testData/part.jsonl", "test"),
    ],
)
def test_whole_words_are(name: str, split: str) -> None:
    assert split_of(Path(name)) == split


def choose(split: str, *names: str) -> tuple[list[str], str]:
    folder = Path("d")
    files, note = files_of_split(folder, [folder / name for name in names], split, "data.prompts='d'")
    return [file.name for file in files], note


def test_test_rows_are_not_trained_on() -> None:
    assert choose("train", "train.jsonl", "test.jsonl", "val.jsonl")[0] == ["train.jsonl"]
    chosen, note = choose("train", "prompts.jsonl", "test.jsonl")
    assert chosen == ["prompts.jsonl"] and note == "not of split 'train' and left out: test.jsonl"
    with pytest.raises(NoSplit, match=r"data.prompts='d': no split 'train' \(one of: test\)"):
        choose("train", "test.jsonl")


def test_without_a_split_in_any_name_all_are_train() -> None:
    chosen, note = choose("train", "latest.jsonl", "contest.jsonl")
    assert chosen == ["latest.jsonl", "contest.jsonl"] and "all are train" in note
    with pytest.raises(NoSplit, match=r"no split 'test' \(one of: train\)"):
        choose("test", "latest.jsonl")


@pytest.mark.parametrize("name", ["train_test_split.jsonl", "training_eval_mix.jsonl"])
def test_a_single_file_that_names_train_and_another_split_is_train(name: str) -> None:
    assert choose("train", name) == ([name], f"{name} names several splits: all of it is train")
    with pytest.raises(NoSplit):
        choose("train", name, "test.jsonl")


def test_spellings_and_names_of_ones_own() -> None:
    assert choose("validation", "train.jsonl", "dev.jsonl")[0] == ["dev.jsonl"]
    assert choose("train_sft", "train_sft-0.jsonl", "train_gen-0.jsonl")[0] == ["train_sft-0.jsonl"]
    assert names_phrase(Path("gpqa_main.csv"), "main") and not names_phrase(Path("domain/x.csv"), "main")
