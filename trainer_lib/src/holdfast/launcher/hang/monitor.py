"""Watches the local ranks: passes their activity pages to the watchdog, and its verdicts to the receiver."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.hang import stack_dumps
from holdfast.launcher.hang.activity_pages import ActivityPages
from holdfast.launcher.hang.cpu_starvation import cpu_times
from holdfast.launcher.hang.detectors.observation import AbsentRank, HangSettings, HangVerdict, Observed, ObservedRank
from holdfast.launcher.hang.detectors.watchdog import Watchdog
from holdfast.launcher.hang.stack_dumps import Source, StackDump
from holdfast.launcher.hang.stall_reports import NO_REMOTE_STALLS, RemoteStalls, Stall
from holdfast.launcher.host.run_dir import STACKS_DIR
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

_log = logging.getLogger("holdfast.launcher.hang")


class Watched(Protocol):
    """A rank process that has a slot in an attempt."""

    @property
    def slot(self) -> int:
        """Identifies the process."""

    @property
    def number(self) -> int: ...

    @property
    def pid(self) -> int:
        """The leader of its process group."""

    @property
    def attempt_id(self) -> AttemptId | None:
        """The ID of its attempt, or of the last attempt that had a slot for it."""

    @property
    def greeted(self) -> bool:
        """Whether the process entered that attempt."""


class Hung(Protocol):
    """Receives hang verdicts."""

    def __call__(self, slot: int, message: str, cause: Cause, *, kill: bool) -> None:
        """This process keeps others waiting; `kill`: because of its own activity."""


@dataclass(frozen=True, kw_only=True)
class WatchInput:
    """The ranks that entered the attempt, those that left one and are in none, and the reports of other launchers."""

    attempt_id: AttemptId
    world_size: int
    ranks: Sequence[Watched]
    absent: Sequence[tuple[Watched, float, bool]] = ()  # since when, and whether the attempt waits for it
    remote: RemoteStalls = NO_REMOTE_STALLS


class HangWatch:
    """Looks at the ranks several times per second. Ranks are not judged while their stacks are being saved.

    `found` receives the line of each hang before the launcher acts on it, so that other launchers save stacks too.
    """

    def __init__(self, run_dir: Path, hung: Hung, found: Callable[[AttemptId, str], None]) -> None:
        self.activity_pages = ActivityPages(run_dir)
        self._kept = run_dir / STACKS_DIR
        self._hung = hung
        self._found = found
        self._watchdog = Watchdog()
        self._ending: asyncio.Task[None] | None = None
        self._count = 0

    def configure(self, settings: HangSettings) -> None:
        """Apply these deadlines from now on."""
        self._watchdog.settings = settings

    def keep_activity_pages(self, slots: Iterable[int]) -> None:
        """Remove the pages of all other slots, whose processes have ended."""
        self.activity_pages.keep_only(slots)

    @property
    def idle(self) -> bool:
        """Whether no stacks are being saved."""
        return self._ending is None

    def check(self, watched: WatchInput) -> tuple[Stall, ...] | None:
        """Judge these ranks. Return the report for other launchers; None if it did not change."""
        if not self._finished():
            return None
        ranks = [*watched.ranks, *(rank for rank, _, _ in watched.absent)]
        readings = {rank.slot: reading for rank in ranks if (reading := self.activity_pages.read(rank.slot))}
        seen, now = _observed(watched, readings), time.monotonic()
        verdicts = self._watchdog.judge(seen, now)
        for text in self._watchdog.warnings:
            _log.warning("%s", text, extra={"fields": {"attempt": str(watched.attempt_id)}})
        if verdicts:
            self._found(watched.attempt_id, verdicts[0].message)
            sources = [self._source(rank, readings.get(rank.slot)) for rank in ranks]
            self._ending = asyncio.get_running_loop().create_task(
                self._end(verdicts, sources, ranks, watched.attempt_id)
            )
        return self._watchdog.stalls(seen, now)

    def save_stacks(self, attempt_id: AttemptId, ranks: Iterable[Watched], message: str) -> None:
        """Save the stacks of these ranks, and judge none meanwhile: another launcher ends one of its ranks."""
        if not self._finished():
            return  # a local hang, most likely the same one, is being saved
        self._watchdog.remote_hang(attempt_id)
        sources = [self._source(rank, self.activity_pages.read(rank.slot)) for rank in ranks]
        self._ending = asyncio.get_running_loop().create_task(self._save_stacks(sources, message, attempt_id))

    def _finished(self) -> bool:
        """Whether no stacks are being saved. A defect in the saving ends the launcher."""
        if self._ending is not None and self._ending.done():
            self._ending.result()
            self._ending = None
        return self._ending is None

    async def _save_stacks(self, sources: Sequence[Source], message: str, attempt_id: AttemptId) -> None:
        self._keep(message, await stack_dumps.gather(sources), attempt_id, {"hang": message})

    def _source(self, rank: Watched, reading: Reading | None) -> Source:
        return Source(
            rank=rank.number,
            leader=rank.pid,
            pid=reading.pid if reading else 0,
            signal=reading.signal if reading else 0,
            file=self.activity_pages.stacks(rank.slot),
        )

    async def _end(
        self,
        verdicts: Sequence[HangVerdict],
        sources: Sequence[Source],
        ranks: Sequence[Watched],
        attempt_id: AttemptId,
    ) -> None:
        """End the ranks, even those that continued: the signal may have interrupted a call unexpectedly."""
        dumps = await stack_dumps.gather(sources)
        moved_on = {
            rank.slot for rank in ranks if rank.greeted and rank.attempt_id != attempt_id
        }  # in another attempt by now
        for verdict in verdicts:
            if verdict.slot in moved_on:
                self._report(verdict, dumps, attempt_id)
            elif not self._left(verdict):
                self._report(verdict, dumps, attempt_id)
                self._hung(verdict.slot, verdict.message, verdict.cause, kill=verdict.kills)

    def _left(self, verdict: HangVerdict) -> bool:
        """Whether its attempt ended meanwhile and the rank left."""
        now = self.activity_pages.read(verdict.slot)
        return now is not None and now.activity is Activity.PARKED and verdict.activity is not Activity.PARKED

    def _report(self, verdict: HangVerdict, dumps: Sequence[StackDump], attempt_id: AttemptId) -> None:
        dump = next((dump for dump in dumps if dump.rank == verdict.rank), None)
        fields = {"rank": verdict.rank, "kernel": dump.kernel if dump else "", "at": dump.top if dump else ()}
        self._keep(verdict.message, dumps, attempt_id, fields)

    def _keep(
        self, message: str, dumps: Sequence[StackDump], attempt_id: AttemptId, fields: Mapping[str, object]
    ) -> None:
        self._count += 1
        try:
            path = stack_dumps.keep(self._kept, f"{attempt_id}-{self._count}", message, dumps)
            _log.warning("stacks of all local ranks are kept in %s", path, extra={"fields": fields})
        except OSError as error:
            _log.warning("stacks cannot be kept: %s", error, extra={"fields": fields})


def _observed(watched: WatchInput, readings: Mapping[int, Reading]) -> Observed:
    times = {reading.pid: cpu_times(reading.pid) for reading in readings.values()}
    return Observed(
        attempt_id=watched.attempt_id,
        world_size=watched.world_size,
        ranks_here=tuple(
            ObservedRank(slot=rank.slot, rank=rank.number, reading=readings[rank.slot])
            for rank in watched.ranks
            if rank.slot in readings
        ),
        absent=tuple(
            AbsentRank(
                slot=rank.slot, rank=rank.number, reading=readings[rank.slot], left_at=left_at, awaited=awaited
            )
            for rank, left_at, awaited in watched.absent
            if rank.slot in readings
        ),
        remote=watched.remote,
        cpu_waits={pid: waited for pid, (_, waited) in times.items()},
        cpu_runs={pid: ran for pid, (ran, _) in times.items()},
    )
