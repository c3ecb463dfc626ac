"""The command: output on stdout, figures on stderr, one line and exit code 2 for what can't be used."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

import decode
from decode import Sampling, generate
from decode.systems import drafter_folders
from tests.target_models import tiny_target


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code: Any = 0
    try:
        generate.main(list(argv))
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


DEBUG = ("--target", "debug", "--max-new-tokens", "12")


def test_answers_and_says_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *DEBUG, "--drafter", "lookup", "hello")
    assert code == 0 and len(out) > 3
    for part in (
        "[lookup, greedy]",
        " tokens (",
        "tokens/s",
        "rounds · τ",
        "drafts accepted in",
        "prefill",
    ):
        assert part in err
    assert run(capsys, *DEBUG, "--drafter", "none", "hello")[1] == out
    assert "[target" not in err


def test_the_seed_of_a_sampled_answer_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*DEBUG, "--drafter", "none", "--temperature", "1")
    _, first, err = run(capsys, *options, "hello")
    seed = re.search(r"· seed (\d+)$", err.strip())
    assert seed and run(capsys, *options, "hello")[1] != first
    assert run(capsys, *options, "--seed", seed[1], "hello")[1] == first
    assert "seed" not in run(capsys, *DEBUG, "--drafter", "none", "hello")[2]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("llama", "[target, float32 on cpu] grouped attention"),
        (
            "bloom",
            "its own, eager attention · chains only, no trees · requests of a batch one by one",
        ),
        (
            "lfm2",
            "grouped attention · recurrent states, replayed after rejected drafts · chains only",
        ),
    ],
)
def test_verbose_says_how_the_target_runs(kind: str, says: str) -> None:
    assert says in generate.how_it_runs(tiny_target(kind))


def test_a_missing_shipped_drafter_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(drafter_folders, "DEFAULT_DRAFTER", Path("/nowhere/block"))
    monkeypatch.setattr(drafter_folders, "DEFAULT_TARGET", "debug")
    code, _, err = run(capsys, *DEBUG, "hello")
    assert code == 0
    assert err.splitlines()[0] == "note: no drafter at /nowhere/block: drafting by prompt lookup"


def test_standard_input_system_message_and_sampling(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    options = (
        *DEBUG,
        "--drafter",
        "none",
        "--temperature",
        "1",
        "--seed",
        "3",
        "--top-k",
        "9",
        "--top-p",
        "0.9",
    )
    expected = run(capsys, *options, "hello")[1]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run(capsys, *options, "-")[1] == expected
    kind = run(capsys, *options, "--system", "Be kind.", "hello")[1]
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    sampling = Sampling(temperature=1.0, seed=3, top_k=9, top_p=0.9)
    assert kind.rstrip("\n") != expected.rstrip("\n")
    assert (
        kind
        == decode.load("debug", None).generate(talk, max_new_tokens=12, sampling=sampling).text
        + "\n"
    )
    assert run(capsys, *options, "--raw", "hello")[1] != expected


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "no prompt"),
        (("--temprature", "1", "hi"), "did you mean '--temperature'"),
        (("hi", "there"), "unrecognized argument 'there' (quote the prompt)"),
        (("--temperature", "hot", "hi"), "'hot' is not a number"),
        (("--temperature", "-1", "hi"), "temperature=-1.0: must be"),
        (("--top-p", "2", "hi"), "top_p=2.0"),
        (("--max-new-tokens", "0", "hi"), "at least 1"),
        (("--draft-tokens", "x", "hi"), "at least 1"),
        (("--raw", "--system", "s", "hi"), "--system needs the chat template"),
        (("--raw", "--template-kwargs", "a=1", "hi"), "--template-kwargs needs the chat template"),
        (
            ("--target", "debug", "--template-kwargs", "a=1", "hi"),
            "has no switch",
        ),
        (("--target", "debug", "--drafter", "none", ""), "the prompt is empty"),
        (("--target", "debug", "--drafter", "lokup", "hi"), "did you mean 'lookup'"),
        (
            ("--target", "debug", "--drafter", "lookup", "--verifier", "tokn", "hi"),
            "did you mean 'token'",
        ),
        (
            (
                "--target",
                "debug",
                "--drafter",
                "lookup",
                "--verifier",
                "token",
                "--temperature",
                "1",
                "hi",
            ),
            "these fit: point_mass",
        ),
        (("--target", "debug", "--drafter", "none", "--stop", "", "hi"), "non-empty strings"),
        (("--target", "no/where/at/all", "--drafter", "none", "hi"), "neither a folder"),
    ],
)
def test_malformed_commands(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], line: str
) -> None:
    code, out, err = run(capsys, *argv)
    last = err.strip().splitlines()[-1]
    assert code == 2 and out == "" and last.startswith("error: ") and line in last
    assert "Traceback" not in err
