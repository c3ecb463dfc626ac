"""Twenty prompts written for this project, five each of kinds that benchmarks of speculative decoding hold beside chat, code and
maths (Spec-Bench, arXiv 2401.07851): translation, summaries, questions, and questions with passages to answer them from."""

from __future__ import annotations

from align.benchmarks.own import TASKS
from decode.suites.prompt import own_suite

SUITE = own_suite("tasks", "translation, summaries, questions", TASKS)
"""Prompts of this project that are no chat, code or maths."""
