"""Function calls: single-turn tasks of the Berkeley Function-Calling Leaderboard, with their tools
declared to the chat template."""

import json

from specalign.common.hub import PackageFile
from specalign.common.schema import JsonObject
from specalign.rows.conversation import Conversation
from specalign.suites.prompt import Place, Prompt, Row, Suite


def read_tools(row: Row, number: int) -> Prompt:
    """A question (its first turn) and its functions, as OpenAI's API declares them."""
    question = row["question"]
    turn = question[0] if isinstance(question[0], list) else question
    functions = row["function"]
    given = functions if isinstance(functions, list) else [functions]
    tools = [{"type": "function", "function": _as_schema(function)} for function in given]
    content = Conversation(tuple(dict(message) for message in turn), tuple(tools))
    return Prompt(str(row.get("id", f"tools-{number}")), content, "tools")


def _as_schema(function: object) -> JsonObject:
    """The leaderboard writes Python's names of types, JSON schemas have their own."""
    text = json.dumps(function)
    for theirs, ours in (("dict", "object"), ("float", "number"), ("tuple", "array")):
        text = text.replace(f'"type": "{theirs}"', f'"type": "{ours}"')
    found: JsonObject = json.loads(text)
    return found


PLACE = Place(
    "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
    split="train",
    files=("BFCL_v3_simple.json",),
    revision="61fc0608cfd831fcfbbaa676ebdfef0ed963eeda",
    package=PackageFile("bfcl-eval", "2026.3.23", "bfcl_eval/data/BFCL_v4_simple_python.json"),
)
SUITE = Suite("tools", "function calling", "tools", read_tools, PLACE)
