"""Hangs of real processes: their launcher detects each hang, and keeps the stacks of all ranks before it ends one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.hang import stack_dumps
from holdfast.launcher.hang.activity_pages import ActivityPages
from holdfast.launcher.hang.detectors.observation import HangSettings
from holdfast.launcher.hang.monitor import HangWatch, WatchInput
from holdfast.launcher.host.run_dir import STACKS_DIR
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import BOARD_DIR

SCRIPT = Path(__file__).parents[1] / "scripts" / "steps.py"
DEADLINE = 240.0


@dataclass
class Process:
    slot: int
    number: int
    popen: subprocess.Popen[bytes]
    attempt_id: AttemptId = field(default_factory=lambda: AttemptId(1, 1))
    greeted: bool = True

    @property
    def pid(self) -> int:
        return self.popen.pid


@dataclass
class World:
    """Ranks under one hang monitor. Slots start at ten to differ from ranks."""

    run_dir: Path
    seconds: float = 0.03
    ranks: list[Process] = field(default_factory=list)
    verdicts: list[tuple[int, str, Cause]] = field(default_factory=list)

    found: list[tuple[AttemptId, str]] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    absent: list[tuple[Process, float, bool]] = field(default_factory=list)

    def hung(self, slot: int, message: str, cause: Cause, *, kill: bool) -> None:
        self.verdicts.append((slot, message, cause))
        self.killed += [slot] if kill else []

    def start(self, *faults: str) -> None:
        self.watch = HangWatch(
            self.run_dir, self.hung, lambda attempt_id, message: self.found.append((attempt_id, message))
        )
        self.watch.configure(HangSettings(min_step=1))
        for rank, fault in enumerate(faults):
            words = [sys.executable, str(SCRIPT), str(self.run_dir / BOARD_DIR), str(10 + rank), str(self.seconds)]
            popen = subprocess.Popen([*words, fault], process_group=0)
            self.ranks.append(Process(slot=10 + rank, number=rank, popen=popen))
        end = time.monotonic() + DEADLINE
        while not all(self.activity_pages.read(rank.slot) for rank in self.ranks):
            assert time.monotonic() < end, "the ranks never came"
            time.sleep(0.01)
        (self.run_dir / "begin").touch()  # together: a rank that is not there yet waits for nothing

    def check(self, *, world_size: int | None = None) -> None:
        size = world_size or len(self.ranks)
        ranks = [rank for rank in self.ranks if rank not in [absent_rank for absent_rank, _, _ in self.absent]]
        self.watch.check(WatchInput(attempt_id=AttemptId(1, 1), world_size=size, ranks=ranks, absent=self.absent))

    async def look_until(self, condition: Callable[[], object], *, world_size: int | None = None) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, "it never came"
            self.check(world_size=world_size)
            await asyncio.sleep(0.1)

    async def verdict(self, *, world_size: int | None = None) -> tuple[int, str, Cause]:
        await self.look_until(lambda: self.verdicts, world_size=world_size)
        return self.verdicts[0]

    async def settle(self, slot: int, *, world_size: int = 3) -> None:
        """Wait until this rank has completed its steps and waits."""

        def waits() -> bool:
            reading = self.activity_pages.read(slot)
            return reading is not None and reading.made >= 30 and reading.activity.waiting

        await self.look_until(waits, world_size=world_size)

    @property
    def activity_pages(self) -> ActivityPages:
        return self.watch.activity_pages

    @property
    def dump(self) -> str:
        (path,) = (self.run_dir / STACKS_DIR).iterdir()
        return path.read_text()

    def stop(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.popen.wait()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("fault", "function"), [("sleep", "asleep_in_the_loss"), ("lock", "hold_the_lock"), ("spin", "spin")]
)
def test_rank_that_blocks_others_hangs_and_its_stacks_are_kept(world: World, fault: str, function: str) -> None:
    world.start("wait", fault)
    slot, message, cause = asyncio.run(world.verdict())
    assert (slot, cause) == (11, Cause.INFRASTRUCTURE)
    assert message.startswith("rank 1 has been busy for ")
    assert "in compute after step 30" in message
    assert message.endswith("; waiting: rank 0 for its gradients")
    dump = world.dump
    assert message in dump
    assert f"in {function}" in dump
    assert "holdfast-beat" in dump or "activity_page.py" in dump  # every thread, not only the main thread
    assert "== rank 0" in dump  # and those of the other rank of its shard group
    assert world.found == [(AttemptId(1, 1), message)]  # the other launchers keep their own


def test_remote_hang_collects_local_stacks_and_continues(world: World) -> None:
    async def scene() -> None:
        world.start("wait", "wait")
        await world.settle(10)
        await world.settle(11)
        world.watch.save_stacks(AttemptId(1, 1), world.ranks, "rank 2 has been busy for 1.0 s")
        world.watch.save_stacks(AttemptId(1, 1), world.ranks, "once is enough")
        await world.look_until(lambda: world.watch.idle)

    asyncio.run(scene())
    assert world.dump.startswith("rank 2 has been busy for 1.0 s\n")
    assert "== rank 0" in world.dump
    assert "== rank 1" in world.dump
    assert world.dump.count('steps.py", line') == 4, "two calls of each"
    assert (world.verdicts, world.found) == ([], [])
    assert [rank.popen.poll() for rank in world.ranks] == [None, None]


def test_a_stopped_rank_in_a_collective_hangs_and_has_no_stacks(world: World) -> None:
    async def scene() -> tuple[int, str, Cause]:
        world.start("wait", "wait")
        await world.settle(10)
        await world.settle(11)
        os.kill(world.ranks[1].pid, signal.SIGSTOP)
        return await world.verdict(world_size=3)

    slot, message, _ = asyncio.run(scene())
    assert slot == 11
    assert message.startswith("rank 1 has shown no sign of life for ")
    assert "in average after step 30" in message
    assert message.endswith("; waiting: rank 0 for its gradients, and others")
    assert "== rank 1" in world.dump
    assert "stopped" in world.dump
    assert "(it wrote no stacks)" in world.dump


def test_mismatched_ranks_are_distinguished_and_not_killed(world: World) -> None:
    world.start("wait", "vote", "wait")
    slot, message, _ = asyncio.run(world.verdict())
    assert (slot, world.killed) == (11, [])
    assert "has waited for" in message
    assert "in vote after step 30" in message
    assert message.endswith("; waiting: ranks 0, 2 for its gradients: each waits for the other")


def test_rank_that_left_its_attempt_and_computes_hangs(world: World) -> None:
    async def scene() -> tuple[int, str, Cause]:
        world.start("wait", "sleep")
        # From the start, since it may be the first to fall asleep.
        world.absent = [(world.ranks[1], time.monotonic(), True)]
        return await world.verdict()

    slot, message, _ = asyncio.run(scene())
    assert (slot, world.killed) == (11, [11])
    assert message.startswith("rank 1 left its attempt and has been busy for ")
    assert message.endswith("; the others wait for it to form the world")
    assert "in asleep_in_the_loss" in world.dump


def test_remote_hang_is_not_blamed_on_local_waiting_ranks(world: World) -> None:
    async def scene() -> None:
        world.start("wait", "wait")
        await world.settle(10)
        await world.settle(11)
        since = world.activity_pages.read(10).since  # type: ignore[union-attr]
        await world.look_until(lambda: time.monotonic() > since + 2, world_size=3)

    asyncio.run(scene())
    assert world.verdicts == []


def test_a_straggler_is_no_hang(world: World) -> None:
    world.seconds = 0.3  # 4.5 medians are well above the least deadline

    async def scene() -> None:
        world.start("straggle")
        await world.look_until(lambda: (seen := world.activity_pages.read(10)) and seen.made > 8)

    asyncio.run(scene())
    assert world.verdicts == []


def test_rank_leaving_while_its_stacks_are_collected_is_spared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def leave_meanwhile(sources: Sequence[stack_dumps.Source]) -> list[stack_dumps.StackDump]:
        asked.extend(source.rank for source in sources)
        os.kill(world.ranks[1].pid, signal.SIGUSR1)
        async with asyncio.timeout(DEADLINE):
            while world.activity_pages.read(11).activity is not Activity.PARKED:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        return []

    monkeypatch.setattr(stack_dumps, "gather", leave_meanwhile)

    async def scene() -> None:
        world.start("wait", "sleep")
        await world.look_until(lambda: asked)
        await world.look_until(lambda: world.watch.idle)

    asyncio.run(scene())
    assert asked == [0, 1]
    assert world.verdicts == []


@pytest.mark.parametrize("greeted", [True, False])
def test_rank_entering_an_attempt_during_collection_is_spared(
    world: World, monkeypatch: pytest.MonkeyPatch, greeted: bool
) -> None:
    """The stacks of the rank were requested in its previous attempt."""

    async def come_meanwhile(_: Sequence[stack_dumps.Source]) -> list[stack_dumps.StackDump]:
        world.ranks[1].attempt_id, world.ranks[1].greeted = AttemptId(1, 2), greeted
        return []

    monkeypatch.setattr(stack_dumps, "gather", come_meanwhile)

    async def scene() -> None:
        world.start("wait", "sleep")
        await world.look_until(lambda: not world.watch.idle)
        assert world.watch._ending is not None
        await world.watch._ending

    asyncio.run(scene())
    assert "rank 1 has been busy for " in world.dump
    assert world.killed == ([] if greeted else [11])  # a rank that only has a place there still hangs


def test_launcher_pause_takes_no_time_from_stack_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "_request", lambda _: True)
    source = stack_dumps.Source(rank=0, leader=os.getpid(), pid=os.getpid(), signal=1, file=tmp_path / "stacks")

    async def scene() -> list[stack_dumps.StackDump]:
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, 0.5)
        loop.call_later(0.55, source.file.write_text, "Current thread")
        return await stack_dumps.gather([source])

    assert [dump.text for dump in asyncio.run(scene())] == ["Current thread"]


def test_boards_of_the_dead_go(tmp_path: Path) -> None:
    activity_pages = ActivityPages(tmp_path)
    assert activity_pages.read(10) is None
    (tmp_path / BOARD_DIR / "10").write_bytes(b"short")
    assert activity_pages.read(10) is None
    activity_pages.keep_only([10])
    assert (tmp_path / BOARD_DIR / "10").exists()
    activity_pages.keep_only([])
    assert list((tmp_path / BOARD_DIR).iterdir()) == []
