"""A world of ranks whose activity the detectors watch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast.core.attempt import AttemptId
from holdfast.launcher.hang.detectors.observation import AbsentRank, HangSettings, HangVerdict, Observed, ObservedRank
from holdfast.launcher.hang.detectors.watchdog import Watchdog
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

TICK = 0.1


A = Activity
TIGHT = HangSettings(min_step=1.0)
CALM = HangSettings()


@dataclass
class Scene:
    """Ranks of one launcher, a clock, and the watchdog that checks them every 0.1 s."""

    ranks: int = 3
    world_size: int = 3
    now: float = 1000.0
    attempt_id: AttemptId = field(default_factory=lambda: AttemptId(1, 1))
    watchdog: Watchdog = field(default_factory=Watchdog)
    readings: dict[int, Reading] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)  # ranks that left their attempt, and when
    awaited: bool = True
    cpu_waits: dict[int, float] = field(default_factory=dict)
    cpu_runs: dict[int, float] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)  # ranks whose main thread uses the CPU

    def __post_init__(self) -> None:
        self.watchdog.settings = TIGHT
        for rank in range(self.ranks):
            self.begin(rank)

    def begin(self, rank: int, step: int = 0) -> None:
        """Start a new process at this rank."""
        self.readings[rank] = Reading(
            pid=rank,
            signal=45,
            beat=self.now,
            activity=A.COMPUTE,
            since=self.now,
            step=step,
            stepped=self.now,
            made=0,
        )

    def enter(self, activity: Activity, *ranks: int) -> None:
        for rank in ranks or self.readings:
            self.readings[rank] = replace(self.readings[rank], activity=activity, since=self.now)

    def check(self, seconds: float = TICK) -> tuple[HangVerdict, ...]:
        self.now += seconds
        for rank, reading in self.readings.items():
            if rank not in self.stopped:
                self.readings[rank] = replace(reading, beat=self.now)
            self.cpu_runs[rank] = self.cpu_runs.get(rank, 0.0) + (seconds if rank in self.runs else 0.0)
        here = {rank: reading for rank, reading in self.readings.items() if rank not in self.left}
        ranks_here = tuple(
            ObservedRank(slot=100 + rank, rank=rank, reading=reading) for rank, reading in here.items()
        )
        absent = tuple(
            AbsentRank(slot=100 + rank, rank=rank, reading=self.readings[rank], left_at=at, awaited=self.awaited)
            for rank, at in self.left.items()
        )
        seen = Observed(
            attempt_id=self.attempt_id,
            world_size=self.world_size,
            ranks_here=ranks_here,
            absent=absent,
            cpu_waits=self.cpu_waits,
            cpu_runs=self.cpu_runs,
        )
        return self.watchdog.judge(seen, self.now)

    def step(self) -> None:
        """Let all ranks complete a step now."""
        for rank, was in self.readings.items():
            self.readings[rank] = replace(
                was, activity=A.COMPUTE, since=self.now, step=was.step + 1, stepped=self.now, made=was.made + 1
            )

    def train(self, steps: int = 20, seconds: float = 0.1) -> None:
        for _ in range(steps):
            self.wait(seconds)
            self.step()

    def wait(self, seconds: float) -> tuple[HangVerdict, ...]:
        """Check until a rank hangs or the time is over."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            if verdicts := self.check(min(TICK, end - self.now)):
                return verdicts
        return ()
