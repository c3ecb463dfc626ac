"""Drafts by script are accepted whole, in part and along trees; and a long text is that of one call."""

from __future__ import annotations

from typing import Any

import pytest

from align.target.model import Target
from decode.engine import engine
from decode.engine.decoder import Decoder
from decode.losslessness.planted import Bug
from decode.losslessness.scripted import ScriptedDrafter, scripted_check, whole
from decode.losslessness.searched import ROOTS
from decode.losslessness.settings import Options
from decode.losslessness.widened import BUGS

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("branch", [True, False])
def test_what_is_right_is_accepted_and_what_is_wrong_is_not(shallow: Target, branch: bool) -> None:
    fixed: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}
    plain = Decoder(shallow).generate(PROMPT, **fixed)
    out = Decoder(shallow, ScriptedDrafter([plain.tokens], branch)).generate(PROMPT, **fixed)
    assert out.tokens == plain.tokens
    assert out.accepted[:3] == [4, 2, 4]
    shapes = [None if tree is None else len(tree.parents) for tree in out.trees[:3]]
    assert shapes == [None, None, 9 if branch else None]
    assert ROOTS == (1, 1 + 5, 1 + 5 + 3)


def test_each_script_has_drafts_of_its_own_length(shallow: Target) -> None:
    fixed: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40}
    plain = Decoder(shallow).generate(PROMPT, **fixed)
    drafter = ScriptedDrafter([plain.tokens, plain.tokens], True, [4, 10])
    short, long = Decoder(shallow, drafter).generate_batch([PROMPT, PROMPT], **fixed)
    assert short.tokens == long.tokens == plain.tokens and (drafter.draft_tokens, drafter.draft_nodes) == (
        10,
        21,
    )
    assert short.accepted[:3] == [4, 2, 4] and long.accepted[:3] == [10, 8, 10]


@pytest.mark.parametrize("bug", [b for b in BUGS if b.setting == "long prompt"], ids=lambda b: b.name)
def test_a_prompt_read_in_pieces_shows_what_is_lost_between_them(shallow: Target, bug: Bug) -> None:
    """In short pieces, as a quick verdict has them, as much as in the engine's own."""
    options = Options(shallow, [list(range(5, 100)), [30, 31]], 0, piece=40)
    setting = next(s for s in options.long if s.piece)
    pieces = -(-len(setting.prompt) // 40)
    assert (setting.name, setting.piece) == ("long prompt", 40) and pieces > 3
    right = scripted_check(options, "long", setting.name)
    assert right.passed and right.figures["drafted"] and engine.PREFILL_CHUNK == 2048
    assert scripted_check(options, "long", setting.name, bug.planted).figures["wrong"] == [setting.name]


def test_a_long_text_is_that_of_one_call_without_a_cache(shallow: Target) -> None:
    options = Options(shallow, [PROMPT, [30, 31]], 0)
    assert whole(options).passed
    check = scripted_check(options, "long")
    assert check.passed and check.figures["drafted"]
    wrong = options.text(options.long[0]).tokens
    wrong[5] = (wrong[5] + 1) % shallow.vocab_size
    assert not whole(options).passed
