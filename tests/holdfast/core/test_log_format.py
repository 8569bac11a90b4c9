"""The last output of a process states why it ended, unless it is a message of Holdfast about success."""

from __future__ import annotations

import errno
import io
import logging

import pytest

from holdfast.core.log_format import BackgroundHandler, JsonFormatter, LogContext, TextFormatter
from holdfast.launcher.host.termination_log import last_lines

CONTEXT = LogContext(fields={"pod": "gpt-w0", "generation": 2, "attempt": 1, "rank": 2})
FORMATTERS = [JsonFormatter(CONTEXT), TextFormatter(CONTEXT), TextFormatter(LogContext())]
USAGE = "train.py: error: unrecognized arguments: --sped"


def line(formatter: logging.Formatter, level: int, message: str) -> str:
    return formatter.format(logging.LogRecord("holdfast", level, __file__, 1, message, (), None))


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_what_went_well_before_is_no_reason_of_an_end(formatter: logging.Formatter) -> None:
    said = [USAGE, line(formatter, logging.INFO, "rank 1 continues from memory at step 10059")]
    assert last_lines(said) == (USAGE,)


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_what_went_wrong_may_be_one(formatter: logging.Formatter, level: int) -> None:
    trouble = line(formatter, level, "checkpoint of step 7 failed: no space left")
    assert last_lines([USAGE, trouble]) == (USAGE, trouble)


@pytest.mark.parametrize("text", ["", "  ", '{"ts": 7}', "12:00:00 holdfast", "holdfast  info"])
def test_lines_of_others_stay(text: str) -> None:
    assert last_lines([text]) == ((text,) if text.strip() else ())


def test_lines_after_one_that_found_no_room_are_written() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if text == "lost\n":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = Full()
    handler = BackgroundHandler(stream)
    for text in ("lost", "kept"):
        handler.emit(logging.makeLogRecord({"msg": text}))
    handler.close()
    assert stream.getvalue() == "kept\n"
