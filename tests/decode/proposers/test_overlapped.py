"""Drafting ahead proposes what would have been proposed, and no thread outlives its draft."""

import threading
from typing import Any

import pytest

from decode.proposers.autoregressive import AutoregressiveSession
from decode.systems.construction import build
from decode.systems.opening import OpenDrafters
from decode.systems.parsing import read_method
from tests.builders import PROMPT


def test_drafting_ahead_is_used_and_is_what_would_have_been_drafted(parts: OpenDrafters) -> None:
    """The drafter is the target itself: every guess holds, so the main thread drafts only to begin and to end."""
    decoder = build(read_method("duo:draft_tokens=3:controller=fixed"), parts)
    drafted_by: list[threading.Thread] = []
    propose = AutoregressiveSession.propose

    def watched(self: AutoregressiveSession, k: int) -> Any:
        drafted_by.append(threading.current_thread())
        return propose(self, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoregressiveSession, "propose", watched)
        out = decoder.generate(PROMPT, max_new_tokens=30)
    assert out.accepted[:-1] == out.drafted[:-1]
    assert drafted_by.count(threading.main_thread()) <= 2 < len(drafted_by)


@pytest.mark.parametrize("name", ["duo:draft_tokens=2", "double"])
def test_no_thread_outlives_its_draft(parts: OpenDrafters, name: str) -> None:
    """One that did would halve the speed of everything decoded after it, plain decoding's too."""
    before = set(threading.enumerate())
    decoder = build(read_method(name), parts)
    decoder.generate(PROMPT, max_new_tokens=20)
    assert set(threading.enumerate()) <= before

    def fail(text: str) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        decoder.generate(PROMPT, max_new_tokens=20, stream=fail)
    assert set(threading.enumerate()) <= before
