"""Systems by name: how they are written, swept and built; each in one table with plain decoding, and each lossless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from align.common.errors import UserError
from align.target.model import Target
from decode import Decoder, Sampling, eval
from decode.losslessness.exact_distribution import exact_law
from decode.methods.build import build
from decode.methods.registry import ANY, ROLES, SYSTEMS, Parts
from decode.methods.spec import read_method
from decode.reporting.records import read_records
from decode.speculation.verifiers import find
from tests.builders import PROMPT, VARIED
from tests.fakes import frequencies, plausible

METHODS = [
    *(name for name in SYSTEMS if name != "compiled"),
    "specdiff:gamma=5:steps=3:hot_start=true",
    "specdiff:gamma=4:nodes=6",
    "specdiff2:candidates=3:keep_q=true:verifier=traversal",
    "diffuspec:path_search=false",
    "tolerator:rounds=3:controller=cost",
    "specdiff:gamma=6:controller=adl",
    "hierarchical:inner=diffusion",
    "retrieval:nodes=6",
    "retrieval:gamma=2/5:nodes=0/4",
    "specdiff:gamma=3/5:steps=1/2/3",
    "specdiff2:candidates=2/5",
    "block_tree:nodes=3/7",
    "d2sd:boundaries=1/3",
    "specdiff:gamma=1/4:steps=1/2:order=random",
    "duo:controller=fixed",
]


@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_is_plain_decodings(parts: Parts, name: str) -> None:
    decoder = build(read_method(name), parts)
    if decoder.verifier in ("traversal", "lossy_top_beta"):  # the drafts are looked at here
        decoder.verifier = "auto"
    for sampling in (Sampling(), VARIED):
        expected = Decoder(parts.target).generate(PROMPT, max_new_tokens=25, sampling=sampling)
        assert decoder.generate(PROMPT, max_new_tokens=25, sampling=sampling).tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "double",
        "duo",
        "hierarchical:gamma=2",
        "autoregressive:gamma=2",
        "specdiff:gamma=2/3:steps=1/3",
        "specdiff:gamma=2/3:steps=1/2:order=random",
        "specdiff2:candidates=1/3",
        "block_tree:nodes=2/4",
    ],
)
def test_sampled_output_has_the_targets_joint_law(parts: Parts, name: str) -> None:
    runs, sampling = 300, Sampling(1.0, top_k=2)
    decoder = build(read_method(name), parts, 2)
    found = frequencies(decoder, sampling, runs, PROMPT, 4)
    assert plausible(found, exact_law(parts.target, PROMPT, 4, sampling), runs)


def test_a_compiler_that_is_not_there_is_one_line(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: Any, dynamic: bool) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nlong story")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        UserError, match="method 'compiled': torch.compile does not work here: No working C.. compiler found$"
    ):
        build(read_method("compiled"), Parts(target))


def test_every_system_has_its_parts_and_says_what_it_is() -> None:
    assert all(set(s.needs) <= {*ROLES, ANY} and s.says for s in SYSTEMS.values())
    assert all(s.verifier == "auto" or find(s.verifier) for s in SYSTEMS.values())
    assert all(("lossy" in s.name) == s.verifier.startswith("lossy") for s in SYSTEMS.values())


@pytest.mark.slow
def test_all_of_them_in_one_table(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every system whose drafter is there, and a line for the others."""
    from align.models.standalone_checkpoint import save_standalone

    save_standalone(parts.diffusion, tmp_path / "sedd")
    (tmp_path / "mine.txt").write_text("Say one one one one.\n")
    words = ["--target", "debug", "--prompts", tmp_path / "mine.txt", "--drafter", tmp_path / "sedd"]
    monkeypatch.setattr(
        "decode.engine.compiled.compiled", lambda target: target
    )  # half a minute of C++ elsewhere
    words += ["--methods", "all", "--max-new-tokens", 12, "--no-hf-check", "--threads", 1]
    config = eval.read_config(list(map(str, [*words, "--dtype", "float32", "--out", tmp_path / "o"])))
    summary, folder = eval.evaluate(config, Console(quiet=True), "command")
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
    from align.models.standalone_checkpoint import save_standalone

    save_standalone(parts.diffusion, tmp_path / "sedd")
    (tmp_path / "mine.txt").write_text("Say one one one one.\n")

    def measured(*words: Any) -> dict[str, Any]:
        base = ["--target", "debug", "--prompts", tmp_path / "mine.txt", "--drafter", tmp_path / "sedd"]
        base += ["--max-new-tokens", 6, "--no-hf-check", "--threads", 1, "--dtype", "float32", "--no-resume"]
        config = eval.read_config(list(map(str, [*base, "--out", tmp_path / "o", *words])))
        return eval.evaluate(config, Console(quiet=True), "command")[0]

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
