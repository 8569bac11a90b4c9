"""The launcher's side of the activity pages that its ranks write."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from holdfast.telemetry.activity_page import BOARD_DIR, PAGE_BYTES, STACKS_SUFFIX, Reading, read_page


class ActivityPages:
    """Reads the pages, without mmap: a rank that truncates its file must not end the launcher with SIGBUS."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / BOARD_DIR
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier launcher with other slots
        self._folder.mkdir(parents=True)

    def read(self, slot: int) -> Reading | None:
        """Return the activity of this slot's process; None without a page."""
        try:
            with (self._folder / str(slot)).open("rb", buffering=0) as board:
                return read_page(board.read(PAGE_BYTES))
        except OSError:
            return None

    def stacks(self, slot: int) -> Path:
        """Return the file to which this slot's process writes its stacks on the signal."""
        return self._folder / f"{slot}{STACKS_SUFFIX}"

    def keep_only(self, slots: Iterable[int]) -> None:
        """Remove the pages of processes that ended."""
        living = {str(slot) for slot in slots}
        for path in self._folder.iterdir():
            if path.name.removesuffix(STACKS_SUFFIX) not in living:
                path.unlink(missing_ok=True)
