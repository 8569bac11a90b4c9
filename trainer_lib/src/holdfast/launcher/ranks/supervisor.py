"""Starts the local rank processes, moves them between worlds, stops them, and judges their exits.

Invariant: `all_ended(attempt_id)` is called only when no local process can vote in an attempt up to that one. Each
was reaped, or sent `left` for it and waits in memory (it is *kept*). A process that does not send it in time is
killed. A kept process gets its place in the next world; new processes fill the other places.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError, SpawnError
from holdfast.core.limits import MAX_TEXT
from holdfast.launcher.hang.cpu_starvation import cpu_wait
from holdfast.launcher.host.run_dir import read_json
from holdfast.launcher.host.termination_log import error_lines, last_lines
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.held_shards import HeldShards, joined
from holdfast.launcher.membership.messages import Master, World
from holdfast.launcher.process import compile_cache
from holdfast.launcher.process.child import Child, ChildProcess, ProcessExit
from holdfast.launcher.ranks.environ import RankPlace, places, rank_environ, standby_environ, world_message
from holdfast.launcher.ranks.exit_cause import RankEnd
from holdfast.launcher.ranks.oom_counter import OomCounter
from holdfast.launcher.ranks.rank_process import Rank, Spawner
from holdfast.launcher.ranks.rank_socket import RankMessage

_log = logging.getLogger("holdfast.launcher.supervisor")
# A rank that has not sent `left` within this time after the request is killed. Known hung ranks are killed at once
# (`hang/`). On a host without a free core, answers may take long, and killing the last rank would lose the state in
# memory. So this covers only ranks that hang in addition to another failure.
FENCE_SECONDS = 2.0
# On a host with CPU starvation, the time may be longer by at most this factor.
_FENCE_FACTOR = 10.0
_LOOK_SECONDS = 0.1
# Messages that a process sent before its end must be read before the end is judged.
_LAST_WORDS_SECONDS = 0.02


class RankListener(Protocol):
    """Receives events about ranks."""

    def rank_ended(self, rank: Rank, end: RankEnd) -> None:
        """A process ended while it was in an attempt, for any reason."""

    def process_ended(self, pid: int, *, killed: bool) -> None:
        """A process ended, whatever its state was; `killed`: by this launcher."""

    def standby_ended(self) -> None:
        """A process without a world ended."""

    def cannot_start(self, attempt_id: AttemptId, program: str, message: str) -> None: ...

    def all_ended(self, attempt_id: AttemptId) -> None:
        """After `stop`: no local process can vote in this attempt or a lower one any more."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command of every rank, and its conditions."""

    argv: tuple[str, ...]
    processes: int
    environ: Mapping[str, str] = field(repr=False)
    prefix_output: bool = False
    warm: int | None = None  # number of standby processes; None: not even a zygote


class NewInterpreter:
    """Starts the command in a new process."""

    def __init__(self, command: Command) -> None:
        self._argv = command.argv

    def spawn(self, *, environ: Mapping[str, str], prefix: str, on_exit: Callable[[ProcessExit], None]) -> Child:
        return ChildProcess(argv=self._argv, environ=environ, prefix=prefix, on_exit=on_exit)


