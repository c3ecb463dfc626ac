"""The verify command on the debug target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.models.checkpoints.block import save_drafter
from align.models.checkpoints.standalone import save_standalone
from align.target.loading import load_target
from decode.losslessness import checks, rounds
from decode.losslessness.verdict import Check
from decode.losslessness.widened import BUGS
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


@pytest.mark.slow
def test_a_right_pair(drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments(drafter, tmp_path))
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert record["lossless"] and record["pair"]["prompts"] == 2
    names = {(c["name"], c["method"]) for c in record["checks"]}
    for name in ("greedy fp32", "coupled fp32"):
        assert {(name, m) for m in ("chain", "tree", "tree, with copies")} <= names
    assert {m for n, m in names if n == "sampled"} >= {"plain", "chain, token", "chain, block"}
    drafted = {"chain", "tree", "tree, with copies"}
    for name in ("options, exact", "options, batch"):
        assert {m for n, m in names if n == name} == {*drafted, "scripted drafts"}
    assert {m for n, m in names if n == "long context"} == {"scripted drafts", "plain", "tree, with copies"}
    assert {m for n, m in names if n == "options, drawn"} >= {"chain, token", "drawn tree, traversal"}
    assert ("greedy bf16", "tree, with copies") in names
    page = (tmp_path / "verdict.md").read_text()
    assert page.startswith("# LOSSLESS") and page in capsys.readouterr().out
    assert all(c["figures"]["drafted"] > 0 for c in record["checks"] if c["method"].startswith("chain, "))


@pytest.mark.slow
def test_the_self_test_says_what_these_samples_catch(
    drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*arguments(f"block={drafter}", tmp_path), "--methods", "block", "--self-test"])
    record = json.loads((tmp_path / "verdict.json").read_text())
    caught = {c["bug"]: c["caught"] for c in record["self_test"]}
    assert record["lossless"] and set(caught) == {bug.name for bug in BUGS}
    assert caught["siblings attend to one another"] is None  # chains alone
    assert caught["every draft is accepted"] and caught["a draft is accepted without a look"]
    tried = [c for c in caught.values() if c is not None]
    page = (tmp_path / "verdict.md").read_text()
    assert page.startswith("# LOSSLESS")
    assert f"## Self-test: {sum(tried)} of {len(tried)} planted bugs caught" in page
    # stopped and begun again, it plants the rest alone
    path, kept = tmp_path / "verdict.json", record["self_test"][:-2]
    path.write_text(json.dumps({**record, "finished": False, "self_test": kept}))
    capsys.readouterr()
    main([*arguments(f"block={drafter}", tmp_path), "--methods", "block", "--self-test"])
    said, again = capsys.readouterr().out, json.loads(path.read_text())
    assert again["self_test"] == record["self_test"] and again["finished"]
    assert f" and {len(kept)} planted bugs" in said and "ok  greedy" not in said
    # other weights under the same name, or checks that are not all there: nothing was checked before

    def stopped(*_: object) -> Check:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "same", stopped)
    other = {**record["pair"], "content": {**record["pair"]["content"], "drafters": {"block": "0"}}}
    for change in ({"pair": other}, {"checks": record["checks"][:3]}):
        path.write_text(json.dumps({**record, "finished": False, "self_test": kept, **change}))
        with pytest.raises(SystemExit):
            main([*arguments(f"block={drafter}", tmp_path), "--methods", "block", "--self-test"])
        assert "begun anew" in capsys.readouterr().out


@pytest.mark.slow
def test_a_standalone_drafter(tmp_path: Path) -> None:
    save_standalone(standalone(load_target("debug", dtype="float32", device="cpu"), "ddit"), tmp_path / "d")
    main(arguments(str(tmp_path / "d"), tmp_path))
    record = json.loads((tmp_path / "verdict.json").read_text())
    names = {(c["name"].split()[0], c["method"]) for c in record["checks"]}
    assert record["lossless"] and ("sampled", "2 steps, confidence, hybrid") in names
    assert ("coupled", "2 steps, random") in names


@pytest.mark.slow
def test_what_a_stopped_run_found_is_kept(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("decode.losslessness.checks.sampled_texts", stopped)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        main([*arguments(drafter, tmp_path), "--methods", "lookup,block"])
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert len(record["checks"]) == 22 and not record["finished"] and not record["lossless"]
    assert (tmp_path / "verdict.md").read_text().startswith("# UNFINISHED: no bug in the first 22 checks")
    monkeypatch.undo()
    capsys.readouterr()
    main([*arguments(drafter, tmp_path), "--methods", "lookup,block"])
    said, whole = capsys.readouterr().out, json.loads((tmp_path / "verdict.json").read_text())
    assert "going on after 22 checks" in said and "ok  greedy fp32" not in said and whole["finished"]
    assert whole["checks"][:22] == record["checks"] and whole["lossless"]
    names = [(c["name"], c["method"]) for c in whole["checks"]]
    assert len(set(names)) == len(names) and ("sampled", "plain") in names
