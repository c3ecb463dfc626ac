"""A server computes the target's states: the same features, whatever befalls requests; other layers and other models are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import features
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.makers.block import block_config
from align.outputs.served import ServedStates
from align.outputs.stand_ins import layers_asked
from align.training.build import conditioning
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import target_features
from tests.builders import block_options, packed_batch
from tests.loopback_server import Loopback

CONTEXTS = ("taps", "shared_kv", None)


def recipe_of(server: Loopback, *more: str) -> Recipe:
    return load_recipe(
        ["recipe=debug_taps", f"trainer.features_writer=vllm:{server.url}", "data.length=64", "data.concurrency=3", *more]
    )  # fmt: skip


def config_of(target: Target, context: str | None) -> BlockConfig | None:
    return (
        None
        if context is None
        else block_config(target, block_options(context=context, taps=3), None)
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Loopback]:
    with Loopback(load_target("debug"), states=tmp_path) as found:
        yield found


@pytest.mark.parametrize("context", CONTEXTS)
def test_features_are_the_targets_own(
    server: Loopback, tmp_path: Path, context: str | None
) -> None:
    """Of every document, padding aside; most layers are gone, and so are the server's files."""
    target, batch = load_target("debug"), packed_batch(server.target)
    config = config_of(target, context)
    server.layers, server.lag = layers_asked(target, config), 0.05
    server.fault = lambda number: {2: "500", 3: "dropped"}.get(number)
    own = target_features(server.target, batch.row(0), config)
    with ServedStates(recipe_of(server), target, config, quiet=True) as served:
        rows = list(
            served.ahead(((i, batch.row(i), 1.0) for i in range(2)), lambda item: item[0] == 1)
        )
        assert [place for place, _, _ in rows] == [0, 1]
        found = served.features(target, batch.row(0), config)
        served.features(target, batch.row(1), config)
    real = batch.document_BL[0] >= 0
    for mine, its in zip(found.tensors, own.tensors, strict=True):
        at = 2 if mine.dim() == 4 and mine.shape[2] == len(real) else 1
        mine, its = mine.movedim(at, 0)[real], its.movedim(at, 0)[real]
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-4)
    gone = [all(p.is_meta for p in layer.parameters()) for layer in target.layers]
    kept = config.target_layer_ids if config is not None and context == "shared_kv" else []
    assert gone == [i not in kept for i in range(target.num_layers)]
    assert list(tmp_path.iterdir()) == []
    assert server.most_at_once <= 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug_taps", "debug_block", "debug_mdlm"])
