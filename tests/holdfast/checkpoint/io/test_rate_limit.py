"""Writers are limited to a bandwidth, and the limit is lifted when a request needs the checkpoint soon."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.direct_writer import ImageWriter
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.saving.background import Saving
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import PeerLostError

MIB = 1 << 20
# So slow that a test that waits for the limit never ends.
STANDSTILL = 0.001


class Clock:
    """A clock that advances by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@given(sizes=some.lists(some.integers(1, 1000), min_size=1, max_size=20), rate=some.floats(100, 1e9))
def test_what_has_passed_is_the_rates_but_for_one_piece(sizes: list[int], rate: float) -> None:
    clock, passed = Clock(), 0
    pace = Pace(rate, now=lambda: clock.now, sleep=clock.sleep)
    for size in sizes:
        pace.take(size)
        assert clock.now == pytest.approx(passed / rate)
        passed += size


def test_lifting_the_limit_releases_waiting_and_later_callers() -> None:
    pace = Pace(STANDSTILL)
    pace.take(1)
    waiter = threading.Thread(target=pace.take, args=(1,), daemon=True)
    waiter.start()
    pace.lift()
    waiter.join(30)
    assert not waiter.is_alive()
    pace.take(10**9)


def test_a_wait_may_be_given_up() -> None:
    def over() -> None:
        raise PeerLostError("the attempt is over")

    pace = Pace(STANDSTILL)
    pace.take(1)
    with pytest.raises(PeerLostError):
        pace.take(1, over)


def test_throttled_file_is_complete_once_the_limit_is_lifted(tmp_path: Path) -> None:
    image = memoryview(bytearray(range(256)) * (20 * MIB // 256))
    pace, begun = Pace(STANDSTILL), threading.Event()
    writing = threading.Thread(
        target=ImageWriter(path=tmp_path / "f", image=image, nbytes=image.nbytes, pace=pace, check=begun.set).run
    )
    writing.start()
    assert begun.wait(30)
    assert (tmp_path / "f").stat().st_size < image.nbytes
    pace.lift()
    writing.join(30)
    assert (tmp_path / "f").read_bytes() == image


def test_a_save_is_held_back_until_somebody_is_in_a_hurry(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    saving = engine.begin(snapshot(1))
    assert stands_still(saving)
    engine.lift_rate_limit()
    saving.settle(lambda: None)
    assert saving.result.committed
    assert [name.step for name in FolderStore(tmp_path).commits()] == [1]


def test_an_urgent_save_is_not_held_back_and_the_next_one_is(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    urgent = engine.begin(snapshot(1), urgent=True)
    urgent.settle(lambda: None)
    assert urgent.result.committed
    held = engine.begin(snapshot(2))
    assert stands_still(held)
    engine.lift_rate_limit()
    held.settle(lambda: None)
    assert held.result.committed


def stands_still(saving: Saving) -> bool:
    """Return whether the writer is still blocked after a time that suffices without a limit."""
    time.sleep(1)
    return not saving.ended


def snapshot(step: int) -> Snapshot:
    data = memoryview(bytearray(20 * MIB))
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=AttemptId(0, 0)),
        specs=[TensorSpec(name="w", dtype="U8", shape=(data.nbytes,))],
        read=lambda piece: data[piece.start[0] : piece.start[0] + piece.shape[0]],
        state={"objects": {}},
        data=None,
        per_rank={},
        numerics={},
    )


def engine_of(root: Path) -> CheckpointManager:
    return CheckpointManager(root, keep_last=3, resume=Resume.ALWAYS, on_foreign=lambda _: None, bytes_per_second=1)
