"""`python -m decode.export`: options, what it prints, exit codes."""

from pathlib import Path
from typing import Any

import pytest

from decode import export
from decode.exporting import EXPORTS
from decode.exporting.exports import ExportVerdict
from specalign.formats.block import save_drafter
from specalign.formats.standalone import save_causal, save_standalone
from specalign.lm.model import Target
from tests.builders import block_network, causal_drafter, diffusion_drafter, saved_taps_drafter


def test_a_drafter_is_exported_for_the_target_that_it_names(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = saved_taps_drafter(tmp_path / "drafter", target)
    words = ["--drafter", drafter, "--format", "dflash", "--out", str(tmp_path / "out")]
    export.main([*words, "--device", "cpu"])
    said = capsys.readouterr().out
    for part in ("greedy drafts equal", "THE SAME DRAFTER", "vllm serve debug"):
        assert part in said
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(("files", "code"), [(False, 1), (True, 3)])
def test_a_difference_is_an_exit_code(
    tmp_path: Path,
    target: Target,
    files: bool,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = saved_taps_drafter(tmp_path / "drafter", target)
    lines = ["generate: DIFFERENT"]
    found = ExportVerdict("dflash", tmp_path, files, engine_same=False, lines=lines)
    monkeypatch.setattr("decode.exporting.exports.export_drafter", lambda *a, **k: [found])
    with pytest.raises(SystemExit) as ended:
        export.main(["--drafter", drafter, "--format", "dflash", "--out", str(tmp_path / "out")])
    assert ended.value.code == code and found.conclusion in capsys.readouterr().out


# ---- every kind of drafter and every format ----

FIT = {
    "shared_kv": "custom_generate",
    "taps, fill-in": "dflash speculators transformers custom_generate",
    "taps, anchor-first": "dspark custom_generate",
    "taps, tanh Markov head": "custom_generate",
    "variable prefix": "custom_generate",
    "confidence head": "dspark custom_generate",
    "autoregressive": "",
    "masked_lm": "",
    "ddit": "",
}
"""Kind → the formats that hold it."""


def save_kind(kind: str, target: Target, folder: Path) -> None:
    """An untrained drafter of that kind, made for `debug`."""
    if kind == "autoregressive":
        save_causal(causal_drafter(target), folder)
    elif kind in ("masked_lm", "ddit"):
        save_standalone(diffusion_drafter(target, kind), folder)
    else:
        own = {"taps, tanh Markov head": {"markov_rank": 4, "markov": "tanh"}}
        own["taps, fill-in"] = {"block_layout": "fill_in"}
        context = "shared_kv" if kind in ("shared_kv", "variable prefix") else "taps"
        more: dict[str, Any] = {"confidence": kind == "confidence head", "options": own.get(kind)}
        network = block_network(target, context, whole=True, **more)
        network.config.target = "debug"
        network.config.extra |= {"prefix_decay": 0.9} if kind == "variable prefix" else {}
        save_drafter(network, folder)


@pytest.mark.parametrize("kind", FIT)
def test_a_refused_format_names_those_that_fit(
    tmp_path: Path, target: Target, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of drafter in every format."""
    save_kind(kind, target, folder := tmp_path / "drafter")
    fits = FIT[kind].split()
    for name in EXPORTS:
        out = tmp_path / "exports" / name
        words = ["--drafter", str(folder), "--format", name, "--out", str(out)]
        words += ["--no-check", "--device", "cpu"]
        if name in fits:
            export.main(words)
            assert (out / "export.json").is_file()
            continue
        with pytest.raises(SystemExit) as ended:
            export.main(words)
        assert ended.value.code == 2 and not out.exists()
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: --") and "\n" not in error
        assert error.endswith(f"fits --format {' or '.join(fits)}") or not fits
        assert fits or "only block drafters can be exported" in error
