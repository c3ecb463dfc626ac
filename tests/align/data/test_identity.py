"""What a manifest records of conversations, and what an older one means."""

from __future__ import annotations

import hashlib
import json

from align.config.parser import load_recipe
from align.data.identity import identity, is_same
from align.rows.conversation import Conversation
from align.rows.shapes import as_conversation
from align.target.model import Target
from align.writing.template import chat_template


def test_single_texts_are_recorded_as_before_there_were_conversations(target: Target) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.prompts=p.jsonl"])

    def recorded(*prompts: Conversation) -> str:
        return str(identity(recipe, target, chat_template(target), prompts)["prompts_sha256"])

    texts = [as_conversation(text) for text in ("a", "b")]
    assert recorded(*texts) == hashlib.sha256(json.dumps(["a", "b"]).encode()).hexdigest()
    system = as_conversation([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}])
    tools = Conversation(texts[0].messages, ({"name": "f"},))
    assert len({recorded(*texts), recorded(system, texts[1]), recorded(tools, texts[1])}) == 3


def test_keys_that_an_older_manifest_lacks(target: Target) -> None:
    words = ["recipe=debug_block", "data.prompts=p.jsonl"]
    wanted = identity(load_recipe([*words, "data.turns=all"]), target, chat_template(target), [])
    assert (wanted["turns"], wanted["long_prompts"], wanted["date"]) == ("all", "drop", None)
    assert is_same({}, "long_prompts", "cut") and is_same({}, "date", "2026-11-28")
    assert not is_same({}, "turns", "all") and is_same({}, "turns", "last")
    assert not is_same({"date": "2026-11-27"}, "date", "2026-11-28")
    assert identity(load_recipe(words[:1]), target, chat_template(target), None)["long_prompts"] is None