def test_what_a_server_stores_is_what_training_reads(
    server: Loopback,
    tmp_path: Path,
    debug_data: Path,
    recipe: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Padding aside; and nothing is asked for again."""
    words = [
        f"recipe={recipe}", f"data.path={debug_data}", "trainer.max_steps=3", "trainer.features_gb=1",
        "trainer.features_dtype=fp32", f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    config = conditioning(load_recipe(words), server.target)
    server.layers = layers_asked(server.target, config)
    features.main([*words, f"trainer.features_path={tmp_path / 'own'}"])
    asks = [*words, f"trainer.features_path={tmp_path / 'served'}", f"trainer.features_writer=vllm:{server.url}"]  # fmt: skip
    features.main(asks)
    assert "states of" in capsys.readouterr().out
    own, served = (
        {
            k: v
            for path in sorted((tmp_path / name).glob("*.safetensors"))
            for k, v in load_file(path).items()
        }
        for name in ("own", "served")
    )
    assert own.keys() == served.keys()
    for name, value in own.items():
        row, _, what = name.partition(".")
        real = served[f"{row}.hidden"][0].any(-1)  # padding has zeros
        at = (
            value.dim() - 2
            if what.startswith(("key", "value"))
            else value.dim() - 1
            if value.dim() == 1
            else 1
        )
        mine, its = served[name].movedim(at, 0)[real], value.movedim(at, 0)[real]
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-3)
    seals = [
        json.loads(next((tmp_path / n).glob("outputs-*.json")).read_text())
        for n in ("own", "served")
    ]
    assert seals[0]["rows"] == seals[1]["rows"]
    asked = len(server.asked)
    features.main(asks)
    assert len(server.asked) == asked + 1  # the probe


def test_a_server_that_goes_away_costs_no_row(
    server: Loopback, tmp_path: Path, debug_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it had computed is stored, and not asked for again."""
    words = [
        "recipe=debug_taps", f"data.path={debug_data}", "trainer.max_steps=3", "trainer.features_gb=1", f"output={tmp_path / 'run'}",
        f"trainer.features_writer=vllm:{server.url}", "data.concurrency=2",
    ]  # fmt: skip
    server.layers = layers_asked(server.target, conditioning(load_recipe(words), server.target))
    server.refusal = lambda body: "gone" if len(server.asked) > 8 else None  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        features.main(words)
    assert "gone" in capsys.readouterr().err
    there = len(
        json.loads(next((tmp_path / "run/features").glob("outputs-*.json")).read_text())["rows"]
    )
    assert there > 1
    server.refusal = lambda body: None  # type: ignore[method-assign]
    counts = []
    for more in ([], [f"trainer.features_path={tmp_path / 'anew'}"]):
        before = len(server.asked)
        features.main([*words, *more])
        counts.append(len(server.asked) - before)
    assert counts[0] <= counts[1] - there  # a row has one document or more


def test_a_server_of_another_model_is_said_before_anything_is_written(
    server: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.model, run = "other", tmp_path / "run"
    with pytest.raises(SystemExit):
        features.main(
            [
                "recipe=debug_taps",
                "trainer.features_gb=1",
                f"trainer.features_writer=vllm:{server.url}",
                f"output={run}",
            ]
        )
    assert "serves 'other', not target.name='debug'" in capsys.readouterr().err
    assert not (run / "data").exists()


def refusal(server: Loopback, *more: str) -> str:
    target = load_target("debug")
    config = config_of(target, "taps")
    if not server.layers:
        server.layers = layers_asked(target, config)
    with (
        pytest.raises(UserError) as caught,
        ServedStates(recipe_of(server, *more), target, config, quiet=True),
    ):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_states_of_other_layers_are_named(server: Loopback) -> None:
    wanted = layers_asked(server.target, config_of(server.target, "taps"))
    server.layers = tuple(max(0, i - 1) for i in wanted)
    said = refusal(server)
    assert re.search(
        r"returns states of layer \d+ of target 'debug' where those of layer \d+ are wanted; start it",
        said,
    )
    assert json.dumps([i + 1 for i in wanted]) in said


def test_another_models_states_are_refused(server: Loopback) -> None:
    server.change = lambda states: states + 0.3 * states.std() * torch.randn(states.shape)
    assert "is not target.name='debug': its states are" in refusal(server)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s[:, :1], r"returns states of shape \(.*\) for .* tokens, not \(.*start it with: vllm serve debug"),
        (lambda s: s[:-2], "returns states of shape"),
        (lambda s: s * float("nan"), "returns states that are not finite"),
        (lambda s: s > 0, "returns states that are not finite floating-point numbers"),
        (lambda s: (s * 1e-4).to(torch.float8_e4m3fn), "is not target.name='debug'"),
    ],
    ids=["fewer layers", "fewer tokens", "not finite", "no numbers", "8 bits"],
)  # fmt: skip
def test_states_that_are_none_are_refused(server: Loopback, change, says: str) -> None:  # type: ignore[no-untyped-def]
    server.change = change
    assert re.search(says, refusal(server))


def test_a_server_without_states_is_told_how_to_start(server: Loopback) -> None:
    server.states = None
    said = refusal(server)
    assert (
        "returns no hidden states; start it with: vllm serve debug" in said
        and "extract_hidden_states" in said
    )


def test_a_folder_that_is_not_shared_is_named(server: Loopback, tmp_path: Path) -> None:
    server.states, server.lag = tmp_path / "theirs", 60.0
    server.states.mkdir()
    moved, store = tmp_path / "elsewhere", server._store
    server._store = lambda folder, prompt: moved / store(folder, prompt).name  # type: ignore[method-assign]
    assert "must be a folder that this machine sees" in refusal(server, "data.reply_seconds=0.3")


def test_a_file_of_another_text_is_not_deleted(server: Loopback, tmp_path: Path) -> None:
    server.target, answer = load_target("debug"), server.answer
    server.answer = lambda body: answer(body | {"prompt": body["prompt"][::-1]})  # type: ignore[method-assign]
    assert "holds states of another text" in refusal(server)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
