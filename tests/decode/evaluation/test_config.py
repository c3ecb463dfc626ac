"""What a measurement is asked to do, what is recorded of it, and what it runs."""

from __future__ import annotations

from decode import eval
from decode.evaluation.config import EvalConfig
from decode.evaluation.plan import make_plan


def test_settings_are_recorded_as_in_older_folders() -> None:
    assert EvalConfig(limit=3, tune=4).recorded == {
        "limit": 3, "max_new_tokens": 128, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "repeats": 1, "warmup": 1,
        "draft_tokens": None, "tree_nodes": None, "verifier": "auto", "steps": 1, "order": "left_to_right",
        "drafter_tokenizer": None, "tune": 4, "trust_remote_code": None, "template_kwargs": None, "system": None,
    }  # fmt: skip


def test_the_command_line_is_a_typed_config() -> None:
    words = [
        "--methods",
        "lookup,all",
        "--sweep",
        "gamma=2,4",
        "--temperature",
        "1",
        "--draft-tokens",
        "3",
    ]
    config = eval.read_config([*words, "--order", "random"])
    assert config.methods is not None and config.methods.has_all
    assert config.sweep.values == {"gamma": ["2", "4"]} and config.sampling.temperature == 1
    assert (config.drafting.draft_tokens, config.drafting.order) == (3, "random")


def test_the_drafters_that_figures_depend_on() -> None:
    words = ["--target", "debug", "--drafter", "autoregressive=debug"]
    plan, _ = make_plan(eval.read_config([*words, "--methods", "lookup"]), print)
    assert (list(plan.methods), plan.drafters) == (["plain", "lookup"], {})
    plan, left_out = make_plan(eval.read_config([*words, "--methods", "all"]), print)
    assert plan.drafters == {"autoregressive": "debug"} and any(
        "block" in line for line in left_out
    )
    plan, _ = make_plan(eval.read_config([*words, "--verifier", "token"]), print)
    assert list(plan.methods) == ["plain", "lookup", "drafter", "combined"]
    assert plan.methods["drafter"].verifier == "token" and plan.methods["lookup"].verifier == "auto"
