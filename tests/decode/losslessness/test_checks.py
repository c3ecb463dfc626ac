"""The command that says whether a pair is lossless: green on a right one, exit code 1 where something is broken, on a
random tiny target."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from align.models.block_checkpoint import save_drafter
from align.models.standalone_checkpoint import save_standalone
from align.target.loading import load_target
from decode.engine import engine
from decode.losslessness.exact_distribution import chi_square, chi_square_tail, detectable, exact_law
from decode.methods.registry import SYSTEMS
from decode.speculation import rules
from decode.speculation.sampling import Sampling
from decode.verify import main
from tests.builders import block_network as network
from tests.builders import diffusion_drafter as standalone
from tests.fakes import TableTarget


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pair") / "drafter"
    save_drafter(network(load_target("debug", dtype="float32", device="cpu"), "shared_kv"), folder)
    return str(folder)


def arguments(drafter: str, out: Path) -> list[str]:
    short = ["--suite", "builtin", "--limit", "2", "--max-new-tokens", "12", "--samples", "100"]
    return ["--target", "debug", "--drafter", drafter, *short, "--out", str(out)]


def test_a_right_pair(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(drafter, tmp_path))
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert record["lossless"] and record["pair"]["prompts"] == 2
    names = {(c["name"], c["method"]) for c in record["checks"]}
    for name in ("greedy fp32", "coupled fp32"):
        assert {(name, m) for m in ("chain", "tree", "tree, with copies")} <= names
    assert {m for n, m in names if n.startswith("freq")} >= {"plain", "chain, token", "chain, block"}
    assert ("greedy bf16", "tree, with copies") in names
    page = (tmp_path / "verdict.md").read_text()
    assert page.startswith("# LOSSLESS") and page in capsys.readouterr().out
    assert all(c["figures"]["drafted"] > 0 for c in record["checks"] if c["method"].startswith("chain, "))


def test_a_drafter_that_drafts_nothing_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments("none", tmp_path))
    assert error.value.code == 2 and not (tmp_path / "verdict.json").exists()


def test_a_standalone_drafter(tmp_path: Path) -> None:
    save_standalone(standalone(load_target("debug", dtype="float32", device="cpu"), "ddit"), tmp_path / "d")
    main(arguments(str(tmp_path / "d"), tmp_path))
    record = json.loads((tmp_path / "verdict.json").read_text())
    names = {(c["name"].split()[0], c["method"]) for c in record["checks"]}
    assert record["lossless"] and ("frequencies", "2 steps, confidence, hybrid") in names
    assert ("coupled", "2 steps, random") in names


def test_every_system(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, with the verifier that it has; those that draft nothing or are lossy are named and left out."""
    target = load_target("debug", dtype="float32", device="cpu")
    save_standalone(standalone(target, "ddit"), tmp_path / "sedd")
    folders = f"block={drafter},variable_prefix={drafter},diffusion={tmp_path / 'sedd'},autoregressive=debug"
    words = [*arguments(folders, tmp_path), "--methods", "all,specdiff:steps=2:order=random:verifier=hybrid"]
    words[words.index("--limit") + 1] = "1"
    main([*words, "--samples", "50"])
    record = json.loads((tmp_path / "verdict.json").read_text())
    named = {(c["name"].split()[0], c["method"]) for c in record["checks"]}
    systems = {name for name, s in SYSTEMS.items() if s.in_all and s.drafts and "lossy" not in name}
    for check in ("greedy", "coupled"):
        assert {method for name, method in named if name == check} >= systems
    assert {("frequencies", "specdiff2, self_selection"), ("frequencies", "d2sd")} <= named
    assert record["lossless"] and record["finished"]
    said = capsys.readouterr().out
    assert "left out: method 'compiled': it drafts nothing" in said
    assert "left out: method 'specdec_lossy': it changes the output's distribution on purpose" in said


