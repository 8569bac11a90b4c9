"""Ctrl-C before a command handles it: a line instead of a traceback."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from holdfast.cli import main as cli


@pytest.mark.parametrize("words", [["run", "--", "python", "train.py"], ["timeline", "file"]])
def test_an_interrupt_ends_a_command_with_a_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(cli, "_run", stopped)
    monkeypatch.setitem(cli._OTHER_COMMANDS, "timeline", stopped)
    assert cli.main(words) == 130
    assert capsys.readouterr().err == "holdfast: stopped by SIGINT\n"
