"""The launcher's side of the boards on which its ranks write what they do."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from holdfast.telemetry.activity_page import BOARD_DIR, PAGE_BYTES, STACKS_SUFFIX, Reading, read_page


class Boards:
    """Read, never mapped: a rank that cuts its file short must not end the launcher with SIGBUS."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / BOARD_DIR
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier launcher, whose slots were others
        self._folder.mkdir(parents=True)

    def read(self, slot: int) -> Reading | None:
        """What the process of this slot does; None if it has no board (yet)."""
        try:
            with (self._folder / str(slot)).open("rb", buffering=0) as board:
                return read_page(board.read(PAGE_BYTES))
        except OSError:
            return None

    def stacks(self, slot: int) -> Path:
        """The file into which this slot's process writes its stacks when it is told to."""
        return self._folder / f"{slot}{STACKS_SUFFIX}"

    def keep_only(self, slots: Iterable[int]) -> None:
        """Take away the boards of processes that are gone."""
        living = {str(slot) for slot in slots}
        for path in self._folder.iterdir():
            if path.name.removesuffix(STACKS_SUFFIX) not in living:
                path.unlink(missing_ok=True)
