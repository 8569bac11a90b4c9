"""`holdfast checkpoints` in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.cli.main import main


class Commands:
    """Run `holdfast checkpoints` and keep its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: object) -> int:
        code = main(["checkpoints", *map(str, words)])
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *words: object, code: int = 0) -> Any:
        assert self(*words, "--json") == code, self.err
        return json.loads(self.out)
