"""Prompts as tokens; those that the target can't take are named, not dropped in silence."""

from __future__ import annotations

import pytest

from decode.engine.decoder import prompt_tokens
from decode.evaluation.tokenized import tokenize_prompts
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt


def test_what_does_not_fit_is_named(target: Target) -> None:
    short, long = Prompt("short", "Hello."), Prompt("long", "x" * 600)
    fitting, refused = tokenize_prompts(target, [short, long])
    assert fitting == [(short, prompt_tokens(target, "Hello."))]
    assert len(refused) == 1 and refused[0].startswith("long: the prompt has ")
    assert "context of 512 leaves no room" in refused[0]


def test_what_the_chat_template_leaves_out_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target("debug", fast=False)
    target.spec = "of users alone"
    target.tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    user, system = {"role": "user", "content": "A"}, {"role": "system", "content": "S"}
    prompts = [Prompt("a", "A"), Prompt("b", [system, user]), Prompt("c", [system, user])]
    assert len(tokenize_prompts(target, prompts)[0]) == 3
    note = "the chat template of target 'of users alone' leaves out the system messages of 2 of 3 prompts"
    assert capsys.readouterr().err == f"note: {note}\n"
