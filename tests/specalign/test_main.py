"""`specalign` lists and runs the commands; `import specalign` is the public API."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import decode
import specalign
from specalign.__main__ import find_commands, main


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [
        *("features", "plan", "sweep", "synthesize", "train"),
        *("advise", "compare", "eval", "export", "generate", "parity", "report", "verify"),
    ]
    assert all(len(line.split()) > 5 and len(line) < 125 for line in lines)


def test_a_command_runs_as_its_module_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("specalign.__main__", "decode.report"):  # as in a new process
        monkeypatch.delitem(sys.modules, module, raising=False)
    missing, outputs = str(tmp_path / "missing"), []
    for module, words in (("specalign", ["report", missing]), ("decode.report", [missing])):
        monkeypatch.setattr(sys, "argv", [module, *words])
        with pytest.raises(SystemExit) as stop:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        outputs.append((stop.value.code, capsys.readouterr().err))
    assert outputs[0] == outputs[1] and outputs[0][0] == 2 and missing in outputs[0][1]


def test_the_api_is_that_of_decode_and_loads_no_torch_on_import() -> None:
    assert specalign.load is decode.load and {*decode.__all__} <= {*dir(specalign)}
    with pytest.raises(AttributeError, match="lod"):
        specalign.lod  # noqa: B018
    code = "import json, sys, specalign.__main__; print(json.dumps('torch' in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(run.stdout) is False and find_commands()
