"""Arena-Hard (arXiv 2406.11939): 500 hard requests from users of Chatbot Arena."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_turns


def read_arena_hard(row: Row, number: int) -> Prompt:
    """`turns` in version 0.1; `prompt` in version 2, which a local copy may hold."""
    key = row.get("question_id", row.get("uid", number))
    category = str(row.get("cluster", row.get("category", "")))
    content = row.get("prompt")
    if not isinstance(content, str):
        content = find_turns(row, "turns")[0]
    return Prompt(f"arena_hard-{key}", content, category)


PLACE = Place("lmarena-ai/arena-hard-auto-v0.1", split="train")
SUITE = Suite("arena_hard", "Arena-Hard", "chat", read_arena_hard, PLACE, max_new_tokens=2048)
