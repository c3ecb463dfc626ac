"""`python -m decode.export`: options, what it prints, exit codes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from decode import export
from decode.exporting import EXPORTS
from decode.exporting.verdict import Verdict
from specalign.common.errors import UserError
from specalign.folder.publishing import published_texts
from specalign.formats.block import save_drafter
from specalign.formats.causal import save_causal
from specalign.formats.standalone import save_standalone
from specalign.lm.model import Target
from tests.builders import block_network, causal_drafter, diffusion_drafter, saved_taps_drafter
from tests.target_models import asking_target, write_gguf


@pytest.fixture
def vocabulary(tmp_path: Path, target: Target) -> Path:
    """The target as a GGUF file."""
    write_gguf(path := tmp_path / "target.gguf", target)
    return path


@pytest.mark.parametrize(
    ("text", "says"), [("dflsh", "unknown format 'dflsh'.*dflash"), (",", "name one of dflash")]
)
def test_formats_that_there_are_not(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        export.read_names(text)


def test_a_drafter_is_exported_for_the_target_that_it_names(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = saved_taps_drafter(tmp_path / "drafter", target, "fill_in")
    words = ["--drafter", drafter, "--format", "dflash", "--out", str(tmp_path / "out")]
    export.main([*words, "--limit", "1", "--max-new-tokens", "4", "--device", "cpu"])
    said = capsys.readouterr().out
    assert (
        "greedy drafts equal" in said and "THE SAME DRAFTER" in said and "vllm serve debug" in said
    )
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_difference_ends_with_exit_code_1(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_drafter(block_network(target, "taps", whole=True), tmp_path / "drafter")
    found = Verdict("dflash", tmp_path, files_same=False, lines=["the files: block: DIFFERENT"])
    monkeypatch.setattr("decode.exporting.exports.export_drafter", lambda *a, **k: [found])
    words = [
        "--drafter",
        str(tmp_path / "drafter"),
        "--format",
        "dflash",
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(SystemExit) as ended:
        export.main([*words, "--push", "me/drafter"])  # nothing is sent either
    assert ended.value.code == 1 and "NOT THE SAME DRAFTER" in capsys.readouterr().out


# ---- every kind of drafter and every format ----

FIT = {
    "shared_kv": "custom_generate",
    "taps, fill-in": "dflash speculators transformers gguf custom_generate",
    "taps, anchor-first": "dspark gguf custom_generate",
    "taps, tanh Markov head": "dspark custom_generate",
    "variable prefix": "custom_generate",
    "confidence head": "dspark gguf custom_generate",
    "autoregressive": "draft_model",
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
        options: dict[str, Any] = {
            "taps, tanh Markov head": {"markov_rank": 4, "markov": "tanh"}
        }.get(kind, {})
        if kind == "taps, fill-in":
            options = {"block_layout": "fill_in"}
        context = "shared_kv" if kind in ("shared_kv", "variable prefix") else "taps"
        network = block_network(
            target, context, whole=True, confidence=kind == "confidence head", options=options
        )
        network.config.target = "debug"
        network.config.extra |= {"prefix_decay": 0.9} if kind == "variable prefix" else {}
        save_drafter(network, folder)


@pytest.mark.parametrize("kind", FIT)
def test_a_refused_format_names_those_that_fit(
    tmp_path: Path, target: Target, vocabulary: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of drafter in every format."""
    save_kind(kind, target, folder := tmp_path / "drafter")
    fits = FIT[kind].split()
    for name in EXPORTS:
        out = tmp_path / "exports" / name
        words = [
            "--drafter",
            str(folder),
            "--format",
            name,
            "--out",
            str(out),
            "--no-check",
            "--device",
            "cpu",
        ]
        words += ["--target-gguf", str(vocabulary)] if name == "gguf" else []
        if name in fits:
            export.main(words)
            assert (out / "export.json").is_file()
            continue
        with pytest.raises(SystemExit) as ended:
            export.main(words)
        assert ended.value.code == 2 and not out.exists()
        error, _, *commands = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: --format {name}: ")
        assert (
            error.endswith(f"fits --format {' or '.join(fits)}") if fits else "train with" in error
        )
        for line in commands:  # as a shell reads them
            _, _, module, *words = shlex.split(line)
            if module == "decode.export":
                export.parser().parse_args(words)
        formats = [shlex.split(line)[-1] for line in commands]
        assert formats == fits or not fits and formats == ["your prompt", "target.name=debug"]


