"""Rows of every shape that users bring, and the messages that they are."""

import json
from typing import Any


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


HI = [user("Hi there")]
TALK = [system("Be brief."), user("A?"), assistant("a"), user("B?")]
TOOL = {"type": "function", "function": {"name": "w", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
GPT = [
    {"from": "human", "value": "A?"},
    {"from": "gpt", "value": "a"},
    {"from": "human", "value": "B?"},
]

SHAPES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "text": ("Hi there", HI),
    "prompt": ({"prompt": " Hi there\n"}, [{"role": "user", "content": " Hi there\n"}]),
    "column in another case": ({"Question": "Hi there", "Answer": "x"}, HI),
    "empty columns before it": ({"prompt": " ", "question": None, "text": "Hi there"}, HI),
    "messages": ({"messages": TALK}, TALK),
    "messages with their answer": ({"messages": [*TALK, assistant("b")]}, [*TALK, assistant("b")]),
    "a row that is the list": (TALK, TALK),
    "prompt as messages (TRL)": ({"prompt": TALK, "completion": [assistant("b")]}, TALK),
    "prompt beside messages": ({"prompt": "B?", "messages": TALK}, TALK),
    "roles in another case": ({"messages": [{"role": "System", "content": "S"}, {"role": "USER ", "content": "Hi there"}]},
                              [system("S"), *HI]),
    "prompter (OpenAssistant)": ({"messages": [{"role": "prompter", "text": "Hi there"}]}, HI),
    "ShareGPT": ({"id": "a", "conversations": GPT}, TALK[1:]),
    "ShareGPT with tools": (
        {"conversations": [*GPT[:1], {"from": "function_call", "value": "w()"}, {"from": "observation", "value": "12C"}]},
        [user("A?"), assistant("w()"), tool("12C")],
    ),
    "ShareGPT, the assistant first": ({"conversations": GPT[1:]}, TALK[2:]),
    "keys of both, null where absent": (
        {"messages": [{"from": "human", "value": "Hi there", "role": None, "content": None}]}, HI,
    ),
    "OpenAI's keys, null the other ones": (
        {"messages": [{"from": None, "value": None, "role": "user", "content": "Hi there"}], "conversations": None}, HI,
    ),
    "entries that are null": ({"messages": [None, {"role": "user", "content": None}, *HI, None]}, HI),
    "a customer": ({"messages": [{"role": "customer", "content": "A?"}, assistant("a"), {"role": "End-User", "content": "B?"}]}, TALK[1:]),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}]},
              [user("Hi\nyou")]),
    "parts filled with null": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi there", "image_url": None}]}]}, HI,
    ),
    "parts as JSON": ({"messages": [{"role": "user", "content": '[{"type": "text", "text": "Hi there"}]'}]}, HI),
    "parts as JSON in the prompt": ({"prompt": '[{"type": "text", "text": "Hi there"}]'}, HI),
    "a message that is JSON": ({"messages": [user('[{"type": "bug", "text": "x"}]')]}, [user('[{"type": "bug", "text": "x"}]')]),
    "each message as JSON": ({"messages": [json.dumps(message) for message in TALK]}, TALK),
    "keys that are empty": ({"messages": [{"role": "", "content": "", "from": "human", "value": "Hi there"}]}, HI),
    "a part without text": ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}, {"type": "text", "text": "Hi there"}]}]}, HI),
    "a call in OpenAI's older form": (
        {"messages": [*HI, {"role": "assistant", "content": None, "function_call": CALL["function"]}, tool("12C")]},
        [*HI, {**assistant(""), "tool_calls": [{"type": "function", "function": CALL["function"]}]}, tool("12C")],
    ),
    "parts as the prompt": ({"content": [{"type": "text", "text": "Hi there"}]}, HI),
    "one message a row": ({"role": "user", "content": "Hi there"}, HI),
    "one message a row (OpenAssistant)": ({"message_id": "m", "role": "prompter", "text": "Hi there", "lang": "en"}, HI),
    "a role that is no speaker's": ({"role": "engineer", "prompt": "Hi there"}, HI),
    "a sender that is no speaker": ({"from": "a@b", "text": "Hi there"}, HI),
    "one message": ({"messages": {"role": "user", "content": "Hi there"}}, HI),
    "messages by columns": ({"messages": {"role": ["user", "assistant"], "content": ["A?", "a"]}}, TALK[1:3]),
    "turns (MT-Bench)": ({"turns": ["Hi there", "And then?"]}, HI),
    "turns in prompt": ({"prompt": ["Hi there", "And then?"]}, HI),
    "turns that are messages": ({"turns": TALK}, TALK),
    "Alpaca": ({"instruction": "Translate", "input": "Good day", "output": "x", "text": "whole"}, [user("Translate\n\nGood day")]),
    "Alpaca without input": ({"instruction": "Translate", "input": "", "output": "x"}, [user("Translate")]),
    "Alpaca with a system prompt": ({"system": "S", "instruction": "I", "input": "x"}, [system("S"), user("I\n\nx")]),
    "Dolly": ({"instruction": "Who won?", "context": "France won.", "response": "x"}, [user("Who won?\n\nFrance won.")]),
    "question and context": ({"question": "Who won?", "context": "France won."}, [user("Who won?\n\nFrance won.")]),
    "input and output": ({"input": "Hi there", "output": "x"}, HI),
    "a system column": ({"system_prompt": "S", "prompt": "Hi there"}, [system("S"), *HI]),
    "a system column beside a system message": ({"system": "T", "messages": [system("S"), *HI]}, [system("S"), *HI]),
    "messages as JSON": ({"messages": json.dumps(TALK)}, TALK),
    "one message as JSON": ({"messages": json.dumps(HI[0])}, HI),
    "conversations as JSON": ({"conversations": json.dumps(GPT)}, TALK[1:]),
    "turns as JSON": ({"turns": '["Hi there", "And then?"]'}, HI),
    "prompt as JSON": ({"prompt": json.dumps(TALK)}, TALK),
    "a prompt that only looks like JSON": ({"prompt": '[1, 2] and {"a": 1}'}, [user('[1, 2] and {"a": 1}')]),
    "a prompt that is JSON": ({"prompt": '{"a": [1]}'}, [user('{"a": [1]}')]),
    "a prompt in quotes": ({"prompt": '"Hi there"'}, [user('"Hi there"')]),
    **{
        f"a prompt that is JSON of something else: {text}": ({"prompt": text}, [user(text)])
        for text in (
            '{"messages": "two new messages in inbox", "unread": 3}',
            '{"messages": ["one", "two"]}',
            '[{"from": "Paris", "to": "Rome"}]',
            '[{"from": "user", "to": "Rome"}]',
            '[{"role": "user", "content": "x"}, {"role": "editor", "content": "y"}]',
            '[{"role": "user", "content": "x"}, "y"]',
        )
    },
    "a call and its result": (
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                      {"role": "tool", "content": "12C", "tool_call_id": "1", "name": None}], "tools": [TOOL]},
        [*HI, {**assistant(""), "tool_calls": [CALL]}, {**tool("12C"), "tool_call_id": "1"}],
    ),
    "tools as JSON": ({"prompt": "Hi there", "tools": json.dumps([TOOL])}, HI),
    "each tool as JSON": ({"prompt": "Hi there", "tools": [json.dumps(TOOL)]}, HI),
    "tools filled with null": ({"prompt": "Hi there", "tools": [{**TOOL, "strict": None}]}, HI),
    "no tools": ({"prompt": "Hi there", "tools": []}, HI),
}  # fmt: skip
"""By name: a row, and its messages. Rows with "tools" in their name declare `TOOL`."""

UNUSABLE: dict[str, tuple[Any, str]] = {
    "no text": ({"prompt": " "}, "without a user's text"),
    "a number": ({"prompt": 3}, "without a user's text"),
    "the model's own answer": ({"conversations": [{"from": "gpt", "value": "x"}]}, "without a user's text"),
    "a system prompt alone": ({"messages": [system("S")]}, "without a user's text"),
    "a message of the assistant": ({"role": "assistant", "text": "x"}, "without a user's text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}]},
        "with parts that are not text (images, audio)",
    ),
    "an unknown role": ({"messages": [{"role": "critic", "content": "x"}]}, "with an unknown role, 'critic'"),
    "no role": ({"messages": [{"content": "x"}]}, "with messages without a role"),
    "a broken string": ({"messages": '[{"role": "user"'}, "with messages in a string that can't be read"),
    "half of a pair": ({"prompt": "a \ud83d"}, "with text that is not valid Unicode (half of a surrogate pair)"),
    "no row": (None, "that are NoneType, neither text nor an object"),
}  # fmt: skip
"""By name: a row that has no conversation, and why."""
