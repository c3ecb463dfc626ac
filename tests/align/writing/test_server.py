"""A server writes the samples of an undisturbed run, and greedily those of this process."""

import json
from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data.synthesis import Synthesis, synthesize
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows.shards import read_samples
from tests.builders import shallow_target
from tests.loopback_server import FAULTS, SLOW, Loopback

pytestmark = pytest.mark.slow

WORDS = [
    *("recipe=debug_block", "data.samples=14", "data.batch_size=6", "data.max_answer_tokens=10"),
    "data.max_prompt_tokens=24",
]
GREEDY = "data.answer_temperatures=[0.0]"


@pytest.fixture(scope="module")
def target() -> Target:
    return shallow_target(1)


def recipe_of(url: str | None, *more: str) -> Recipe:
    server = [f"data.writer=openai:{url}", "data.concurrency=4"] if url else []
    words = [*WORDS, *server, *more]
    return load_recipe(list({word.partition("=")[0]: word for word in words}.values()))


def write(url: str | None, target: Target, folder: Path, *more: str) -> dict[str, Any]:
    return synthesize(recipe_of(url, *more), target, folder, quiet=True)


def texts(folder: Path) -> list[tuple[list[int], int, float]]:
    found = read_samples(folder)
    tokens = [found[i].tolist() for i in range(len(found))]
    return [*zip(tokens, found.answer_start.tolist(), found.temperature.tolist(), strict=True)]


def prompts(folder: Path) -> str:
    rows = [{"prompt": f"Say {'abcdefghijklmnop'[i:]} {i}"} for i in range(14)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.prompts={path}"


def test_greedy_texts_are_those_of_this_process(tmp_path: Path, target: Target) -> None:
    """With given prompts and with written ones, some of which are too long or empty."""
    openings = "data.prompt_openings=['', 'a', 'xyz', 'q 1', 'Tell', 'b b', 'zz', '77']"
    limits = ["data.samples=3", "data.max_prompt_tokens=12"]
    written = ["data.prompt_temperature=0", openings, *limits]
    with Loopback(target) as server:
        for name, words in (("given", [prompts(tmp_path)]), ("written", written)):
            own = write(None, target, tmp_path / f"{name} own", GREEDY, *words)
            found = write(server.url, target, tmp_path / name, GREEDY, *words)
            assert texts(tmp_path / name) == texts(tmp_path / f"{name} own")
            assert found["dropped"] == own["dropped"]
    assert own["dropped"]


def test_a_disturbed_run_has_the_same_samples(tmp_path: Path, target: Target) -> None:
    """A third of the requests meet each fault in turn."""
    with Loopback(target) as server:
        whole = write(server.url, target, tmp_path / "whole")
    assert (whole["served_model"], whole["token_ids"]) == ("debug", "exact")
    assert whole["writer"] == "server" and whole["dtype"] is None and whole["finished"]

    def fault(number: int) -> str | None:
        found = FAULTS[number // 3 % len(FAULTS)] if number % 3 == 1 else None
        return None if found == "slow" and number > 3 * len(FAULTS) else found  # takes seconds

    with Loopback(target, fault=fault) as server:
        limit = f"data.reply_seconds={SLOW / 1.25}"
        found = write(server.url, target, tmp_path / "disturbed", limit)
        assert set(FAULTS) < set(server.met) and server.most_at_once <= 4 + server.met["slow"]
    assert texts(tmp_path / "disturbed") == texts(tmp_path / "whole")
    assert found == whole


def test_a_killed_run_has_the_same_samples(tmp_path: Path, target: Target) -> None:
    with Loopback(target) as server:
        whole = write(server.url, target, tmp_path / "whole")
        writing = Synthesis(recipe_of(server.url), target, tmp_path / "killed", quiet=True)
        writing.write_shard()
        server.fault = lambda number: "404"
        with pytest.raises(UserError, match="answered 404"):
            writing.write_shard()
        writing.close()
        server.fault = lambda number: None
        assert write(server.url, target, tmp_path / "killed") == whole
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


def test_a_server_that_returns_no_token_ids_is_refused(tmp_path: Path, target: Target) -> None:
    says = "token ids, as vLLM"
    with Loopback(target, ids=False) as server, pytest.raises(UserError, match=says):
        write(server.url, target, tmp_path)


def test_settings_reach_the_server_and_bind_the_folder(tmp_path: Path, target: Target) -> None:
    """Engines take missing values from the model's folder."""
    with Loopback(target) as server:
        words = ["data.top_p=0.9", "data.answer_temperatures=[0.5]", "data.samples=4"]
        write(server.url, target, tmp_path / "data", *words)
        body = [b for b in server.asked if b["temperature"] == 0.5][-1]
        assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.9, -1, 1.0)
        assert len({b["seed"] for b in server.asked}) > 4
        with pytest.raises(UserError, match="top_p is 0.9, this recipe says 0.5"):
            write(server.url, target, tmp_path / "data", *words, "data.top_p=0.5")
        with pytest.raises(UserError, match="writer is 'server', this recipe says 'target'"):
            write(None, target, tmp_path / "data", *words)


def test_another_model_is_refused(tmp_path: Path, target: Target) -> None:
    with Loopback(target, model="other") as server:
        with pytest.raises(UserError, match="serves 'other', not .*served_model=other"):
            write(server.url, target, tmp_path)
        with pytest.raises(UserError, match="data.served_model='othr'.*did you mean 'other'"):
            write(server.url, target, tmp_path, "data.served_model=othr")
        write(server.url, target, tmp_path, "data.served_model=other", "data.samples=2")
    for other, limits, says in (
        (load_target("debug-qwen2"), {}, "does not match target.name='debug': only"),
        (target, {"limit": 40}, "has a context of 40 tokens, but samples"),
    ):
        with Loopback(other, **limits) as server, pytest.raises(UserError, match=says):
            write(server.url, target, tmp_path / "b")
