"""A server writes: the same samples as an undisturbed run's whatever befalls requests, and greedily those of this process."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.index import read_samples
from align.data.synthesis import Synthesis, synthesize
from align.writing.rows import Plan, ignore_progress
from align.writing.served import Served
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.folder.chat import Chat
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import shallow_target, switching_target
from tests.loopback_server import FAULTS, SLOW, Loopback

WORDS = ["recipe=debug_block", "data.samples=14", "data.batch_size=6", "data.max_answer_tokens=10", "data.max_prompt_tokens=24"]  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return shallow_target(1)


def recipe_of(url: str, *more: str) -> Recipe:
    words = [*WORDS, f"data.writer=openai:{url}", "data.concurrency=4", *more]
    return load_recipe(list({word.partition("=")[0]: word for word in words}.values()))


def texts(folder: Path) -> list[tuple[list[int], int, float]]:
    found = read_samples(folder)
    return [
        (found[i].tolist(), int(found.answer_start[i]), float(found.temperature[i]))
        for i in range(len(found))
    ]


def prompts(folder: Path, count: int = 14) -> str:
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"Say {'abcdefghijklmnop'[i:]} {i}"}) + "\n" for i in range(count)
        )
    )
    return f"data.prompts={path}"


def test_greedy_answers_are_those_of_this_process(tmp_path: Path, target: Target) -> None:
    words = [prompts(tmp_path), "data.answer_temperatures=[0.0]"]
    synthesize(load_recipe([*WORDS, *words]), target, tmp_path / "own", quiet=True)
    with Loopback(target) as server:
        synthesize(recipe_of(server.url, *words), target, tmp_path / "served", quiet=True)
    assert texts(tmp_path / "served") == texts(tmp_path / "own")


@pytest.mark.parametrize("at", [0, 1])
def test_a_greeting_without_choices_is_asked_for_again(
    tmp_path: Path, target: Target, at: int
) -> None:
    """The first request says what the server understands; it fails as others do."""
    with Loopback(target, fault=lambda n: "no choices" if n == at else None) as server:
        synthesize(recipe_of(server.url, "data.samples=2"), target, tmp_path / "a", quiet=True)
    with (
        Loopback(target, fault=lambda n: "no choices") as server,
        pytest.raises(UserError, match="without choices"),
    ):
        synthesize(recipe_of(server.url), target, tmp_path / "b", quiet=True)


def test_greedy_prompts_and_their_faults_are_those_of_this_process(
    tmp_path: Path, target: Target
) -> None:
    """Prompts that are too long, or empty, and answers that are, are told as `Writer` tells them."""
    words = [
        "data.prompt_temperature=0",
        "data.answer_temperatures=[0.0]",
        "data.near_duplicate_threshold=2",
    ]
    words += [
        "data.prompt_openings=['', 'a', 'xyz', 'q 1', 'Tell', 'b b', 'zz', '77']",
        "data.samples=9",
    ]
    words += ["data.max_prompt_tokens=12"]
    own = synthesize(
        load_recipe([*WORDS[:1], *WORDS[2:4], *words]), target, tmp_path / "own", quiet=True
    )
    with Loopback(target) as server:
        found = synthesize(recipe_of(server.url, *words), target, tmp_path / "served", quiet=True)
    assert texts(tmp_path / "served") == texts(tmp_path / "own")
    assert found["dropped"] == own["dropped"] and found["dropped"]


@pytest.mark.parametrize("chat", [True, False])
def test_templates_and_base_models_are_prompted_as_in_this_process(
    tmp_path: Path, chat: bool
) -> None:
    words = ["data.answer_temperatures=[0.0]", "data.samples=2", "data.batch_size=2"]
    target = switching_target()
    if chat:
        words += [
            prompts(tmp_path),
            "data.template_kwargs.enable_thinking=false",
            "data.system=Be brief.",
        ]
        d = recipe_of("http://x", *words).data
        target.chat = Chat(d.template_kwargs, d.system)
    else:
        words += ["data.near_duplicate_threshold=2"]
        target.tokenizer.chat_template = None
    synthesize(load_recipe([*WORDS[:1], *WORDS[3:], *words]), target, tmp_path / "own", quiet=True)
    with Loopback(target) as server:
        synthesize(recipe_of(server.url, *words), target, tmp_path / "served", quiet=True)
    assert texts(tmp_path / "served") == texts(tmp_path / "own")


@pytest.mark.slow
def test_a_disturbed_run_ends_with_the_samples_of_an_undisturbed_one(
    tmp_path: Path, target: Target
) -> None:
    """A third of the requests meet each fault in turn; and no more are in flight than are allowed."""
    with Loopback(target) as server:
        whole = synthesize(recipe_of(server.url), target, tmp_path / "whole", quiet=True)
    assert (whole["served_model"], whole["token_ids"]) == ("debug", "exact")
    assert whole["writer"] == "server" and whole["dtype"] is None and whole["finished"]
    assert not [*(tmp_path / "whole").glob(".answers*")]

    def fault(number: int) -> str | None:
        found = FAULTS[number // 3 % len(FAULTS)] if number % 3 == 1 else None
        return None if found == "slow" and number > 3 * len(FAULTS) else found  # each takes seconds

    with Loopback(target, fault=fault) as server:
        recipe = recipe_of(server.url, f"data.reply_seconds={SLOW / 1.25}")
        found = synthesize(recipe, target, tmp_path / "disturbed", quiet=True)
        assert set(FAULTS) < set(server.met) and server.most_at_once <= 4 + server.met["slow"]
    assert texts(tmp_path / "disturbed") == texts(tmp_path / "whole")
    assert found == whole


def test_a_killed_run_asks_for_no_finished_row_again(tmp_path: Path, target: Target) -> None:
    class Killed(BaseException):
        pass

    def stop_after(rows: int) -> Callable[..., None]:
        left = [rows]

        def progress(tokens: int, done: int = 0) -> None:
            left[0] -= done
            if left[0] < 0:
                raise Killed

        return progress

    with Loopback(target) as server:
        synthesize(recipe_of(server.url), target, tmp_path / "whole", quiet=True)
        alone = len(server.asked)
    with Loopback(target) as server:
        for rows in (3, 5, 2):
            writing = Synthesis(recipe_of(server.url), target, tmp_path / "killed", quiet=True)
            with pytest.raises(Killed):
                while True:
                    writing.write_shard(stop_after(rows))
            journal = next((tmp_path / "killed").glob(".answers*"))
            writing.close()
            journal.write_bytes(journal.read_bytes() + b'{"row": 3, "tok')  # a line that was torn
        synthesize(recipe_of(server.url), target, tmp_path / "killed", quiet=True)
        greetings = 3 * 9  # one and eight probes for each start but the first
        assert len(server.asked) <= alone + greetings + 3 * 4 * 2  # and at most what was in flight
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")
    assert data.read_manifest(tmp_path / "killed") == data.read_manifest(tmp_path / "whole")
    last = data.read_manifest(tmp_path / "killed")["shards"] - 1
    left = tmp_path / "killed" / f".answers-{last:05d}.jsonl"
    left.touch()  # killed when the last shard was in the manifest
    synthesize(recipe_of(server.url), target, tmp_path / "killed", quiet=True)
    assert not left.exists()


@pytest.mark.parametrize(("ids", "strict"), [(False, False), (True, True)])
def test_without_token_ids_texts_are_tokenised_again_and_checked(
    tmp_path: Path, target: Target, ids: bool, strict: bool
) -> None:
    """What does not come back the same is dropped and counted. The toy writes bytes that are no text now and then."""
    words = [prompts(tmp_path), "data.answer_temperatures=[0.0]", "data.max_answer_tokens=2"]
    synthesize(load_recipe([*WORDS[:3], *words]), target, tmp_path / "own", quiet=True)
    with Loopback(target, ids=ids, strict=strict) as server:
        found = synthesize(recipe_of(server.url, *words), target, tmp_path / "served", quiet=True)
    own = texts(tmp_path / "own")
    served = texts(tmp_path / "served")
    assert served and all(text in own for text in served)
    lost = sum(count for why, count in found["dropped"].items() if "in the server's reply" in why)
    assert len(served) + lost == len(own) and lost > 0


def test_settings_reach_the_server(tmp_path: Path, target: Target) -> None:
    """Engines take top-p, top-k and penalties from the model's folder where a request is silent."""
    with Loopback(target) as server:
        recipe = recipe_of(
            server.url, "data.top_p=0.9", "data.answer_temperatures=[0.5]", "data.samples=4"
        )
        synthesize(recipe, target, tmp_path / "data", quiet=True)
        body = [b for b in server.asked if b["temperature"] != 1][
            -1
        ]  # of an answer: prompts are drawn at 1
    assert (body["top_p"], body["top_k"], body["temperature"], body["repetition_penalty"]) == (0.9, -1, 0.5, 1.0)  # fmt: skip
    assert len({b["seed"] for b in server.asked}) > 4


