"""Tokens are drawn from the softmax within its limits, and writing in batches changes nothing."""

import torch

from align.config.parser import load_recipe
from align.writing.generation import Writer, draw
from align.writing.rows import Plan, Row
from align.writing.template import chat_template
from specalign.lm.model import Target


def test_draw_has_the_softmax_law() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 300, generator=generator) * 2
    for temperature in (0.7, 1.0):
        uniform = (torch.arange(20000) + 0.5) / 20000  # a grid: frequencies exact to 1/20000
        heat = torch.full((20000,), temperature)
        drawn = draw(logits.expand(20000, -1).clone(), heat, uniform)
        counts = torch.bincount(drawn, minlength=300) / 20000
        assert (counts - (logits[0] / temperature).softmax(-1)).abs().max() < 1.5e-4


def test_draw_limits() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    uniform = (torch.arange(1000) + 0.5) / 1000
    many = logits.expand(1000, -1)
    assert set(draw(many.clone(), torch.ones(1000), uniform, top_k=2).tolist()) == {0, 1}
    assert set(draw(many.clone(), torch.ones(1000), uniform, top_p=0.85).tolist()) == {0, 1, 2}
    assert set(draw(many.clone(), torch.zeros(1000), uniform).tolist()) == {0}
    edge = torch.tensor([[0.0, -torch.inf, -torch.inf]]).expand(3, -1)
    drawn = draw(edge.clone(), torch.ones(3), torch.tensor([0.0, 0.5, 0.9999999]))
    assert drawn.tolist() == [0, 0, 0]


def _write(target: Target, count: int, temperature: float) -> list[Row]:
    recipe = load_recipe(["recipe=debug_block", "data.max_answer_tokens=24"])
    plan = Plan(recipe, target, chat_template(target), None)
    starts = [[1, 5, *range(40 + i, 46 + i)] for i in range(count)]
    rows = [Row(i, temperature, start, writes_prompt=False) for i, start in enumerate(starts)]
    Writer(target, plan).write_rows(rows, torch.Generator().manual_seed(3))
    return rows


def test_batched_greedy_writing_equals_one_at_a_time(target: Target) -> None:
    for row in _write(target, 9, 0.0):
        cache = target.new_cache(1, 60)
        tokens = list(row.tokens[: row.answer_start])
        logits = target.forward(torch.tensor([tokens]), cache=cache).logits_BLV
        while len(tokens) < len(row.tokens):
            tokens.append(int(logits[0, -1].argmax()))
            logits = target.forward(torch.tensor([tokens[-1:]]), cache=cache).logits_BLV
        assert tokens == row.tokens
        assert row.tokens[-1] in target.eos_ids or len(row.tokens) - row.answer_start == 24
