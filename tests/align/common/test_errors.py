"""What a user sees of an error: one line, the nearest valid name, an exit code."""

from __future__ import annotations

import pytest

from align.common.errors import UserError, cli, in_one_line, nearest


def test_the_nearest_name_is_offered_or_all_of_them() -> None:
    assert nearest("blok", ["block", "taps"]) == " (did you mean 'block'?)"
    assert nearest("zzz", ["b", "a"]) == " (one of: a, b)" and nearest("x", []) == ""


def test_a_librarys_error_becomes_one_line() -> None:
    with pytest.raises(UserError, match="^config.json: last$"), in_one_line("config.json"):
        raise TypeError("first\nlast\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(UserError("k=1:\n no"), 2, "error: k=1: no"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_exit_codes(error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as exit:
        cli(main)()
    assert exit.value.code == code and capsys.readouterr().err.startswith(says)