def test_a_gguf_export_without_the_targets_file_names_it(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = saved_taps_drafter(tmp_path / "drafter", target, "fill_in")
    with pytest.raises(SystemExit) as ended:
        export.main(["--drafter", drafter, "--format", "gguf", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2 and "--target-gguf FILE" in capsys.readouterr().err


def test_an_engine_that_differs_ends_with_exit_code_3(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = saved_taps_drafter(tmp_path / "drafter", target, "fill_in")
    found = Verdict("dflash", tmp_path, True, engine_same=False, lines=["generate: DIFFERENT"])
    monkeypatch.setattr("decode.exporting.exports.export_drafter", lambda *a, **k: [found])
    with pytest.raises(SystemExit) as ended:
        export.main(["--drafter", drafter, "--format", "dflash", "--out", str(tmp_path / "out")])
    assert ended.value.code == 3
    assert "FILES RIGHT, THE ENGINE DRAFTS DIFFERENTLY" in capsys.readouterr().out


# ---- what is uploaded ----


@pytest.mark.parametrize("kind", ["taps, fill-in", "autoregressive"])
def test_what_is_uploaded_has_no_path_of_this_machine(
    tmp_path: Path, target: Target, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is a folder here: it goes by its last part, and the lines to paste name the repository."""
    folder = asking_target(tmp_path / "my finetune", target)
    save_kind(kind, target, tmp_path / "drafter")
    sent = list[Path]()

    def send(folder: Path, repo: str, target: str, places: Any) -> None:
        export.check_public(folder, places, published_texts(folder, target))
        sent.append(folder)

    monkeypatch.setattr(export, "_push", send)
    for name in FIT[kind].split():
        if name == "gguf":
            continue
        words = [
            "--drafter",
            str(tmp_path / "drafter"),
            "--format",
            name,
            "--out",
            str(tmp_path / name),
        ]
        export.main(
            [*words, "--target", folder, "--no-check", "--push", "me/mine", "--device", "cpu"]
        )
        text = "".join(
            p.read_text() for p in (tmp_path / name).rglob("*") if p.suffix in (".json", ".md")
        )
        assert str(tmp_path) not in text and "my finetune" in text
        page = (tmp_path / name / "README.md").read_text()
        assert '"model":"me/mine"' in page or '"me/mine"' in page
    assert len(sent) == len([name for name in FIT[kind].split() if name != "gguf"])


def test_a_path_of_this_machine_is_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"trained on {tmp_path}/data\n")
    with pytest.raises(
        UserError, match="README.md names .*, a path of this machine; nothing was uploaded"
    ):
        export.check_public(tmp_path, [str(tmp_path)], {})


@pytest.mark.parametrize("repo", ["runs/exported", "./out", "one/two/three", "plain", "me/a b"])
def test_a_place_here_is_no_repository(repo: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        export.main(["--drafter", "nowhere", "--format", "dflash", "--out", "out", "--push", repo])
    assert (
        ended.value.code == 2 and f"--push='{repo}': name one repository" in capsys.readouterr().err
    )


def test_what_is_uploaded_names_no_path_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "my finetune"
    (tmp_path / "out").mkdir()
    target.mkdir()
    (tmp_path / "out" / "README.md").write_text(f"drafts for {target}\n")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"x")
    sent: dict[str, object] = {}

    class Hub:
        def create_repo(self, repo: str, exist_ok: bool) -> str:
            return repo

        def upload_folder(
            self, repo_id: str, folder_path: Path, ignore_patterns: list[str]
        ) -> None:
            sent.update({p.name: p for p in folder_path.iterdir() if p.name not in ignore_patterns})

        def upload_file(self, repo_id: str, path_in_repo: str, path_or_fileobj: bytes) -> None:
            sent[path_in_repo] = path_or_fileobj

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    export._push(tmp_path / "out", "me/drafter", str(target), [str(target)])
    assert sent["README.md"] == b"drafts for my finetune\n" and "model.safetensors" in sent