class Supervisor:
    def __init__(
        self, *, command: Command, run_dir: Path, me: str, listener: RankListener, spawner: Spawner | None = None
    ) -> None:
        self._command = command
        self._run_dir = run_dir
        self._me = me
        self._listener = listener
        self._spawner = spawner or NewInterpreter(command)
        self._oom = OomCounter()
        self._slots = itertools.count()
        self._ranks: dict[int, Rank] = {}
        self._world: tuple[World, Master, Membership] | None = None
        self._stopping: list[AttemptId] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self.attempt_id: AttemptId | None = None
        self.uses_holdfast = False  # stays True: this script has the loop

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of the current attempt, by their place."""
        here = [
            rank
            for rank in self._ranks.values()
            if rank.attempt_id is not None and rank.attempt_id == self.attempt_id
        ]
        return sorted((rank for rank in here if not rank.forgotten), key=lambda rank: rank.local_rank)

    @property
    def absent(self) -> Sequence[Rank]:
        """Processes between two worlds."""
        return [rank for rank in self._ranks.values() if rank.absent]

    @property
    def standbys(self) -> Sequence[Rank]:
        """Processes that wait for their first world."""
        return [
            rank for rank in self._ranks.values() if rank.attempt_id is None and rank.alive and not rank.forgotten
        ]

    @property
    def slots(self) -> frozenset[int]:
        """The slots of all processes that are not reaped yet."""
        return frozenset(slot for slot, rank in self._ranks.items() if rank.alive)

    @property
    def held(self) -> HeldShards | None:
        """The shards of a sharded model that the local processes have in memory, also between two worlds."""
        alive = [rank for rank in self._ranks.values() if rank.alive and not rank.forgotten]
        return joined(rank.held for rank in alive if rank.held is not None)

    def rank(self, slot: int) -> Rank | None:
        """Return the process of a slot, or None."""
        rank = self._ranks.get(slot)
        return None if rank is None or rank.forgotten else rank

    def start(self, world: World, master: Master, membership: Membership) -> None:
        """Fill this launcher's places in a world: first with kept processes, then with new ones."""
        self.attempt_id = world.attempt_id
        self._world = (world, master, membership)
        errors = self._fresh_error_dir(world.attempt_id)
        self._ranks = {slot: rank for slot, rank in self._ranks.items() if rank.alive or not rank.ended}
        kept = {rank.local_rank: rank for rank in self._ranks.values() if rank.kept}
        here = places(world, self._me, self._processes(membership))
        for place in here:  # kept ones first: starting a process takes longer
            rank = kept.get(place.local_rank)
            if rank is not None:
                rank.take(place, world.attempt_id, errors / f"rank-{place.rank}.json")
                rank.move(world_message(place, world, master, membership, errors / f"rank-{place.rank}.json"))
        for rank in self._ranks.values():
            if rank.parked:
                self._forget(rank)
        for place in here:
            error_file = errors / f"rank-{place.rank}.json"
            if place.local_rank not in kept and not self._start(place, error_file):
                return

    def stand_by(self, membership: Membership) -> None:
        """Start standby processes for the places without a kept process."""
        held = {rank.local_rank for rank in self._ranks.values() if rank.kept}
        processes = self._processes(membership)
        for local_rank in sorted(set(range(processes)) - held):
            rank = self._new(local_rank)
            environ = standby_environ(
                self._command.environ, membership, self._run_dir, slot=rank.slot, processes=processes
            )
            try:
                self._launch(rank, environ, f"[{local_rank}] ")
            except SpawnError as error:  # reported again when a world needs the process
                _log.warning("%s", error)
                self._listener.standby_ended()
                return

    def _processes(self, membership: Membership) -> int:
        return self._command.processes or membership.rules.processes_per_worker

    def _start(self, place: RankPlace, error_file: Path) -> bool:
        """Start a process for a place in the current world. Return False if the command cannot be started."""
        if self._world is None:
            raise AssertionError("there is no world to start a rank for")
        world, master, membership = self._world
        rank = self._new(place.local_rank)
        rank.take(place, world.attempt_id, error_file)
        environ = rank_environ(
            self._command.environ,
            place=place,
            world=world,
            master=master,
            membership=membership,
            run_dir=self._run_dir,
            error_file=error_file,
            slot=rank.slot,
        )
        try:
            self._launch(rank, environ, f"[{place.rank}] ")
        except SpawnError as error:
            self._listener.cannot_start(world.attempt_id, self._command.argv[0], str(error))
            return False
        return True

    def _new(self, local_rank: int) -> Rank:
        return Rank(slot=next(self._slots), local_rank=local_rank, started_at=asyncio.get_running_loop().time())

    def _launch(self, rank: Rank, environ: Mapping[str, str], prefix: str) -> None:
        rank.process = self._spawner.spawn(
            environ=environ,
            prefix=prefix if self._command.prefix_output else "",
            on_exit=lambda ended: self._do(self._drain_socket(rank, ended)),
        )
        self._ranks[rank.slot] = rank
        self._do(self._watch(rank.process))

    def _fresh_error_dir(self, attempt_id: AttemptId) -> Path:
        root = self._run_dir / "errors"
        shutil.rmtree(root, ignore_errors=True)
        folder = root / str(attempt_id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def handle(self, message: RankMessage) -> Rank | None:
        """Record a message of a rank. Return None if it is not of the current attempt."""
        rank = self._find(message)
        if rank is None:
            return None
        present = rank.handle(message)
        self.uses_holdfast = True
        if message.type == "left":
            if rank.left_at is None:
                rank.left_at = time.monotonic()
            if message.body["keep"] is not True:
                self._forget(rank)
            self._settle()
        return rank if present or message.type in ("standby", "ready") else None

    def _find(self, message: RankMessage) -> Rank | None:
        slot = message.connection.slot
        if slot is not None:
            return self.rank(slot)
        number, attempt_id = message.connection.rank, message.attempt_id
        return next((rank for rank in self.ranks if rank.number == number and rank.attempt_id == attempt_id), None)

    def terminate(self, ranks: Sequence[Rank]) -> None:
        """Request processes to end (SIGTERM)."""
        for rank in ranks:
            if rank.process is not None:
                rank.process.send(signal.SIGTERM)

    def kill(self, rank: Rank) -> None:
        """Kill a process. Its end is judged as any other."""
        if rank.process is not None:
            rank.process.kill()

    def kill_all(self) -> None:
        """Kill every process."""
        for rank in self._ranks.values():
            if rank.alive:
                self.kill(rank)

    def dismiss(self, rank: Rank) -> None:
        """Kill a process that is in no attempt. It gets no further place."""
        self._forget(rank)

    def stop(self, attempt_id: AttemptId, reason: str, grace: float) -> None:
        """Prevent processes from voting up to this attempt; `all_ended` follows.

        A script without Holdfast's loop is killed `grace` seconds after SIGTERM.
        """
        self._stopping.append(attempt_id)
        for rank in [rank for rank in self._ranks.values() if rank.may_vote(attempt_id)]:
            if rank.can_leave:
                rank.send({"type": "leave", **attempt_id.to_json(), "reason": reason[:MAX_TEXT]})
                self._later(FENCE_SECONDS, rank, attempt_id, factor=_FENCE_FACTOR)
            elif grace > 0 and not rank.speaks:
                self.terminate([rank])
                self._later(grace, rank, attempt_id)
            else:
                self.kill(rank)
        self._settle()

    async def close(self, grace: float) -> None:
        """End every process. Scripts without Holdfast's loop get SIGTERM first."""
        alive = [rank for rank in self._ranks.values() if rank.alive]
        gone = asyncio.gather(*(rank.process.reaped.wait() for rank in alive if rank.process is not None))
        if grace > 0 and alive and not self.uses_holdfast:
            self.terminate(alive)
            await asyncio.wait([gone], timeout=grace)
        self.kill_all()
        await gone

    def _later(self, seconds: float, rank: Rank, attempt_id: AttemptId, *, factor: float = 1.0) -> None:
        """Kill a rank that may still vote after `seconds`.

        A suspended host, or one with CPU starvation, delays all ranks, and killing the last rank would lose the state
        in memory. Such time does not count, up to `factor` times `seconds`.
        """
        self._do(self._fence(seconds, rank, attempt_id, factor))

    async def _fence(self, seconds: float, rank: Rank, attempt_id: AttemptId, factor: float) -> None:
        loop, left, waited = asyncio.get_running_loop(), seconds, cpu_wait(rank.pid)
        last = loop.time() + seconds * factor
        while left > 0 and loop.time() < last and rank.may_vote(attempt_id):
            await asyncio.sleep(_LOOK_SECONDS)  # may take longer, but counts as this much
            before, waited = waited, cpu_wait(rank.pid)
            left -= max(0.0, _LOOK_SECONDS - (waited - before))
        if rank.commits and self._world is not None:
            last = loop.time() + self._world[2].rules.checkpoint_deadline
            while rank.may_vote(attempt_id) and loop.time() < last:
                await asyncio.sleep(_LOOK_SECONDS)
        if rank.may_vote(attempt_id):
            if rank.speaks:
                _log.warning("rank %d did not leave %s in time and is killed", rank.number, rank.attempt_id)
            self.kill(rank)

    def _settle(self) -> None:
        """Call `all_ended` for every attempt in which no process can vote any more."""
        for attempt_id in list(self._stopping):
            if not any(rank.may_vote(attempt_id) for rank in self._ranks.values()):
                self._stopping.remove(attempt_id)
                self._listener.all_ended(attempt_id)

    def _forget(self, rank: Rank) -> None:
        """Kill a process that is no longer needed. Its end is not judged."""
        rank.forgotten = True
        self.kill(rank)

    def repair_compile_cache(self) -> None:
        """Remove, on a thread, incomplete files of a killed compiler from the cache that ranks share."""
        self._do(asyncio.to_thread(compile_cache.repair, compile_cache.folder(self._command.environ)))

    async def _watch(self, process: Child) -> None:
        await process.reaped.wait()
        self._settle()

    async def _drain_socket(self, rank: Rank, ended: ProcessExit) -> None:
        """Judge an end after all messages of the process have been processed."""
        if rank.connection is not None:
            try:
                await asyncio.wait_for(rank.connection.over.wait(), _LAST_WORDS_SECONDS)
            except TimeoutError:
                _log.debug("another process keeps the connection of rank %d open", rank.number)
        elif ended.returncode != -signal.SIGKILL:  # it may have sent hello a moment ago
            await asyncio.sleep(_LAST_WORDS_SECONDS)
        self._ended(rank, ended)

    def _ended(self, rank: Rank, ended: ProcessExit) -> None:
        rank.ended = True
        if ended.returncode == -signal.SIGKILL:
            self.repair_compile_cache()
        self._listener.process_ended(ended.pid, killed=signal.SIGKILL in ended.sent)
        if rank.forgotten or rank.parked:
            del self._ranks[rank.slot]
            if rank.attempt_id is None and not rank.forgotten:
                self._listener.standby_ended()
            return
        if rank.world is not None and not ended.sent and self._start_again(rank):
            return
        end = self._describe(rank, ended)
        rank.ended_well = end.ended_well
        self._listener.rank_ended(rank, end)

    def _start_again(self, rank: Rank) -> bool:
        """Replace a standby process that ended without a world: the script may need its place at the start."""
        if rank.attempt_id != self.attempt_id or rank.place is None or rank.error_file is None:
            return False
        del self._ranks[rank.slot]
        self._start(rank.place, rank.error_file)
        return True

    def _describe(self, rank: Rank, ended: ProcessExit) -> RankEnd:
        exception, traceback = rank.exception, rank.traceback
        if not exception and ended.returncode != 0 and rank.error_file is not None:
            exception, traceback = _recorded(rank.error_file)
        return RankEnd(
            rank=rank.number,
            pid=ended.pid,
            returncode=ended.returncode,
            sent=ended.sent,
            oom=ended.returncode == -signal.SIGKILL and self._oom.grew(),
            greeted=rank.speaks,
            done=rank.done,
            peer_lost=rank.peer_lost,
            exception=exception,
            traceback=traceback or error_lines(ended.stderr_tail),
            step=rank.step if rank.speaks else None,
        )

    def _do(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            context = {"message": "a rank process could not be supervised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def _recorded(error_file: Path) -> tuple[str, tuple[str, ...]]:
    """Return the exception and the last lines of its traceback that torch's `@record` wrote."""
    if not error_file.exists():
        return "", ()
    try:
        message = read_json(error_file)["message"]
        if isinstance(message, str):
            return message[:MAX_TEXT], ()
        stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        return str(message.get("message", ""))[:MAX_TEXT], last_lines(stack.splitlines())
    except (DocumentError, KeyError, AttributeError) as error:
        _log.warning("a rank's error file cannot be read: %s", error)
        return "", ()


def resolve_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command to run: unchanged, except that this interpreter runs a Python file, as with torchrun."""
    if words and words[0].endswith(".py"):
        return (sys.executable, "-u", *words)
    return tuple(words)
