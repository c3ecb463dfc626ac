"""Inputs from public bug reports of this field that cross modules."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

import decode
from align import synthesize
from decode.evaluation.endpoint import as_messages
from decode.evaluation.tokenized import tokenize_prompts
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows.shards import read_samples
from specalign.suites.long import load_documents
from specalign.suites.sources import load_prompts_file
from tests.row_shapes import CALL, GPT, HI, TALK

SMALL = (
    "recipe=debug_block", "data.batch_size=24", "data.max_answer_tokens=3",
    "data.answer_temperatures=[1]",
)  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"messages": TALK},
    {"conversations": GPT},
    {"instruction": "Translate to French", "input": "Good morning", "output": "Bonjour"},
    {"prompt": HI, "completion": "x"},
    {"system": "S", "prompt": "Hello"},
    {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "12C", "tool_call_id": "1"}]},
    {"prompt": "plain"},
]  # fmt: skip
TEMPLATES = {
    "chatml": debug_model("Llama")[1].chat_template,
    "no generation prompt": "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}",
    "trimmed": "{% for m in messages %}<|im_start|>{{ m['content'] | trim }}<|im_end|>{% endfor %}A:",
}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def save(folder: Path, template: str | None) -> tuple[Any, Any, Target]:
    """The debug target with another chat template: its model, tokenizer and the loaded target."""
    model, tokenizer = debug_model("Llama")
    tokenizer.chat_template = template
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, load_target(str(folder), dtype="float32", device="cpu")


def trained_on(target: Target, folder: Path, *words: str, count: int = 3) -> list[list[int]]:
    """The prompt ids of every sample that `align.synthesize` writes."""
    synthesize.main([*SMALL, f"data.samples={count}", f"output={folder}", *words])
    samples = read_samples(folder / "data", target.vocab_size)
    return [samples[i].tolist()[: int(samples.answer_start[i])] for i in range(len(samples))]


def test_training_and_decoding_read_rows_alike(target: Target, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", *ROWS)
    found, refused = tokenize_prompts(target, load_prompts_file(path).prompts)
    decoded = [tokens for _, tokens in found]
    words = (f"data.prompts={path}", "data.max_prompt_tokens=300")
    assert not refused and len(decoded) == len(ROWS)
    assert decoded[0] == target.chat_tokens(TALK) and "12C" in target.tokenizer.decode(decoded[5])
    assert trained_on(target, tmp_path / "run", *words, count=len(ROWS)) == decoded


def test_documents_shorter_than_the_context_are_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough text by characters, too little by tokens."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    (prompt,) = load_documents(path, context=200)
    ((_, tokens),), _ = tokenize_prompts(target, [prompt])
    assert 190 < len(tokens) <= 200
    monkeypatch.setattr(target, "chat_tokens", lambda text: [1] * len(text.split()))
    found, refused = tokenize_prompts(target, [prompt])
    assert not found and refused == ["long-1: too little text: 52 of 200 tokens"]


def test_padded_tables_are_long_inputs(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many characters to a token, then few: as many documents as the tokens need, exactly cut."""
    for name, text in (("a", "cell" + " " * 26), ("b", "1 ")):
        (tmp_path / f"{name}.txt").write_text(text * 200)
    prompts = load_documents(tmp_path, context=300)
    monkeypatch.setattr(target, "chat_tokens", lambda text: [1] * len(text.split()))
    found, refused = tokenize_prompts(target, prompts)
    assert not refused and all(290 < len(tokens) <= 300 for _, tokens in found)
    (message,) = as_messages(prompts[0])["messages"]
    assert len(message["content"]) < 9 * 300


@pytest.mark.parametrize("name", TEMPLATES)
def test_written_prompts_are_tokenised_as_in_decoding(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "my target"
    target = save(folder, TEMPLATES[name])[2]
    rows = trained_on(target, tmp_path / "run", f"target.name={folder}")
    assert len(rows) == 3
    before, _, after = target.tokenizer.decode(target.chat_tokens("\u2402")).partition("\u2402")
    for ids in rows:
        text = target.tokenizer.decode(ids)
        assert text.startswith(before) and text.endswith(after)
        assert target.chat_tokens(text[len(before) : len(text) - len(after)]) == ids


@pytest.mark.parametrize("template", [TEMPLATES["chatml"], None])
def test_raw_text_begins_as_the_tokenizer_begins_it(template: str | None, tmp_path: Path) -> None:
    model, tokenizer, target = save(tmp_path, template)
    assert target.text_tokens("The sky is") == tokenizer("The sky is")["input_ids"]
    out = decode.load(target, None).generate("The sky is", raw=True, max_new_tokens=6)
    ids = tokenizer("The sky is", return_tensors="pt")
    own = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert out.tokens == own.tolist()
