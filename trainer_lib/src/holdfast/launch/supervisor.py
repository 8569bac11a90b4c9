"""The local rank processes of one attempt at a time: start them, hear them, stop them, say how they ended."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.constants import MAX_TEXT, RankPhase
from holdfast.errors import DocumentError, SpawnError
from holdfast.launch.agent_socket import RankMessage
from holdfast.launch.causes import RankEnd
from holdfast.launch.files import read_json
from holdfast.launch.membership import Membership
from holdfast.launch.messages import Master, World
from holdfast.launch.oom import OomCounter
from holdfast.launch.process import ChildProcess, ProcessExit
from holdfast.launch.rank_env import RankPlace, places, rank_environ
from holdfast.launch.termination import last_lines
from holdfast.worlds import Pair

_log = logging.getLogger("holdfast.launch.supervisor")


class RankListener(Protocol):
    """Who hears of the ranks."""

    def rank_ended(self, pair: Pair, end: RankEnd) -> None:
        """A rank process ended, for whatever reason."""

    def cannot_start(self, pair: Pair, program: str, message: str) -> None:
        """The command cannot be started."""

    def all_ended(self, pair: Pair) -> None:
        """Nothing of this pair or a lower one is left, after `kill` asked for it."""


@dataclass(kw_only=True)
class Rank:
    """One rank process and what it said."""

    place: RankPlace
    pair: Pair
    error_file: Path
    started_at: float
    process: ChildProcess | None = None
    phase: str = RankPhase.STARTUP
    step: int = 0
    greeted: bool = False
    done: bool = False
    quiesced: bool = False
    ended: bool = False
    ended_well: bool = False
    peer_lost: str = ""
    exception: str = ""
    traceback: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """The process id, 0 before the start."""
        return 0 if self.process is None else self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.alive

    def to_status(self) -> dict[str, Any]:
        """Wire form in `status.json`."""
        return {
            "rank": self.place.rank,
            "localRank": self.place.local_rank,
            "pid": self.pid,
            "phase": str(self.phase),
            "step": self.step,
        }


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every rank runs, and under which conditions."""

    argv: tuple[str, ...]
    processes: int
    environ: Mapping[str, str] = field(repr=False)
    prefix_output: bool = False


