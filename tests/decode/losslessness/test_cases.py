"""Which methods are verified with a pair, and how."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from align.models.checkpoints.block import save_drafter
from align.models.checkpoints.standalone import save_standalone
from align.target.loading import load_target
from decode.losslessness import rounds
from decode.losslessness.cases import QUICK, THOROUGH, VerifyConfig
from decode.methods.registry import SYSTEMS
from decode.verify import main
from tests.builders import block_network as network
from tests.builders import diffusion_drafter as standalone


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And few rounds: tests/decode/losslessness/test_rounds.py draws as many as show a bug."""
    monkeypatch.setattr("decode.losslessness.sampled.LENGTH", 8)
    monkeypatch.setattr(rounds, "WIDE", rounds.WIDE._replace(draws=40))
    monkeypatch.setattr(rounds, "WEAK", ())


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pair") / "drafter"
    save_drafter(network(load_target("debug", dtype="float32", device="cpu"), "shared_kv"), folder)
    return str(folder)


def arguments(drafter: str, out: Path) -> list[str]:
    short = ["--suite", "builtin", "--limit", "2", "--max-new-tokens", "12", "--samples", "12"]
    return ["--target", "debug", "--drafter", drafter, *short, "--out", str(out)]


def test_a_thorough_verdict_sees_more_of_everything() -> None:
    config = VerifyConfig()
    assert {name: getattr(config, name) for name in QUICK} == QUICK
    assert QUICK.keys() == THOROUGH.keys() <= {f.name for f in fields(VerifyConfig)}
    assert all(THOROUGH[name] > QUICK[name] for name in QUICK.keys() - {"piece"})
    assert not THOROUGH["piece"]  # the engine's own, in a prompt four times as long


@pytest.mark.slow
def test_every_system(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, with the verifier that it has; those that draft nothing or are lossy are named and left out."""
    target = load_target("debug", dtype="float32", device="cpu")
    save_standalone(standalone(target, "ddit"), tmp_path / "sedd")
    folders = f"block={drafter},variable_prefix={drafter},diffusion={tmp_path / 'sedd'},autoregressive=debug"
    words = [*arguments(folders, tmp_path), "--methods", "all,specdiff:steps=2:order=random:verifier=hybrid"]
    words[words.index("--limit") + 1] = "1"
    main([*words])
    record = json.loads((tmp_path / "verdict.json").read_text())
    named = {(c["name"].split()[0], c["method"]) for c in record["checks"]}
    systems = {name for name, s in SYSTEMS.items() if s.in_all and s.drafts and "lossy" not in name}
    for check in ("greedy", "coupled"):
        assert {method for name, method in named if name == check} >= systems
    assert {("sampled", "specdiff2, self_selection"), ("sampled", "d2sd")} <= named
    assert record["lossless"] and record["finished"]
    said = capsys.readouterr().out
    assert "left out: method 'compiled': it drafts nothing" in said
    assert "left out: method 'specdec_lossy': it changes the output's distribution on purpose" in said


@pytest.mark.slow
def test_what_a_target_does_not_allow_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that windows its attention by place: no branches, unless they were asked for by name."""
    words = ["--target", "debug-gptneo", *arguments("debug", tmp_path)[2:]]
    by_place = load_target("debug-gptneo", dtype="float32", device="cpu")
    save_standalone(standalone(by_place, "ddit"), tmp_path / "sedd")
    words[words.index("--drafter") + 1] = f"autoregressive=debug-gptneo,diffusion={tmp_path / 'sedd'}"
    words[words.index("--limit") + 1] = "1"
    words += ["--methods", "all,retrieval"]
    main(words)
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert record["lossless"] and {"retrieval", "autoregressive"} <= {c["method"] for c in record["checks"]}
    said = capsys.readouterr().out
    assert "left out: block: no drafter of the kind block" in said
    assert "left out: method 'specdiff2': target 'debug-gptneo' windows its attention by place" in said
    with pytest.raises(SystemExit):
        main([*words, "--methods", "retrieval:nodes=4"])
    assert "so drafts may not branch (nodes=0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("specdif", "unknown method 'specdif' (did you mean 'specdiff'?)"),
        ("specdec_lossy", "method 'specdec_lossy': it changes the output's distribution on purpose"),
        ("block:verifier=lossy_typical", "it changes the output's distribution on purpose"),
        ("compiled", "it drafts nothing"),
        ("d2sd", "needs a drafter of the kind variable_prefix"),
        (",", "names nothing to verify"),
    ],
)
def test_methods_that_can_not_be_verified(
    methods: str, words: str, drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main([*arguments(drafter, tmp_path), "--methods", methods])
    assert error.value.code == 2 and words in capsys.readouterr().err
