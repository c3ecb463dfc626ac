"""Libraries' log lines and warnings can't steer a terminal."""

from __future__ import annotations

import logging
import warnings

import pytest

from align.common.library_output import guard_library_output


def test_log_lines_and_warnings_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    guard_library_output()
    logging.getLogger("transformers.anything").warning("method %s", "\x1b[31mred")
    logging.getLogger("transformers.utils.generic").warning("`past_key_values` are deprecated")
    assert [r.getMessage() for r in caplog.records] == ["method \\x1b[31mred"]
    assert "\x1b" not in warnings.formatwarning(UserWarning("\x1b[2J"), UserWarning, "f.py", 1, "x")