class Supervisor:
    """Owns the rank processes. At most one attempt's processes live at a time."""

    def __init__(self, *, command: Command, run_dir: Path, me: str, listener: RankListener) -> None:
        self._command = command
        self._run_dir = run_dir
        self._me = me
        self._listener = listener
        self._oom = OomCounter()
        self._ending: asyncio.Task[None] | None = None
        self._ranks: list[Rank] = []
        self.pair: Pair | None = None
        self.speaks_holdfast = False  # sticky: this script has the loop

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of the current attempt."""
        return self._ranks

    @property
    def pids(self) -> frozenset[int]:
        """Processes that are not reaped yet."""
        return frozenset(rank.pid for rank in self._ranks if rank.alive)

    def start(self, world: World, master: Master, membership: Membership) -> None:
        """Start the ranks of a world; no older ones are left."""
        self.pair = world.pair
        self._ranks = []
        errors = self._fresh_error_dir(world.pair)
        processes = self._command.processes or membership.rules.processes_per_worker
        for place in places(world, self._me, processes):
            rank = Rank(
                place=place,
                pair=world.pair,
                error_file=errors / f"rank-{place.rank}.json",
                started_at=asyncio.get_running_loop().time(),
            )
            environ = rank_environ(
                self._command.environ,
                place=place,
                world=world,
                master=master,
                membership=membership,
                run_dir=self._run_dir,
                error_file=rank.error_file,
            )
            if not self._launch(rank, environ):
                return

    def _launch(self, rank: Rank, environ: Mapping[str, str]) -> bool:
        try:
            rank.process = ChildProcess(
                argv=self._command.argv,
                environ=environ,
                prefix=f"[{rank.place.rank}] " if self._command.prefix_output else "",
                on_exit=lambda ended: self._ended(rank, ended),
            )
        except SpawnError as error:
            self._listener.cannot_start(rank.pair, self._command.argv[0], str(error))
            return False
        self._ranks.append(rank)
        return True

    def _fresh_error_dir(self, pair: Pair) -> Path:
        root = self._run_dir / "errors"
        shutil.rmtree(root, ignore_errors=True)
        folder = root / str(pair)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def hear(self, message: RankMessage) -> Rank | None:
        """Note what a rank said; None if it is not of the present attempt."""
        rank = next((rank for rank in self._ranks if rank.place.rank == message.rank), None)
        if rank is None or message.pair != rank.pair:
            return None
        _note(rank, message)
        self.speaks_holdfast |= rank.greeted
        return rank

    def terminate(self, ranks: Sequence[Rank]) -> None:
        """Ask processes to end by themselves (SIGTERM)."""
        for rank in ranks:
            if rank.process is not None:
                rank.process.send(signal.SIGTERM)

    def kill(self, pair: Pair, grace: float) -> asyncio.Task[None]:
        """End all processes of this pair and lower ones; `all_ended` follows."""
        self._ending = asyncio.get_running_loop().create_task(self._end(pair, grace, self._ending))
        return self._ending

    async def _end(self, pair: Pair, grace: float, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await previous
        doomed = [rank.process for rank in self._ranks if rank.process is not None and rank.pair <= pair]
        waiting = asyncio.gather(*(process.reaped.wait() for process in doomed))
        if grace > 0 and doomed:
            for process in doomed:
                process.send(signal.SIGTERM)
            await asyncio.wait([waiting], timeout=grace)
        for process in doomed:
            process.kill()
        await waiting
        self._listener.all_ended(pair)

    def _ended(self, rank: Rank, ended: ProcessExit) -> None:
        rank.ended = True
        end = self._describe(rank, ended)
        rank.ended_well = end.ended_well
        self._listener.rank_ended(rank.pair, end)

    def _describe(self, rank: Rank, ended: ProcessExit) -> RankEnd:
        exception, traceback = rank.exception, rank.traceback
        if not exception and ended.returncode != 0:
            exception, traceback = _recorded(rank.error_file)
        return RankEnd(
            rank=rank.place.rank,
            pid=ended.pid,
            returncode=ended.returncode,
            sent=ended.sent,
            oom=ended.returncode == -signal.SIGKILL and self._oom.grew(),
            greeted=rank.greeted,
            done=rank.done,
            peer_lost=rank.peer_lost,
            exception=exception,
            traceback=traceback or last_lines(ended.stderr_tail),
            step=rank.step if rank.greeted else None,
        )


def _note(rank: Rank, message: RankMessage) -> None:
    body = message.body
    rank.greeted = True
    match message.type:
        case "phase":
            rank.phase, rank.step = str(body["phase"]), int(body["step"])
        case "step":
            rank.phase, rank.step = RankPhase.STEP, int(body["step"])
        case "restored":
            rank.step = int(body["step"])
        case "quiesced":
            rank.quiesced = True
        case "peerLost":
            rank.peer_lost = str(body["message"])
        case "exception":
            rank.exception = f"{body['name']}: {body['message']}"
            rank.traceback = last_lines([str(line) for line in body["traceback"]])
        case "done":
            rank.done, rank.phase, rank.step = True, RankPhase.DONE, int(body["step"])
        case _:
            pass


def _recorded(error_file: Path) -> tuple[str, tuple[str, ...]]:
    """What torch's `@record` left: the exception and the last lines of its traceback."""
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
    """What to run: as given; a Python file by itself is run by this interpreter, as torchrun does."""
    if words and words[0].endswith(".py"):
        return (sys.executable, "-u", *words)
    return tuple(words)
