"""Counts which given prompts are dropped or cut, before anything is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from align.writing.prompts import REFUSED, PromptReader
from specalign.common.errors import UserError
from specalign.folder.ignored import find_ignored, ignored_notes
from specalign.rows.conversation import Conversation


def survey_prompts(reader: PromptReader, prompts: Sequence[Conversation]) -> tuple[int, list[str]]:
    """Read the prompts that `data.samples` need.

    Returns:
        The number of usable prompts, and a note for everything that is dropped or cut.

    Raises:
        UserError: no prompt is usable.
    """
    d, bare = reader.recipe.data, reader.template.bare
    counts = Counter[str]()
    ignored = Counter[str]()  # parts (system messages, tool calls) that the template drops
    reason = mark = ""
    longest = 0
    special = _special_tokens(reader)
    for number, conversation in enumerate(prompts, 1):
        if counts["usable"] >= d.samples:
            break
        prompt = reader.read(conversation.prompt, f"data.prompts, prompt {number}")
        counts["read"] += 1
        longest = max(longest, prompt.length)
        counts["long"] += prompt.length > reader.limit
        user_text = "\n".join(m["content"] for m in conversation.messages if m["role"] == "user")
        if special and (found := special.search(user_text)):
            counts["marked"] += 1
            mark = mark or found[0]
        if not prompt.broken:
            counts["usable"] += 1
            end = bare + min(prompt.length, reader.limit) + d.max_answer_tokens
            counts["late"] += end > d.length
            ignored.update(find_ignored(reader.target, prompt.conversation))
        elif prompt.broken == REFUSED:
            counts["refused"] += 1
            reason = reason or prompt.reason
    of = f"of {counts['read']} prompts"
    target = reader.target
    notes = []
    if counts["read"] < len(prompts):
        notes.append(f"data.samples={d.samples} takes the first {counts['read']} of {len(prompts)}")
    if counts["refused"]:
        notes.append(
            f"the chat template of target {target.spec!r} refuses {counts['refused']} {of}, which "
            f"are left out: {reason}"
        )
    if counts["long"]:
        fate = "left out (data.long_prompts=cut shortens them)"
        if d.long_prompts == "cut":
            fate = "cut"
        most = min(longest, target.context_limit - bare - 1)
        notes.append(
            f"{counts['long']} {of} are longer than data.max_prompt_tokens={reader.limit} and "
            f"{fate}; data.max_prompt_tokens={most} keeps as much as possible"
        )
    if not counts["usable"]:
        raise UserError(f"data.prompts={d.prompts!r}: no prompt is usable: {'; '.join(notes)}")
    notes += ignored_notes(target, ignored, str(counts["read"]))
    if counts["marked"]:
        notes.append(
            f"{counts['marked']} {of} hold special tokens ({mark}), as if a chat template had been "
            "applied, and it is applied again; give messages instead"
        )
    if counts["late"]:
        needed = min(longest, reader.limit) + bare + d.max_answer_tokens
        notes.append(
            f"{counts['late']} {of} leave no room for an answer of "
            f"data.max_answer_tokens={d.max_answer_tokens} within data.length={d.length}; "
            f"data.length={needed} holds all"
        )
    return counts["usable"], [f"data.prompts={d.prompts!r}: {note}" for note in notes]


def _special_tokens(reader: PromptReader) -> re.Pattern[str] | None:
    """Matches the tokenizer's special tokens of more than three characters (`<s>` is text as
    well)."""
    tokenizer = reader.target.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    longest_first = sorted((text for text in texts if len(text) > 3), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
