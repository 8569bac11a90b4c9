"""A job in this process, in a world of one, under a simulated launcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.interval import LauncherFailures
from holdfast.checkpoint.saving.background import Saving
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.environment import read_environment
from holdfast.telemetry.activity import Meter
from holdfast.telemetry.rank_time import Ledger
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.guards.settings import Guards
from holdfast.training.init import PhaseTeller
from holdfast.training.job import Job
from holdfast.training.launcher_client.connection import Parting, Requests
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.options.config import effective

PATIENCE = 240.0
"""For what must come: on a busy host it may take long."""


class TheEnd(BaseException):
    """Raised when a quiesced rank is ended."""


@dataclass
class Recorder:
    """Simulate the launcher of a job in this process: record its messages, and send the requests of a test."""

    connected: bool = True
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    wanted: Requests = field(default_factory=Requests)
    parting: Callable[[], Parting] = Parting
    reached: int = 0
    durable: int = 0
    trained: AttemptId | None = None
    launcher_failures: LauncherFailures | None = None
    out_of_memory: OutOfMemory = field(default_factory=OutOfMemory)
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attempt_id: AttemptId | None = None  # None: the folder determines the attempt
    places: int = 0  # the given ones
    moves_on: bool = False
    """Whether there is another attempt after a lost peer; else the rank is ended."""
    generation: int = 1  # of the attempts after the first
    cancel: CancelToken = field(default_factory=CancelToken)

    def send(self, kind: str, **body: Any) -> None:
        self.told.append((kind, body))

    def on_standby(self) -> bool:
        return False

    def next_place(self) -> RankPlacement:
        if self.places and not self.moves_on:
            raise TheEnd
        self.places += 1
        attempt_id = self.attempt_id
        if self.moves_on:
            self.cancel = CancelToken()
            attempt_id = AttemptId(self.generation if self.places > 1 else 1, self.places)
        return RankPlacement(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            host="",
            port=None,
            attempt_id=attempt_id,
            publication="p",
            job_uid="me",
        )

    def enter(self, place: RankPlacement) -> CancelToken:
        return self.cancel

    def known_claims(self) -> tuple[Claim, ...]:
        return ()

    def begin_vote(self) -> None:
        return None

    def end_vote(self) -> None:
        return None

    def stay(self) -> None:
        self.cancel.check()

    def go(self) -> None:
        return None

    def hurried(self) -> bool:
        return False

    def leave(self, reason: str) -> None:
        self.cancel.set(reason)

    def lose_peers(self, message: str) -> None:
        self.cancel.set(message)

    def requests(self) -> Requests:
        return self.wanted

    def answered(self, requests: Requests) -> None:
        left = tuple(item for item in self.wanted.checkpoint if item not in requests.checkpoint)
        self.wanted = Requests(checkpoint=left, quiesce=self.wanted.quiesce, pause=self.wanted.pause)

    def close(self) -> None:
        return None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [body for name, body in self.told if name == kind]


class WatchedManager(CheckpointManager):
    """A manager that remembers the saves that were started."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.begun: list[Saving] = []

    def begin(self, *arguments: Any, **more: Any) -> Saving:
        self.begun.append(super().begin(*arguments, **more))
        return self.begun[-1]


@dataclass(frozen=True)
class Solo:
    job: Job
    launcher: Recorder
    engine: WatchedManager | None

    @property
    def saving(self) -> bool:
        """Return whether a save is being written."""
        return self.engine is not None and not all(saving.ended for saving in self.engine.begun)

    def settle(self) -> None:
        """Wait until the started saves have ended: each deletes old checkpoints after its report."""
        deadline = time.monotonic() + PATIENCE
        while self.saving:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def make_solo(
    root: Path | None,
    *,
    interval: str = "1000",
    keep_last: int = 3,
    attempt_id: AttemptId | None = None,
    retention: str = "",
    full_every: int = 1,
    delta_threshold: float = 0.0,
    bytes_per_second: int | None = None,
    guards: Guards | None = None,
) -> Solo:
    """Create a job. A second call with the same folder starts the next attempt."""
    launcher = Recorder(attempt_id=attempt_id)
    config = effective(
        read_environment({}),
        checkpoint_dir=root,
        checkpoint_interval=interval,
        keep_last=keep_last,
        retention=retention,
        full_every=full_every,
        delta_threshold=delta_threshold,
    )
    engine = None
    if root is not None:
        engine = WatchedManager(
            root,
            keep_last=keep_last,
            rules=config.retention,
            resume=config.resume,
            full_every=full_every,
            delta_threshold=delta_threshold,
            bytes_per_second=bytes_per_second,
            on_foreign=lambda claims: launcher.send("foreignClaims", claims=claims),
        )
    ledger = Ledger(time.monotonic)
    job = Job(
        agent=launcher,
        config=config,
        engine=engine,
        meter=Meter(PhaseTeller(launcher), ledger),
        ledger=ledger,
        device=lambda place: torch.device("cpu"),
        guards=guards,
    )
    return Solo(job, launcher, engine)
