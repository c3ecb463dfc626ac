"""Long inputs: the user's own documents, cut to a number of tokens, with a request for a summary."""

from itertools import cycle, islice
from pathlib import Path

from specalign.common.errors import UserError
from specalign.common.files import read_text
from specalign.common.text import plural
from specalign.rows.folders import visible_files
from specalign.rows.tables import kind_of, read_rows
from specalign.suites.prompt import Prompt, Row, Suite, find_text

ASK = "\n\nSummarize the text above in one paragraph."
CONTEXT = 4096
"""Tokens of a prompt, unless the user asks for others."""
CHARACTERS = 8
"""More than any tokenizer's characters per token over prose: prompts are cut by tokens later."""
_MOST_CHARACTERS = 64
"""The same over padded tables and indented code."""
_PLAIN = (".txt", ".md", ".rst")


def read_document(row: Row, number: int) -> Prompt:
    return Prompt(f"long-{number}", find_text(row, "text", "content"))


def shorten(content: str, characters: int) -> str:
    """A prompt with the first characters of its text, and the request."""
    text, _, ask = content.rpartition("\n")
    return f"{text[:characters]}\n{ask}"


def load_documents(path: Path, context: int) -> list[Prompt]:
    """A prompt of `context` tokens for each document: it and those after it, as far as they are
    needed. Raises UserError: no documents, or too little text for one prompt."""
    files = visible_files(path) if path.is_dir() else [path]
    texts: list[str] = []
    for file in files:
        if file.suffix.lower() in _PLAIN:
            texts.append(read_text(file))
        elif path.is_file() or kind_of(file):
            texts += [str(read_document(row, 0).content) for row in read_rows(file)]
    texts = [text for text in texts if text.strip()]
    wanted = context * _MOST_CHARACTERS
    if sum(map(len, texts)) < context:
        have = f"{plural(len(texts), 'document')} of {sum(map(len, texts))} characters"
        raise UserError(f"--documents={str(path)!r}: {have}: too little text for {context} tokens")
    prompts = []
    for start in range(len(texts)):
        parts: list[str] = []
        for text in islice(cycle(texts), start, start + len(texts)):
            parts.append(text)
            if sum(map(len, parts)) >= wanted:
                break
        content = "\n\n".join(parts) + ASK
        prompts.append(Prompt(f"long-{start + 1}", content, f"{context} tokens", cut=context))
    return prompts


SUITE = Suite("long", "long inputs", "long", read_document, excluded=False)
