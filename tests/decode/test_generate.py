"""The command: output on stdout, figures on stderr, one line and exit code 2 for what can't be used."""

import io
import re
from typing import Any

import pytest

import decode
from decode import Sampling, generate
from specalign.common.text import printable


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
    for part in ("[lookup, greedy]", "tokens/s", "rounds · τ", "drafts accepted in", "prefill"):
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


def test_input_system_and_sampling(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    words = "--drafter none --temperature 1 --seed 15 --top-k 9 --top-p 0.9"
    options = (*DEBUG, *words.split())
    expected = run(capsys, *options, "hello")[1]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run(capsys, *options, "-")[1] == expected
    kind = run(capsys, *options, "--system", "Be kind.", "hello")[1]
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    sampling = Sampling(temperature=1.0, seed=15, top_k=9, top_p=0.9)
    assert kind.rstrip("\n") != expected.rstrip("\n")
    wanted = decode.load("debug", None).generate(talk, max_new_tokens=12, sampling=sampling)
    assert kind == printable(wanted.text) + "\n"
    assert run(capsys, *options, "--raw", "hello")[1] != expected


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "no prompt"),
        (("--raw", "--system", "s", "hi"), "--system needs the chat template"),
        (("--target", "no/where/at/all", "--drafter", "none", "hi"), "neither a folder"),
    ],
)
def test_bad_commands(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], line: str) -> None:
    code, out, err = run(capsys, *argv)
    last = err.strip().splitlines()[-1]
    assert code == 2 and out == "" and last.startswith("error: ") and line in last
    assert "Traceback" not in err
