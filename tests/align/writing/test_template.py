"""Training sees the tokens that decoding sees, whatever the shape of the chat template and the kind of the tokenizer."""

import dataclasses
from itertools import product

import pytest

from align.config.parser import load_recipe
from align.writing.generation import Writer
from align.writing.rows import Plan, Row
from align.writing.template import chat_template
from specalign.folder.chat import Chat
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from tests.chat_templates import KINDS, SHAPES, talking

TEXTS = ("Hello", "the law of a proposal", " spaces around ", "def law(self):\n größer")
WORDS = ["recipe=debug_block", "data.max_answer_tokens=5", "data.max_prompt_tokens=24"]
FAST = ("byte-level", "sentencepiece")
EACH = [
    pytest.param(kind, shape, marks=[] if kind in FAST else [pytest.mark.slow])
    for kind, shape in product(KINDS, SHAPES)
]


def served(target: Target, conversation: Conversation) -> list[int]:
    """The tokens that an engine feeds: transformers' own rendering, tokenised in one piece."""
    tokenizer = target.tokenizer
    messages = [dict(m) for m in conversation.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def plan_of(target: Target, *words: str, prompts: list[Conversation] | None = None) -> Plan:
    given = [] if prompts is None else ["data.prompts=p.jsonl"]
    keyed = {word.partition("=")[0]: word for word in (*WORDS, *given, *words)}
    return Plan(load_recipe([*keyed.values()]), target, chat_template(target), prompts)


@pytest.mark.parametrize(("kind", "shape"), EACH)
def test_given_prompts_are_trained_on_as_they_are_served(kind: str, shape: str) -> None:
    target = talking(kind, shape)
    talk = [{"role": "user", "content": "A law"}, {"role": "assistant", "content": "text"}]
    prompts = [as_conversation(text) for text in TEXTS]
    longer = [*talk, {"role": "user", "content": "the other"}]
    prompts += [as_conversation(longer), as_conversation(talk)]
    plan = plan_of(target, "data.max_prompt_tokens=200", prompts=prompts)
    rows = Writer(target, plan).write(0)
    assert rows and not any(row.broken not in ("", "empty answer") for row in rows)
    for row, conversation in zip(rows, prompts, strict=True):
        assert row.tokens[: row.answer_start] == served(target, conversation.prompt), shape
        assert row.tokens[: row.answer_start] == target.chat_tokens(conversation.prompt)


@pytest.mark.parametrize(("kind", "shape"), EACH)
def test_written_prompts_are_answered_as_they_are_served(kind: str, shape: str) -> None:
    """Where the template's tokens stand apart from the text, any text fits between them; else it is rendered and tokenised again."""
    target = talking(kind, shape)
    template = chat_template(target)
    for text in TEXTS if template.turn else ():
        whole = served(target, as_conversation(text))
        if template.joined and text == text.strip():
            assert whole[: len(template.prefix)] == list(template.prefix)
            rest = list(template.turn[1:])  # its first may join a text's end
            assert whole[len(whole) - len(rest) :] == rest
        elif not template.joined:
            ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert [*template.prefix, *ids, *template.turn] == whole
    if template.joined:
        words = "data.batch_size=6", "data.max_answer_tokens=2", "data.max_prompt_tokens=16"
        rows = Writer(target, plan_of(target, *words)).write(0)
        assert rows
        for row in rows:
            if row.conversation is not None and not row.broken.startswith("prompt"):
                assert row.tokens[: row.answer_start] == served(target, row.conversation)


@pytest.mark.parametrize("shape", ["vicuna", "alpaca", "llama 2", "mistral", "text in the middle"])
def test_a_written_prompt_ends_with_the_whole_turn(shape: str) -> None:
    target = talking("sentencepiece", shape)
    plan = plan_of(target, "data.max_prompt_tokens=80")
    assert not plan.prompt_ends - {*target.eos_ids}
    whole = served(target, as_conversation("A was ASS / Response A [/IN here"))
    row = Row(0, 0.0, [], True, tokens=whole, done=True)
    assert plan.advance(row) and row.forced == whole
    assert row.conversation == as_conversation("A was ASS / Response A [/IN here")
    cut = Row(0, 0.0, [], True, tokens=whole[: -len(plan.template.turn)], done=True)
    assert not plan.advance(cut) and cut.broken == "prompt too long"
    ended = Row(0, 0.0, [], True, tokens=cut.tokens, done=True, prompt_ended=True)
    assert plan.advance(ended) and ended.forced == whole
    empty = Row(0, 0.0, [], True, tokens=[*plan.template.prefix], done=True, prompt_ended=True)
    assert not plan.advance(empty) and empty.broken == "empty prompt"


def test_the_end_of_a_turn_behind_a_space_ends_a_prompt() -> None:
    target = talking("sentencepiece", "chatml")
    target.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m.content + ' <|end|>' }}{% endfor %}"
    )
    template = chat_template(target)
    assert template.joined and template.ends == {target.tokenizer.convert_tokens_to_ids("<|end|>")}


def test_a_template_with_the_date_is_rendered_for_one_day() -> None:
    target = talking("byte-level", "date")
    template = chat_template(target, "2026-11-28")
    assert "28 Nov 2026" in target.tokenizer.decode(template.prefix) and template.rendered_sha256
    assert chat_template(target).date and not chat_template(talking("byte-level", "chatml")).date
    target.chat = Chat(date="2024-07-26")
    assert "26 Jul 2024" in target.tokenizer.decode(target.chat_tokens("Hi"))
    plan = dataclasses.replace(plan_of(target), template=template)
    assert "28 Nov 2026" in target.tokenizer.decode(plan.reader.tokens(as_conversation("Hi")))
