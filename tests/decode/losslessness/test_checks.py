"""The command that says whether a pair is lossless: green on a right one, exit code 1 where something is broken, on a
random tiny target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from align.models.checkpoints.block import save_drafter
from align.target.loading import load_target
from decode.losslessness import rounds
from decode.losslessness.checks import _Plan
from decode.losslessness.verdict import Check
from decode.losslessness.widened import BUGS
from decode.speculation import rules, verification
from decode.verify import main
from tests.builders import block_network as network


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


def test_a_drafter_that_drafts_nothing_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments("none", tmp_path))
    assert error.value.code == 2 and not (tmp_path / "verdict.json").exists()


def take_all(tokens: Any, forest: Any, say: Any) -> Any:
    ends = say([(b, len(own)) for b, own in enumerate(tokens)])
    return [(list(range(len(own))), end) for own, end in zip(tokens, ends, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["path", "noise", "law"])
def test_a_bug_is_found(broken: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "path":  # greedy: every draft is taken
        monkeypatch.setattr(verification, "walk", take_all)
    elif broken == "noise":  # coupled: the noise belongs to the question, not to the position
        couple, asked = verification.couple, itertools.count()
        monkeypatch.setattr(
            verification, "couple", lambda p, noise, at: couple(p, noise, [next(asked) for _ in at])
        )
    else:  # sampled: a rejected token is not taken out
        monkeypatch.setattr(rules, "residual", lambda p, q: p)
        monkeypatch.setattr(rules, "accept_probability", lambda p, q: torch.full_like(p, 0.9).double())
    with pytest.raises(SystemExit) as error:
        main([*arguments(f"block={drafter}", tmp_path), "--methods", "block"])
    record = json.loads((tmp_path / "verdict.json").read_text())
    found = {c["name"].split()[0] for c in record["checks"] if not c["passed"]}
    assert error.value.code == 1 and not record["lossless"]
    assert {"path": "greedy", "noise": "coupled", "law": "sampled"}[broken] in found
    assert (tmp_path / "verdict.md").read_text().startswith("# NOT LOSSLESS")


def test_the_rounds_of_every_rule_that_has_the_bug_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair's own rule first; one that shows it ends the search."""
    drawn: list[str] = []

    def rounds_of(self: Any, verifier: str, bug: Any) -> Check:
        drawn.append(verifier)
        return Check("rounds", verifier, verifier != "recursive", 1, {}, "")

    monkeypatch.setattr(_Plan, "_rounds", rounds_of)
    bug = next(bug for bug in BUGS if bug.name == "one random number serves two draws")
    found = _Plan._any_rounds(object.__new__(_Plan), "traversal", bug)
    assert found.method == "recursive" and not found.passed
    assert drawn[0] == "traversal" and drawn[-1] == "recursive" and set(drawn) <= bug.verifiers
    drawn.clear()
    assert not _Plan._any_rounds(object.__new__(_Plan), "recursive", bug).passed and drawn == ["recursive"]
