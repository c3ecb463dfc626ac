"""Prompts as tokens; those that the target can't take are named, not dropped in silence."""

from __future__ import annotations

from align.target.model import Target
from decode.engine.decoder import prompt_tokens
from decode.suites.prompt import Prompt
from decode.suites.tokenized import tokenize_prompts


def test_what_does_not_fit_is_named(target: Target) -> None:
    short, long = Prompt("short", "Hello."), Prompt("long", "x" * 600)
    fitting, refused = tokenize_prompts(target, [short, long])
    assert fitting == [(short, prompt_tokens(target, "Hello."))]
    assert len(refused) == 1 and refused[0].startswith("long: the prompt has ")
    assert "context of 512 leaves no room" in refused[0]
