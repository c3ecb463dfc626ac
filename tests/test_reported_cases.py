"""Inputs from public bug reports of this field, typed as a user types them. `tests/align` and `tests/decode` test each class
further; here a row, file or model goes through the commands, and what was trained on is compared with what decoding feeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import decode
from align import synthesize
from align.data.index import read_samples
from align.target.debug import debug_model
from align.target.loading import load_target
from align.target.model import Target
from decode import generate
from decode.suites.sources import load_prompts_file
from decode.suites.tokenized import tokenize_prompts

SMALL = (
    "recipe=debug_block", "data.samples=3", "data.batch_size=4", "data.max_answer_tokens=8", "data.near_duplicate_threshold=2",
    "data.answer_temperatures=[1]",
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(main: Any, *argv: str) -> int:
    """The exit code of a command."""
    try:
        main([str(word) for word in argv])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def trained_on(target: Target, prompts: Path, folder: Path, *words: str) -> list[list[int]]:
    """The prompt ids of every sample that `align.synthesize` writes for these prompts."""
    argv = (*SMALL, f"data.prompts={prompts}", f"output={folder}", *words)
    assert run(synthesize.main, *argv) == 0
    samples = read_samples(folder / "data", target.vocab_size)
    return [samples[i].tolist()[: int(samples.answer_start[i])] for i in range(len(samples))]


def decoded_from(target: Target, prompts: Path) -> list[list[int]]:
    """The prompt ids that `decode.eval --prompts` feeds."""
    found, refused = tokenize_prompts(target, load_prompts_file(prompts).prompts)
    assert not refused
    return [tokens for _, tokens in found]


USER = {"role": "user", "content": "Hi there"}
CONVERSATION = [
    {"role": "system", "content": "Answer in French."},
    {"role": "user", "content": "A?"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "B?"},
]
CALL = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
ROWS: dict[str, tuple[Any, list[dict[str, str]]]] = {
    "system prompt and earlier turns": ({"messages": CONVERSATION}, CONVERSATION),
    "roles in capitals": (
        {"messages": [{"role": "System", "content": "S"}, {"role": "User", "content": "Hi there"}]},
        [{"role": "system", "content": "S"}, USER],
    ),
    "messages in a string": ({"messages": json.dumps([USER])}, [USER]),
    "ShareGPT": (
        {"id": "a", "conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "x"}]},
        [USER],
    ),
    "prompter": ({"conversations": [{"from": "prompter", "value": "Hi there"}]}, [USER]),
    "null columns": (
        {"messages": [{"from": "human", "value": "Hi there", "role": None, "content": None}]},
        [USER],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi there"}]}]},
        [USER],
    ),
    "Alpaca": (
        {"instruction": "Translate to French", "input": "Good morning", "output": "Bonjour"},
        [{"role": "user", "content": "Translate to French\n\nGood morning"}],
    ),
    "prompt as messages": ({"prompt": [USER], "completion": "x"}, [USER]),
    "system column": (
        {"system": "S", "prompt": "Hi there"},
        [{"role": "system", "content": "S"}, USER],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_training_and_decoding_read_a_row_alike(name: str, target: Target, tmp_path: Path) -> None:
    row, messages = ROWS[name]
    path = write(tmp_path / "mine.jsonl", row, {"prompt": "plain"})
    expected = [target.chat_tokens(messages), target.chat_tokens("plain")]
    assert decoded_from(target, path) == expected
    assert trained_on(target, path, tmp_path / "run", "data.max_prompt_tokens=200") == expected


def test_context_is_part_of_a_question(target: Target, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", {"question": "Who won?", "context": "France won in 1998."})
    (tokens,) = decoded_from(target, path)
    text = target.tokenizer.decode(tokens)
    assert "Who won?" in text and "France won in 1998." in text


def test_tool_calls_and_results(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "12C", "tool_call_id": "1"},
    ]
    path = write(tmp_path / "tools.jsonl", {"messages": talk, "tools": []}, {"prompt": "plain"})
    assert "12C" in target.tokenizer.decode(decoded_from(target, path)[0])
    assert len(trained_on(target, path, tmp_path / "run", "data.max_prompt_tokens=200")) == 2


def test_rows_without_a_user_are_counted(target: Target, tmp_path: Path, capsys: Any) -> None:
    row = {"conversations": [{"from": "gpt", "value": "continuation of a chat"}]}
    path = write(tmp_path / "gpt.jsonl", row, {"prompt": "plain"})
    assert len(decoded_from(target, path)) == 1
    assert "1 of 2" in capsys.readouterr().err
    assert trained_on(target, path, tmp_path / "run") == [target.chat_tokens("plain")]
    assert "1 of 2" in capsys.readouterr().err
    write(path, row)
    assert run(synthesize.main, *SMALL, f"data.prompts={path}", f"output={tmp_path / 'none'}") == 2
    assert "user" in capsys.readouterr().err


def test_a_long_prompt_is_never_cut_silently(target: Target, tmp_path: Path, capsys: Any) -> None:
    article = "word " * 300 + "\n\nQuestion: which year is named above?"
    path = write(tmp_path / "long.jsonl", {"prompt": article}, {"prompt": "short"})
    words = ("data.max_prompt_tokens=40",)
    assert trained_on(target, path, tmp_path / "run", *words) == [target.chat_tokens("short")]
    said = capsys.readouterr().err
    assert "1 of 2 prompts" in said and "data.max_prompt_tokens" in said and "data.long_prompts" in said
    (cut, _) = trained_on(target, path, tmp_path / "cut", *words, "data.long_prompts=cut")
    assert "named above?" in target.tokenizer.decode(cut)
    write(path, {"prompt": article})
    assert run(synthesize.main, *SMALL, *words, f"data.prompts={path}", f"output={tmp_path / 'none'}") == 2
    assert "data.max_prompt_tokens" in capsys.readouterr().err


TEMPLATES = {
    "chatml": debug_model("Llama")[1].chat_template,
    "vicuna": "{% for m in messages %}{{ 'USER: ' if m['role'] == 'user' else 'ASSISTANT: ' }}{{ m['content'] }} {% endfor %}ASSISTANT:",
    "alpaca": "### Instruction: {{ messages[-1]['content'] }}\n\n### Response:",
    "no generation prompt": "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}",
    "trimmed": "{% for m in messages %}<|im_start|>{{ m['content'] | trim }}<|im_end|>{% endfor %}A:",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_that_the_target_writes_are_tokenised_as_decoding_does(name: str, tmp_path: Path) -> None:
    model, tokenizer = debug_model("Llama")
    tokenizer.chat_template = TEMPLATES[name]
    folder = tmp_path / "my target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target = load_target(str(folder), dtype="float32", device="cpu")
    output = tmp_path / "run"
    assert run(synthesize.main, *SMALL, f"target.name={folder}", f"output={output}") == 0
    samples = read_samples(output / "data", target.vocab_size)
    assert len(samples) == 3
    for i in range(len(samples)):
        ids = samples[i].tolist()[: int(samples.answer_start[i])]
        before, _, after = target.tokenizer.decode(target.chat_tokens("\u2402")).partition("\u2402")
        text = target.tokenizer.decode(ids)
        assert text.startswith(before) and text.endswith(after)
        prompt = text[len(before) : len(text) - len(after)]
        assert target.chat_tokens(prompt) == ids


@pytest.mark.parametrize(
    ("names", "train"),
    [
        (("latest.jsonl",), {"latest.jsonl"}),
        (("device_prompts.jsonl",), {"device_prompts.jsonl"}),
        (("restrained.jsonl", "contest.jsonl"), {"restrained.jsonl", "contest.jsonl"}),
        (("train.jsonl", "test.jsonl"), {"train.jsonl"}),
        (("my_test.jsonl", "my_train.jsonl", "dev.jsonl"), {"my_train.jsonl"}),
    ],
)
def test_splits_are_whole_words(
    names: tuple[str, ...], train: set[str], target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for name in names:
        write(folder / name, {"prompt": name})
    found = trained_on(target, folder, tmp_path / "run")
    assert sorted(found) == sorted(target.chat_tokens(name) for name in train)


FILES = {
    "lines.json": b'{"prompt":"a"}\n{"prompt":"b"}\n',
    "list.json": b'[{"prompt":"a"},{"prompt":"b"}]',
    "columns.json": b'{"prompt":["a","b"]}',
    "x.ndjson": b'{"prompt":"a"}\n{"prompt":"b"}\n',
    "semicolons.csv": b"id;prompt\n1;a\n2;b\n",
    "tabs.tsv": b"id\tprompt\n1\ta\n2\tb\n",
    "marks.jsonl": b'\xef\xbb\xbf{"prompt":"a"}\r\n\xef\xbb\xbf{"prompt":"b"}\r\n',
    "mixed.jsonl": b'{"text":"a"}\n{"content":"b"}\n',
    "lines.txt": b"a\nb\n",
}


@pytest.mark.parametrize("name", FILES)
def test_forms_of_files(name: str, target: Target, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    expected = [target.chat_tokens("a"), target.chat_tokens("b")]
    assert decoded_from(target, path) == expected
    assert trained_on(target, path, tmp_path / "run") == expected


def test_one_object_is_one_row(target: Target, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{\n  "prompt": "a"\n}\n')
    assert decoded_from(target, tmp_path / "one.json") == [target.chat_tokens("a")]


def test_a_field_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    path.write_text('prompt\n"' + "x" * 140_000 + '"\n')
    (prompt,) = load_prompts_file(path).prompts
    assert "x" * 140_000 in str(prompt.content)


@pytest.mark.parametrize("named", ["tokens", "text"])
def test_raw_text_begins_as_the_tokenizer_begins_it(named: str, tmp_path: Path) -> None:
    from tokenizers import processors

    model, tokenizer = debug_model("Llama")
    if named == "text":
        tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    model.save_pretrained(tmp_path / "T")
    tokenizer.save_pretrained(tmp_path / "T")
    target = load_target(str(tmp_path / "T"), dtype="float32", device="cpu")
    assert target.text_tokens("The sky is") == tokenizer("The sky is")["input_ids"]
    out = decode.load(target, None).generate("The sky is", raw=True, max_new_tokens=6)
    ids = tokenizer("The sky is", return_tensors="pt")
    own = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert out.tokens == own.tolist()


def test_a_stop_string_that_is_a_special_token(target: Target) -> None:
    decoder = decode.load(target, None)
    free = decoder.generate("Say hi.", max_new_tokens=40, banned=tuple(target.eos_ids))
    special = [3]  # <unused>
    target.tokenizer.convert_ids_to_tokens(special)
    found = decoder.generate("Say hi.", max_new_tokens=40, banned=tuple(target.eos_ids), stop="<unused>")
    end = free.tokens.index(3) if 3 in free.tokens else len(free.tokens)
    assert found.text == target.tokenizer.decode(free.tokens[:end], skip_special_tokens=True)


def test_an_adapter_is_never_its_base_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = debug_model("Llama")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert run(generate.main, "--target", str(adapter), "--drafter", "none", "hi") == 2
    assert "adapter" in capsys.readouterr().err
