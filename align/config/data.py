"""The recipe's section `data`: text that the target generates, and other text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from align.config.option import Section, option, require
from specalign.common.schema import JsonObject

API_KEY = "SPECALIGN_API_KEY"
"""The environment variable with a server's API key. A name of our own, so that no other service's
key is sent."""
GENERATED_PROMPT = 80
"""Default limit of generated prompts, in tokens."""
TEMPLATE = 40
"""Assumed tokens of a chat template where the tokenizer is unknown."""


_SERVER = re.compile(
    r"openai:https?://(\[[\da-f:]+\]|[^\s/@?#:\[\]]+)(:[1-6]?\d{1,4})?(/[^\s/@?#]*)*"
)


@dataclass
class DataConfig(Section):
    """Text that the target generates, and other text to train on."""

    path: str | None = option(None, "data folder; default: data in the output folder")
    samples: int = option(2000, "number of samples to generate", low=2)
    prompts: str | None = option(
        None, "null = written by the target; else a hub id, file or folder (JSONL, CSV, Parquet, …)"
    )
    prompts_split: str = option("train", "split of a data set; in a folder, taken from file names")
    prompts_config: str | None = option(None, "configuration of a hub data set that has several")
    prompts_revision: str | None = option(None, "branch, tag or commit of a hub data set")
    prompts_column: str | None = option(
        None, "column of the prompts; null = the first known one (messages, prompt, question, …)"
    )
    template_kwargs: JsonObject = option({}, "variables of the chat template, name: value")
    system: str | None = option(None, "system prompt; null = the template's default", prose=True)
    prompt_temperature: float = option(1.0, "temperature of generated prompts", low=0)
    prompt_openings: list[str] = option([], "openings of generated prompts, in rotation")
    answer_temperatures: list[float] = option(
        [0.0, 0.0, 0.7, 1.0], "answer temperatures, used in rotation", low=0
    )
    top_p: float = option(1.0, "nucleus limit of generation", above=0, high=1)
    top_k: int = option(0, "top-k limit of generation; 0 = none", low=0)
    max_prompt_tokens: int | None = option(
        None,
        "longest prompt; null = 80 if generated, else what data.length leaves",
        low=1,
        high=2**24,
    )
    long_prompts: Literal["drop", "cut"] = option(
        "drop", "longer prompts: drop, or cut the oldest turns, then the longest message's start"
    )
    turns: Literal["last", "all"] = option("last", "which answers of a conversation to generate")
    max_answer_tokens: int = option(160, "longest answer, in tokens", low=1, high=2**24)
    batch_size: int = option(128, "rows generated at a time; one shard each", low=1)
    writer: str = option("target", "target = in this process; openai:URL = a server")
    concurrency: int = option(64, "requests in flight to a server", low=1, high=65536)
    served_model: str | None = option(None, "the target's name on the server; null = target.name")
    reply_seconds: float = option(600.0, "request timeout in seconds", above=0)
    length: int = option(512, "length of a packed row", low=8, high=2**24)
    validation_fraction: float = option(0.02, "share of samples held out", above=0, high=0.5)
    text: list[str] = option(
        [], "other text to train on first: hub ids, files or folders (text, code, JSONL, CSV, …)"
    )
    mixture: list[float] = option([], "shares of the sources of data.text; empty = equal", above=0)
    text_tokens: int = option(1_000_000, "tokens of data.text to read", low=1)
    text_share: float = option(0.5, "share of the steps that read data.text", above=0, high=1)
    text_column: str = option("text", "column that holds the text")
    text_split: str = option("train", "split of a data set of data.text")
    text_config: str | None = option(None, "configuration of a hub data set of data.text")
    text_revision: str | None = option(None, "branch, tag or commit of a hub data set of data.text")
    exclude: list[str] = option(
        ["suites"], "drop text that shares 13 words with these: suites (decode.eval's), or files"
    )
    write: Literal["missing", "never"] = option("missing", "never = fail if data are missing")

    @property
    def prompt_limit(self) -> int:
        """`max_prompt_tokens`, or what its null stands for."""
        if self.max_prompt_tokens is not None:
            return self.max_prompt_tokens
        if self.prompts is None:
            return GENERATED_PROMPT
        return max(GENERATED_PROMPT, self.length - self.max_answer_tokens - TEMPLATE)

    @property
    def server(self) -> str | None:
        """The address of the server that writes, without `/v1`; None = the target itself writes."""
        kind, _, url = self.writer.partition(":")
        return url.rstrip("/").removesuffix("/v1") if kind == "openai" else None

    def validate(self) -> None:
        sources = len(self.text)
        require(self.answer_temperatures, "data.answer_temperatures must not be empty")
        require(
            len(self.mixture) in (0, sources),
            f"data.mixture has {len(self.mixture)} entries for {sources} sources of data.text",
        )
        require(len(set(self.text)) == sources, f"data.text={self.text} names a source twice")
        require(
            self.writer == "target" or _SERVER.fullmatch(self.writer),
            "data.writer must be target or openai:URL (openai:http://127.0.0.1:8000) "
            f"without a user, a key and a query; the environment variable {API_KEY} has the key",
        )
