"""Forty prompts written for this project, ten each of chat, reasoning, coding and maths. They need no network and no licence."""

from __future__ import annotations

from align.benchmarks.own import BUILTIN
from decode.suites.prompt import own_suite

SUITE = own_suite("builtin", "built-in prompts", BUILTIN)
