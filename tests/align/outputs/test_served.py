"""A server runs the target while training runs: the same losses, whatever befalls requests; a bounded queue; one-line errors."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from align import train
from align.config.parser import load_recipe
from align.outputs.served import PrefetchedSteps, StateServer
from align.training.build import conditioning
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from tests.builders import read_metric
from tests.loopback_server import Loopback

KEY = "trainer.features_writer"
LAYERS = {
    "debug_taps": [0, 2, 3],
    "debug_block": [2, 3],
    "debug_mdlm": [3],
    "debug_autoregressive": [3],
}
TAPS = LAYERS["debug_taps"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Loopback]:
    folder = tmp_path / "states"
    folder.mkdir()
    with Loopback(load_target("debug"), states=folder, layers=TAPS) as found:
        yield found


@pytest.fixture
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("align.writing.client.RETRIES", 1)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "states"]


def words(output: Path, debug_data: Path, *more: str, recipe: str = "debug_taps") -> list[str]:
    return [f"recipe={recipe}", f"output={output}", f"data.path={debug_data}", *more]


@pytest.mark.parametrize(
    "recipe", ["debug_taps", *(pytest.param(x, marks=pytest.mark.slow) for x in [*LAYERS][1:])]
)
def test_losses_are_those_of_the_target_itself(
    server: Loopback,
    tmp_path: Path,
    debug_data: Path,
    recipe: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is stored: neither here nor by the server, once it is read."""
    server.layers, server.lag = LAYERS[recipe], 0.01
    server.fault = {3: "500", 6: "dropped"}.get
    own, served = tmp_path / "own", tmp_path / "served"
    steps = "trainer.max_steps=4"
    train.main(words(own, debug_data, steps, recipe=recipe))
    writer = [f"{KEY}=vllm:{server.url}", "data.concurrency=3"]
    capsys.readouterr()
    train.main(words(served, debug_data, steps, *writer, recipe=recipe))
    for name in ("train/loss", "validation/loss"):
        losses = read_metric(served, name)
        assert losses and losses == pytest.approx(read_metric(own, name), rel=1e-4)
    shown = capsys.readouterr().err
    assert "states of 'debug' are 0.0% from the target's own; at most 4 batches" in shown
    assert re.search(r"returned states of \d+ texts \([\d,]+ tokens\); training waited", shown)
    assert not [*server.states.iterdir()] and not (served / "features").exists()  # type: ignore[union-attr]
    assert server.most_at_once <= 3 and not threads()


def test_the_queue_is_bounded_and_keeps_the_order() -> None:
    """Later batches come first."""
    requested: list[int] = []

    def answer(number: int) -> Tensor:
        time.sleep(0.02 * (2 - number % 3))
        return torch.tensor(number)

    with ThreadPoolExecutor() as pool:

        def request(number: int) -> Future[Tensor]:
            requested.append(number)
            return pool.submit(answer, number)

        steps: Any = [SimpleNamespace(batch=i, states_BLFD=None) for i in range(8)]
        fake: Any = SimpleNamespace(request=request, ahead=3, waited=0.0)
        for i, step in enumerate(PrefetchedSteps(steps, fake)):
            assert step.batch == i and step.states_BLFD is not None and int(step.states_BLFD) == i
            assert len(requested) == min(i + 3, 8)


@pytest.mark.usefixtures("few_retries")
def test_a_server_that_dies_ends_training_which_resumes(
    server: Loopback, tmp_path: Path, debug_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    more = f"{KEY}=vllm:{server.url}", "trainer.checkpoint_every=2", "trainer.max_steps=6"
    train.main(words(whole, debug_data, *more))
    count = len(server.asked)
    server.fault = lambda number: "dropped" if number > count * 8 // 5 else None
    with pytest.raises(SystemExit):
        train.main(words(run, debug_data, *more))
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{server.url}/v1/completions: no usable answer" in error
    assert not threads()
    done = len(read_metric(run))
    assert 2 <= done < 6
    server.fault = lambda number: None
    train.main(words(run, debug_data, *more))
    assert "resuming from" in capsys.readouterr().err
    assert read_metric(run) == read_metric(whole)


def move(server: Loopback) -> None:
    store = server._store
    server._store = lambda folder, prompt: store(folder, prompt).parent / "elsewhere.safetensors"  # type: ignore[method-assign]


def answer_another(server: Loopback) -> None:
    answer = server.answer
    server.answer = lambda body: answer(body | {"prompt": body["prompt"][::-1]})  # type: ignore[method-assign]


def noise(states: Tensor) -> Tensor:
    return states + 0.3 * states.std() * torch.randn(states.shape)


@pytest.mark.usefixtures("few_retries")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: vars(s).update(model="other"), "serves 'other', not target.name='debug'.*; start it with: vllm serve debug"),
        (lambda s: vars(s).update(limit=96), "context of 96 tokens, but samples can reach 97; lower data.length"),
        (lambda s: vars(s).update(states=None), "returned no hidden states; start it with: vllm serve debug"),
        (lambda s: vars(s).update(layers=[0, 1, 3]), "from the target's own: another model, or other layers; start it with"),
        (lambda s: vars(s).update(change=noise), "from the target's own: another model, or other layers"),
        (lambda s: vars(s).update(layers=[3]), r"shape \(\d+, 1, \d+\), not \(\d+, 3, \d+\); start it with"),
        (lambda s: vars(s).update(change=lambda states: states[:-2]), r"shape \(.*\), not"),
        (lambda s: vars(s).update(lag=60.0), r"not readable here \(data.reply_seconds\)"),
        (lambda s: vars(s).update(fault=lambda number: "500"), "/v1/completions: answered 500 'planted'"),
        (move, "not readable here .*; the server must share its folder"),
        (answer_another, "holds states of another text"),
    ],
    ids=["other name", "context", "no states", "layers", "model", "fewer layers", "fewer tokens", "late", "failing", "not shared", "text"],
)  # fmt: skip
def test_wrong_servers_are_refused(
    server: Loopback, change: Callable[[Loopback], None], says: str
) -> None:
    change(server)
    arguments = [f"{KEY}=vllm:{server.url}", "data.length=96", "data.reply_seconds=2"]
    recipe, target = load_recipe(["recipe=debug_taps", *arguments]), load_target("debug")
    with pytest.raises(UserError, match=says) as caught:
        StateServer(recipe, target, conditioning(recipe.drafter, target), quiet=True)
    assert "\n" not in str(caught.value) and not threads()


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        train.main(["recipe=debug_taps", f"output={run}", f"{KEY}=vllm:http://127.0.0.1:9"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    ids = json.dumps([i + 1 for i in TAPS])
    assert "is the server up?; start it with: vllm serve debug" in error and ids in error
    assert not (run / "data").exists() and not threads()