def test_settings_are_kept_from_the_first_answer_on(tmp_path: Path, target: Target) -> None:
    with Loopback(target) as server:
        Synthesis(recipe_of(server.url), target, tmp_path, quiet=True).close()
        with pytest.raises(UserError, match="top_p is 1.0, this recipe says 0.5"):
            synthesize(recipe_of(server.url, "data.top_p=0.5"), target, tmp_path, quiet=True)
        with pytest.raises(UserError, match="writer is 'server', this recipe says 'target'"):
            synthesize(load_recipe(WORDS), target, tmp_path, quiet=True)


def test_a_server_that_goes_away_leaves_what_is_written(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once, not for every request in flight."""

    def fault(number: int) -> str | None:
        return "500" if number > 20 else None

    with Loopback(target, fault=fault) as server:
        with pytest.raises(
            UserError,
            match=r"answered 500 'planted', for \d+ s .data.retry_seconds.; what is written stays",
        ):
            synthesize(
                recipe_of(server.url, "data.retry_seconds=0.5"), target, tmp_path, quiet=True
            )
        assert [*tmp_path.glob(".answers*")]
    gc.collect()
    assert not caplog.records


def test_another_model_is_refused(tmp_path: Path, target: Target) -> None:
    with Loopback(target, model="other") as server:
        with pytest.raises(
            UserError, match="serves 'other', not target.name='debug'.*served_model=other"
        ):
            synthesize(recipe_of(server.url), target, tmp_path, quiet=True)
        with pytest.raises(UserError, match="data.served_model='othr'.*did you mean 'other'"):
            synthesize(
                recipe_of(server.url, "data.served_model=othr"), target, tmp_path, quiet=True
            )
        synthesize(
            recipe_of(server.url, "data.served_model=other", "data.samples=2"),
            target,
            tmp_path,
            quiet=True,
        )
    with (
        Loopback(load_target("debug-qwen2")) as server,
        pytest.raises(
            UserError, match="is not target.name='debug': the target would choose .*% of its greedy"
        ),
    ):
        synthesize(recipe_of(server.url), target, tmp_path / "b", quiet=True)
    with (
        Loopback(target, limit=40) as server,
        pytest.raises(UserError, match="takes 40 tokens, a sample"),
    ):
        synthesize(recipe_of(server.url), target, tmp_path / "c", quiet=True)


def test_batches_ahead_are_begun_only_where_they_are_needed(tmp_path: Path, target: Target) -> None:
    with Loopback(target) as server:
        recipe = recipe_of(server.url, "data.concurrency=64")
        source = Served(Plan(recipe, target, chat_template(target), None), tmp_path, quiet=True)
        source.write(0, 14, ignore_progress)
        assert sorted(source._batches) == [1, 2]
        source.write(1, 6, ignore_progress)
        assert sorted(source._batches) == [2]
        source.close()
