"""Who is opened to write is what the recipe says."""

from __future__ import annotations

from align.config.parser import load_recipe
from align.target.model import Target
from align.writing.opening import opened


def test_this_process_or_a_server() -> None:
    for words in ([], ["data.writer=openai:http://127.0.0.1:9"]):
        with opened(load_recipe(["recipe=debug_block", *words])) as (target, source):
            assert isinstance(target, Target) and source is None
