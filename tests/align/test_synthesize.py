"""What a user gets wrong: one line on stderr that names it, exit code 2, no traceback, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from align import synthesize

DEBUG = "recipe=debug_block"


ARGUMENTS: dict[str, list[str]] = {
    "seed=1": ["recipe=NAME is missing (for instance recipe=block"],
    "recipe=debug_blok": ["debug_blok", "did you mean 'debug_block'"],
    "recipe=/nowhere/mine.yaml": ["/nowhere/mine.yaml", "no such recipe or .yaml file"],
    f"{DEBUG} training.max_steps=3": ["unknown key 'training.max_steps'", "'trainer.max_steps'"],
    f"{DEBUG} trainer=3": ["trainer=3", "group of keys", "trainer.accumulate", " more)"],
    f"{DEBUG} base=smollm2_block": ["base", "recipe=NAME"],
    f"{DEBUG} trainer.max_steps=1.5": ["trainer.max_steps=1.5", "an integer"],
    f"{DEBUG} seed=true": ["seed=True", "an integer"],
    f"{DEBUG} name=a/b": ["name='a/b'", "a file name"],
    f"{DEBUG} output=a\x1bc": ["output=", "control characters"],
    f"{DEBUG} trainer.betas=[0.9": ["command line: trainer.betas", "not valid YAML"],
}

FILES: dict[str | bytes, list[str]] = {
    "- a\n- b\n": ["bad.yaml: must contain `key: value` lines"],
    "trainer: {max_steps: 3\nseed: 1\n": ["bad.yaml: not valid YAML: line 2"],
    "seed: 1\nname: a\nseed: 2\n": ["bad.yaml", "line 3", "'seed' occurs twice"],
    "trainer: {learning_rate: '1,5'}\n": ["bad.yaml: trainer.learning_rate='1,5'"],
    "seed: !!python/object/apply:os.system ['true']\n": ["bad.yaml: not valid YAML"],
    "seed: " + "[" * 5000: ["bad.yaml: not valid YAML"],
    b"name: \xff\xfe\n": ["bad.yaml is not UTF-8"],
    "base: debug_blok\n": ["bad.yaml: base", "did you mean 'debug_block'"],
    "base: ./bad.yaml\n": ["must be another recipe's name"],
    "kinds: {taps: 3}\n": ["bad.yaml: kinds.taps=3 must be a mapping"],
    "trainer: {anchors: -1}\n": ["trainer.anchors=-1", "at least 1"],
}


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        synthesize.main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    check_line(err, words)


def check_line(err: str, words: tuple[str, ...]) -> None:
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert len(err) < 2000
    for word in words:
        assert word in err


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_malformed_arguments(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, arguments.split(" "), tuple(ARGUMENTS[arguments]))


@pytest.mark.parametrize("content", FILES)
def test_malformed_recipe_files(
    content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(capsys, [f"recipe={path}"], tuple(FILES[content]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing written that would keep the settings of a first try."""
    with pytest.raises(SystemExit) as stop:
        synthesize.main([DEBUG, f"output={tmp_path}/out", "data.writer=openai:http://127.0.0.1:9"])
    assert stop.value.code == 2
    check_line(
        capsys.readouterr().err,
        ("http://127.0.0.1:9/v1/models: no usable answer", "is the server up?"),
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
