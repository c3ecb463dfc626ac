"""Systems by name: how they are written, swept and built; each in one table with plain decoding, and each lossless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.common.terminal import PlainConsole
from align.target.model import Target
from decode import eval, method_names
from decode.drafters.diffusion import ORDERS
from decode.methods.build import build
from decode.methods.registry import ANY, ROLES, SYSTEMS, Parts
from decode.methods.spec import read_method
from decode.reporting.records import read_records
from decode.speculation.verifiers import VERIFIERS, find
from decode.wrappers.copying import CopyingDrafter


def test_names_that_need_no_torch_are_those_of_the_registries() -> None:
    assert set(method_names.VERIFIERS) == set(VERIFIERS) and method_names.ORDERS == ORDERS


def test_combined_is_the_drafter_with_copies(parts: Parts) -> None:
    for name, copies in (("drafter", False), ("combined", True), ("drafter:copying=true", True)):
        assert isinstance(build(read_method(name), parts).drafter, CopyingDrafter) == copies
    assert build(read_method("combined:gamma=2"), parts).drafter.draft_tokens == 2  # type: ignore[union-attr]


def test_every_system_has_its_parts_and_says_what_it_is() -> None:
    assert all(set(s.needs) <= {*ROLES, ANY} and s.says for s in SYSTEMS.values())
    assert all(s.verifier == "auto" or find(s.verifier) for s in SYSTEMS.values())
    assert all(("lossy" in s.name) == s.verifier.startswith("lossy") for s in SYSTEMS.values())


@pytest.mark.slow
def test_all_of_them_in_one_table(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every system whose drafter is there, and a line for the others."""
    from align.models.checkpoints.standalone import save_standalone

    save_standalone(parts.diffusion, tmp_path / "sedd")
    (tmp_path / "mine.txt").write_text("Say one one one one.\n")
    words = ["--target", "debug", "--prompts", tmp_path / "mine.txt", "--drafter", tmp_path / "sedd"]
    monkeypatch.setattr(
        "decode.engine.compiled.compiled", lambda target: target
    )  # half a minute of C++ elsewhere
    words += ["--methods", "all", "--max-new-tokens", 12, "--no-hf-check", "--threads", 1]
    config = eval.read_config(list(map(str, [*words, "--dtype", "float32", "--out", tmp_path / "o"])))
    summary, folder = eval.evaluate(config, PlainConsole(quiet=True), "command")
    records = read_records(folder)
    here = [n for n, s in SYSTEMS.items() if set(s.needs) <= {"diffusion"}]
    assert {r.method for r in records} == {"plain", *here}
    assert all(r.identical for r in records if not r.lossy) and summary["bugs"] == 0
    assert {r.method for r in records if r.lossy} == {"specdec_lossy"}
    assert {r.verifier for r in records if not r.lossy} == {"", "greedy"}  # what ran, not what runs above 0
    assert any("d2sd: no drafter of the kind block" in line for line in summary["skipped"])
    torch.set_num_threads(1)


@pytest.mark.slow
def test_what_all_and_sweeps_cannot_build_is_left_out(
    parts: Parts, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from align.models.checkpoints.standalone import save_standalone

    save_standalone(parts.diffusion, tmp_path / "sedd")
    (tmp_path / "mine.txt").write_text("Say one one one one.\n")

    def measured(*words: Any) -> dict[str, Any]:
        base = ["--target", "debug", "--prompts", tmp_path / "mine.txt", "--drafter", tmp_path / "sedd"]
        base += ["--max-new-tokens", 6, "--no-hf-check", "--threads", 1, "--dtype", "float32", "--no-resume"]
        config = eval.read_config(list(map(str, [*base, "--out", tmp_path / "o", *words])))
        return eval.evaluate(config, PlainConsole(quiet=True), "command")[0]

    drawn = ["--methods", "specdiff2:gamma=2:candidates=2:keep_q=true", "--temperature", 1]
    made = measured(*drawn, "--sweep", "verifier=token,traversal")
    assert [name.rpartition("=")[2] for name in made["overall"]] == ["plain", "traversal"]
    assert [line.partition(": ")[0].rpartition("=")[2] for line in made["skipped"]] == ["token'"]
    made = measured("--methods", "autoregressive", "--drafter", "autoregressive=debug")
    assert list(made["overall"]) == ["plain", "autoregressive"]
    made = measured("--methods", "specdiff:gamma=2:steps=8,specdiff:gamma=2:steps=2")
    assert len(made["overall"]) == 3  # the same program, asked for by two names
    made = measured("--methods", "specdiff:gamma=4", "--sweep", "steps=1,2", "hot_start=false,true")
    assert len(made["overall"]) == 1 + 3  # plain; a hot start takes the place of one of several steps
    assert any("steps=1 must be at least 2" in line for line in made["skipped"])
    for words, says in (
        (["--methods", "specdiff:steps=1:hot_start=true"], "steps=1 must be at least 2"),
        (["--methods", "specdiff", "--steps", 4], "--steps is read by the methods drafter and combined"),
        (["--methods", "lookup", "--verifier", "point_mass"], "--verifier is read by the methods drafter"),
        (["--methods", "drafter:gama=2"], "unknown option 'gama' .did you mean 'gamma'"),
    ):
        with pytest.raises(UserError, match=says):
            measured(*words)
    torch.set_num_threads(1)
