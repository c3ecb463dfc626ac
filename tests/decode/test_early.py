"""What a user types wrong is refused before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import contextlib, importlib, io, json, sys
for module, words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(words)
    print(json.dumps([err.getvalue(), [m for m in ("torch", "transformers") if m in sys.modules]]))
"""


def test_wrong_words_are_refused_before_torch(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    block, plain = tmp_path / "block", tmp_path / "plain"
    for folder, kind in ((block, "block_drafter"), (plain, "llama")):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    decoding = [
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--device", "cuda:x"], "device 'cuda:x' is unknown"),
        (["--target", str(tmp_path / "empty")], "has no config.json"),
        (["--drafter", str(block), "--method@", "specdiff"], "a drafter of kind diffusion"),
    ]
    chosen = [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--dtype", "x"], "dtype 'x' is unknown"),
    ]
    recipe = ["recipe=smollm2_block", f"output={tmp_path / 'o'}", "trainer.features_gb=1"]
    aligning = [
        (["target.device=tpu"], "target.device='tpu'"),
        (["target.dtype=x"], "target.dtype='x'"),
        # unless torch is a CPU build, it looks for GPUs otherwise
        (["target.device=cpu", f"target.name={tmp_path / 'empty'}"], "has no config.json"),
        (["target.device=cpu", f"drafter.init={plain}"], "not a block drafter"),
        (["target.device=cpu", "drafter.init=nowhere"], "'nowhere': no such folder"),
    ]
    cases = []
    for name in ("generate", "eval", "verify"):
        for words, said in [*decoding, *(chosen if name != "verify" else [])]:
            words = [w.replace("@", "" if name == "generate" else "s") for w in words]
            prompt = ["hi"] if name == "generate" else []
            cases.append((f"decode.{name}", [*prompt, *words], said))
    for name in ("train", "synthesize", "features"):
        cases += [(f"align.{name}", [*recipe, *words], said) for words, said in aligning]
    text = [*recipe, "target.device=cpu", "data.text=no/such/folder"]
    cases.append(("align.synthesize", text, "data.text='no/such/folder'"))
    asked = json.dumps([(module, words) for module, words, _ in cases])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, asked], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(cases), done.stderr
    for (module, words, said), (line, loaded) in zip(cases, lines, strict=True):
        assert said in line and line.count("\n") == 1 and not loaded, (module, words, line, loaded)
