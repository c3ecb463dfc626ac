"""Splits are told by whole words of a name."""

from pathlib import Path

import pytest

from specalign.rows.splits import belongs_to, names_phrase, split_of


@pytest.mark.parametrize(
    "name",
    ["latest", "contest", "device_prompts", "restrained", "validity", "tests", "trainer", "data"],
)
def test_parts_of_words_are_no_splits(name: str) -> None:
    assert split_of(Path(f"{name}.jsonl")) is split_of(Path(f"{name}-0001.jsonl.gz")) is None


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00001.parquet", "train"),
        ("my_TEST_set.jsonl", "test"),
        ("2024test.jsonl", "test"),
        ("prompts.val.jsonl.gz", "validation"),
        ("valid/part-0.jsonl", "validation"),
        ("test/train.jsonl", "train"),
        ("train_test.jsonl", "test"),
        ("testData/part.jsonl", "test"),
    ],
)
def test_whole_words_are(name: str, split: str) -> None:
    assert split_of(Path(name)) == split


def test_files_of_a_split() -> None:
    def choose(split: str, *names: str) -> list[str]:
        return [name for name in names if belongs_to(Path(name), split)]

    names = ("prompts.jsonl", "train.jsonl", "test.jsonl", "val.jsonl")
    assert choose("train", *names) == ["prompts.jsonl", "train.jsonl"]
    assert choose("validation", "train.jsonl", "dev.jsonl", "latest.jsonl") == ["dev.jsonl"]
    assert choose("train_sft", "train_sft-0.jsonl", "train_gen-0.jsonl") == ["train_sft-0.jsonl"]
    assert names_phrase(Path("gpqa_main.csv"), "main")
    assert not names_phrase(Path("domain/x.csv"), "main")
