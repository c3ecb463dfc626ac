"""What libraries log and warn of, shown as our own lines are: control characters as escapes, nothing that a user can't act on."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

from align.common.text import printable

_KNOWN = "past_key_values"
"""A name that our models and published ones keep, and that transformers says is deprecated."""


@functools.cache
def guard_library_output() -> None:
    """From now on every log record and every warning of this process is printable, whatever a model's files put into it."""
    make_record, make_warning = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*given: Any, **named: Any) -> logging.LogRecord:
        made = make_record(*given, **named)
        if made.exc_info is None and (text := _text(made)) != (shown := printable(text)):
            made.msg, made.args = shown, ()
        return made

    def warning(*given: Any, **named: Any) -> str:
        return printable(make_warning(*given, **named))

    logging.setLogRecordFactory(record)
    warnings.formatwarning = warning
    warnings.filterwarnings("ignore", message=f".*{_KNOWN}", category=FutureWarning)
    logging.getLogger("transformers.utils.generic").addFilter(lambda made: _KNOWN not in _text(made))


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # a mistake of the library's: logging says so itself
        return ""
