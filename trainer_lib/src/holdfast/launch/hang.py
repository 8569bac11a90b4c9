"""The watch over the local ranks: their boards go to the watchdog, its verdicts to whoever ends a rank."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.activity import Activity
from holdfast.constants import STACKS_DIR, Cause
from holdfast.launch import stacks
from holdfast.launch.board import Boards
from holdfast.launch.stacks import Source, Story
from holdfast.launch.watchdog import HangSettings, Observed, Sight, Verdict, Watchdog
from holdfast.progress import Reading
from holdfast.worlds import Pair

_log = logging.getLogger("holdfast.launch.hang")


class Watched(Protocol):
    """A rank process that entered the present attempt."""

    @property
    def slot(self) -> int:
        """Names the process."""

    @property
    def number(self) -> int:
        """Its rank in the world."""

    @property
    def pid(self) -> int:
        """The leader of its process group."""


class HangWatch:
    """Looks when it is told to, several times a second. A rank whose stacks are being taken is judged no further."""

    def __init__(self, run_dir: Path, hung: Callable[[int, str, Cause], None]) -> None:
        self.boards = Boards(run_dir)
        self._kept = run_dir / STACKS_DIR
        self._hung = hung
        self._watchdog = Watchdog()
        self._ending: asyncio.Task[None] | None = None
        self._count = 0

    def configure(self, settings: HangSettings) -> None:
        """These deadlines hold from now on."""
        self._watchdog.settings = settings

    def keep_boards(self, slots: Iterable[int]) -> None:
        """All others' processes are gone."""
        self.boards.keep_only(slots)

    @property
    def idle(self) -> bool:
        """Whether no stacks are being taken."""
        return self._ending is None

    def look(self, ranks: Sequence[Watched], *, pair: Pair, world_size: int) -> None:
        """Judge the ranks that entered this attempt."""
        if self._ending is not None:
            if not self._ending.done():
                return
            self._ending.result()  # a fault of our own ends the launcher
            self._ending = None
        readings = {rank.slot: reading for rank in ranks if (reading := self.boards.read(rank.slot))}
        seen = Observed(
            pair=pair,
            world_size=world_size,
            sights=tuple(
                Sight(slot=rank.slot, rank=rank.number, reading=readings[rank.slot])
                for rank in ranks
                if rank.slot in readings
            ),
        )
        verdicts = self._watchdog.judge(seen, time.monotonic())
        if verdicts:
            sources = [self._source(rank, readings.get(rank.slot)) for rank in ranks]
            self._ending = asyncio.get_running_loop().create_task(self._end(verdicts, sources, pair))

    def _source(self, rank: Watched, reading: Reading | None) -> Source:
        return Source(
            rank=rank.number,
            leader=rank.pid,
            pid=reading.pid if reading else 0,
            signal=reading.signal if reading else 0,
            file=self.boards.stacks(rank.slot),
        )

    async def _end(self, verdicts: Sequence[Verdict], sources: Sequence[Source], pair: Pair) -> None:
        """End them, also those that went on: our signal may have broken into a call that does not expect one."""
        stories = await stacks.gather(sources)
        for verdict in verdicts:
            now = self.boards.read(verdict.slot)
            if now is not None and now.activity is Activity.PARKED:
                continue  # its attempt ended meanwhile, and it left
            self._tell(verdict, stories, pair)
            self._hung(verdict.slot, verdict.message, verdict.cause)

    def _tell(self, verdict: Verdict, stories: Sequence[Story], pair: Pair) -> None:
        self._count += 1
        story = next((story for story in stories if story.rank == verdict.rank), None)
        fields = {"rank": verdict.rank, "kernel": story.kernel if story else "", "at": story.top if story else ()}
        try:
            path = stacks.keep(self._kept, f"{pair}-{self._count}", verdict.message, stories)
            _log.warning("stacks of all local ranks are kept in %s", path, extra={"fields": fields})
        except OSError as error:
            _log.warning("stacks cannot be kept: %s", error, extra={"fields": fields})
