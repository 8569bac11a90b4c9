"""One rank process as its launcher tracks it: slot, place and reported state. No I/O except signals and messages.

A process outlives attempts. It *votes* in an attempt from its placement there until it sends `left` for that attempt
(or a later one) or is reaped. After `left` it is *kept* until its next placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.attempt import AttemptId, highest
from holdfast.core.protocol import RankPhase
from holdfast.launcher.host.termination_log import last_lines
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.process.child import Child, ProcessExit
from holdfast.launcher.ranks.environ import RankPlace
from holdfast.launcher.ranks.rank_socket import Connection, RankMessage

# On a loaded host, an interpreter with torch takes seconds to exit.
ENDING_SECONDS = 20.0


class Spawner(Protocol):
    def spawn(self, *, environ: Mapping[str, str], prefix: str, on_exit: Callable[[ProcessExit], None]) -> Child:
        """Start a process. Raises SpawnError."""


@dataclass(kw_only=True)
class Rank:
    slot: int
    local_rank: int
    started_at: float
    process: Child | None = None
    connection: Connection | None = None
    # The current or last place. A standby process has none yet.
    place: RankPlace | None = None
    attempt_id: AttemptId | None = None
    error_file: Path | None = None
    left: AttemptId | None = None
    left_at: float | None = None  # on the clock of the activity pages; None once it is in a world again
    ready: bool = False
    world: Mapping[str, Any] | None = None  # to be sent as soon as it can receive
    forgotten: bool = False
    step: int = 0
    # Seconds per step, without waiting for other ranks; None until they are known.
    data_seconds: float | None = None
    compute_seconds: float | None = None
    # State that it reported in its current attempt.
    phase: str = RankPhase.STARTUP
    greeted: bool = False
    done: bool = False
    quiesced: bool = False
    peer_lost: str = ""
    exception: str = ""
    traceback: tuple[str, ...] = ()
    commits: bool = False  # its last step, since every rank failed
    ended: bool = False
    ended_well: bool = False
    held: HeldShards | None = None

    @property
    def number(self) -> int:
        return -1 if self.place is None else self.place.rank

    @property
    def pid(self) -> int:
        """The process ID; 0 before the start."""
        return 0 if self.process is None else self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def speaks(self) -> bool:
        """Whether the script uses Holdfast."""
        return self.connection is not None

    def ends(self, now: float) -> bool:
        """Whether it closed its connection a moment ago: the interpreter is exiting, and its exit code will show why.

        For `ENDING_SECONDS` this does not count as a hang. A process that never exits counts as hung afterwards.
        """
        over_at = None if self.connection is None else self.connection.over_at
        return over_at is not None and now - over_at < ENDING_SECONDS

    @property
    def can_leave(self) -> bool:
        """Whether it can leave an attempt on request and stay alive."""
        return self.connection is not None and self.connection.slot is not None and self.connection.open

    def may_vote(self, attempt_id: AttemptId) -> bool:
        """Whether it could still vote in this attempt or a lower one."""
        return self.alive and self.attempt_id is not None and self.attempt_id <= attempt_id and not self.parked

    @property
    def parked(self) -> bool:
        """Whether it is in no attempt."""
        return self.attempt_id is None or (self.left is not None and self.left >= self.attempt_id)

    @property
    def starting(self) -> bool:
        """Whether it is a standby process that has not connected yet."""
        return self.attempt_id is None and not self.speaks

    @property
    def kept(self) -> bool:
        """Whether it waits for a place, or soon will."""
        usable = (self.can_leave or self.starting) and not self.done and not self.exception
        return self.alive and not self.forgotten and self.parked and usable

    @property
    def absent(self) -> bool:
        """Whether it left its attempt and is not in the next one yet."""
        awaited = not self.parked and not self.greeted and self.alive and not self.forgotten
        return self.left_at is not None and (self.kept or awaited)

    def take(self, place: RankPlace, attempt_id: AttemptId, error_file: Path) -> None:
        self.place, self.local_rank, self.attempt_id, self.error_file = (
            place,
            place.local_rank,
            attempt_id,
            error_file,
        )
        self.phase, self.peer_lost, self.exception, self.traceback = RankPhase.STARTUP, "", "", ()
        self.greeted = self.done = self.quiesced = self.commits = False
        self.data_seconds = self.compute_seconds = None

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message. Return whether the connection was open."""
        return self.connection is not None and self.connection.send(message)

    def move(self, world: Mapping[str, Any]) -> None:
        """Send it its world, now or as soon as it can receive."""
        self.world = None if self.send(world) else world

    def handle(self, message: RankMessage) -> bool:
        """Record its message. Return whether the message belongs to its current attempt."""
        match message.type:
            case "hello":
                self.connection, self.left_at = message.connection, None
            case "standby":
                self.connection = message.connection
                if self.world is not None:
                    self.move(self.world)
            case "ready":
                self.ready = True
            case "left":
                self.left = highest(self.left, AttemptId.from_json(message.body))
        if self.attempt_id is None or message.attempt_id != self.attempt_id:
            return False
        self._note(message)
        return True

    def _note(self, message: RankMessage) -> None:
        body = message.body
        match message.type:
            case "hello":
                self.greeted = True
            case "phase":
                self.phase, self.step = str(body["phase"]), int(body["step"])
            case "step":
                self.phase, self.step = RankPhase.STEP, int(body["step"])
                self.data_seconds = float(body.get("dataSeconds", 0)) or None
                self.compute_seconds = float(body.get("computeSeconds", 0)) or None
            case "restored":
                self.step = int(body["step"])
                self.held = self._held(body.get("shard"))
            case "quiesced":
                self.quiesced = True
            case "peerLost":
                self.peer_lost = str(body["message"])
            case "exception":
                self.exception = f"{body['name']}: {body['message']}"
                self.traceback = last_lines([str(line) for line in body["traceback"]])
            case "lastCommit":
                self.commits = True
            case "done":
                self.done, self.phase, self.step = True, RankPhase.DONE, int(body["step"])
            case _:
                pass

    def _held(self, shard: Mapping[str, Any] | None) -> HeldShards | None:
        if shard is None or self.attempt_id is None:
            return None
        return HeldShards(
            attempt_id=self.attempt_id, count=int(shard["count"]), shards=frozenset({int(shard["index"])})
        )

    def to_status(self) -> dict[str, Any]:
        """Wire form in `status.json`."""
        return {
            "rank": self.number,
            "localRank": self.local_rank,
            "pid": self.pid,
            "phase": str(self.phase),
            "step": self.step,
            "dataSeconds": self.data_seconds,
            "computeSeconds": self.compute_seconds,
        }