def test_what_a_target_does_not_allow_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that windows its attention by place: no branches, unless they were asked for by name."""
    words = ["--target", "debug-gptneo", *arguments("debug", tmp_path)[2:]]
    by_place = load_target("debug-gptneo", dtype="float32", device="cpu")
    save_standalone(standalone(by_place, "ddit"), tmp_path / "sedd")
    words[words.index("--drafter") + 1] = f"autoregressive=debug-gptneo,diffusion={tmp_path / 'sedd'}"
    words[words.index("--limit") + 1] = "1"
    words += ["--methods", "all,retrieval", "--samples", "50"]
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


def test_what_a_stopped_run_found_is_kept(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("decode.losslessness.checks._frequencies", stopped)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        main([*arguments(drafter, tmp_path), "--methods", "lookup,block"])
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert len(record["checks"]) == 4 and not record["finished"] and not record["lossless"]
    assert (tmp_path / "verdict.md").read_text().startswith("# UNFINISHED: no bug in the first 4 checks")


@pytest.mark.parametrize("broken", ["path", "noise", "law"])
def test_a_bug_is_found(broken: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "path":  # greedy: every draft is taken
        take_all = lambda tokens, forest, said: (torch.tensor([tokens.shape[1]]), said[:, -1])  # noqa: E731
        monkeypatch.setattr(engine, "follow", take_all)
    elif broken == "noise":  # coupled: the noise belongs to the question, not to the position
        couple, asked = engine.couple, itertools.count()
        monkeypatch.setattr(
            engine, "couple", lambda p, noise, at: couple(p, noise, [next(asked) for _ in at])
        )
    else:  # sampled: a rejected token is not taken out
        monkeypatch.setattr(rules, "residual", lambda p, q: p)
        monkeypatch.setattr(rules, "accept_probability", lambda p, q: torch.full_like(p, 0.9).double())
    with pytest.raises(SystemExit) as error:
        main(arguments(drafter, tmp_path))
    record = json.loads((tmp_path / "verdict.json").read_text())
    found = {c["name"].split()[0] for c in record["checks"] if not c["passed"]}
    assert error.value.code == 1 and not record["lossless"]
    assert {"path": "greedy", "noise": "coupled", "law": "frequencies"}[broken] in found
    assert (tmp_path / "verdict.md").read_text().startswith("# NOT LOSSLESS")


def test_the_exact_law(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableTarget(4, seed=2)
    target = load_target("debug", dtype="float32", device="cpu")
    target.eos_ids = ()
    sampling, prompt = Sampling(1.0, top_k=2), [5, 6, 7]
    law = exact_law(target, prompt, 3, sampling)
    assert len(law) == 8 and sum(law.values()) == pytest.approx(1.0)
    for text, mass in law.items():
        expected, prefix = 1.0, list(prompt)
        for token in text:
            logits = target.forward(torch.tensor([prefix])).logits_BLV
            assert logits is not None
            pair = logits[0, -1].double().topk(2)
            expected *= float(pair.values.softmax(0)[pair.indices.tolist().index(token)])
            prefix.append(token)
        assert mass == pytest.approx(expected, rel=1e-4)
    assert table.law([0], 2, Sampling(1.0))  # the toy's own, walked in another way


def test_the_statistics() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-5)
    assert chi_square_tail(29.588, 10) == pytest.approx(0.001, abs=1e-5)
    # the noncentrality that a test of one degree of freedom at 0.05 sees in 9 of 10 runs is 10.507
    found, law = Counter({(0,): 60, (1,): 38, (2,): 2}), {(0,): 0.6, (1,): 0.37, (2,): 0.03}
    assert chi_square(found, law, 100) == (0.0, 1)  # the rare one is counted with the next
    assert detectable(1, 100, 0.05) == pytest.approx((10.507 / 100) ** 0.5 / 2, rel=0.05)
    assert detectable(8, 400, 1e-3) < detectable(8, 200, 1e-3)
