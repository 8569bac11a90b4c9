"""A tier is one class: the manager saves to any tier that it gets, and restores from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import UNLIMITED, Pace
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import Restored
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import Staged
from holdfast.checkpoint.saving.writer import commit
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.tiers.settings import TierSettings, announced
from holdfast.checkpoint.tiers.tier import TierWorld
from holdfast.core.attempt import AttemptId

FIRST = AttemptId(1, 1)


class ShelfTier:
    """A folder that is neither the job's folder nor one of the tiers of Holdfast."""

    name = "shelf"

    def __init__(self, *, in_background: bool) -> None:
        self.in_background = in_background
        self.resumed_from: CheckpointName | None = None
        self.open = False
        self._folder = Path()
        self._interval = 1

    def enter(self, world: TierWorld) -> None:
        self._folder, self._interval, self.open = world.settings.folder, world.settings.interval, True

    def due_at(self, step: int) -> bool:
        return step % self._interval == 0

    def pace(self) -> Pace:
        return UNLIMITED

    def save(
        self,
        staged: Staged,
        exchange: Exchange,
        context: FencingContext,
        *,
        check: Callable[[], None] = lambda: None,
        requested: bool = False,
    ) -> SaveResult:
        if not self.in_background:  # nothing is staged for this tier
            image = memoryview(bytearray(-(-staged.plan.nbytes // 4096) * 4096))
            staged = replace(staged, image=image)
            staged.copy()
        return commit(FolderStore(self._folder), staged, exchange, check=check)

    def restored(self, name: CheckpointName) -> None:
        self.resumed_from = name

    def stores(self, context: FencingContext) -> list[CheckpointStore]:
        return [FolderStore(self._folder)]

    def reported_as(self, url: str) -> str:
        return self.name if url == str(self._folder) else ""

    def close(self) -> None:
        self.open = False


def settings(root: Path) -> dict[str, dict[str, Any]]:
    me = Neighbour(node="n", pod="w", host="127.0.0.1", port=1)
    shelf = TierSettings(folder=root / "shelf", limit=None, interval=2, per_second=None, me=me, key=b"k")
    return {"shelf": shelf.to_json()}


def manager(root: Path, tier: ShelfTier, attempt: AttemptId = FIRST) -> CheckpointManager:
    made = CheckpointManager(
        root / "shared", keep_last=2, resume=Resume.ALWAYS, on_foreign=lambda _: None, tiers=[tier]
    )
    made.enter(Attempt(attempt_id=attempt, job_uid="job", publication="p", run_id="r"), SingleRank())
    said = settings(root)
    made.enter_tiers(said, [announced(said)], 0, lambda: None)
    return made


def snapshot(step: int, attempt_id: AttemptId = FIRST) -> Snapshot:
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name="w", dtype="U8", shape=(5,))],
        read=lambda piece: bytes([step]) * piece.nbytes,
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={},
        numerics={},
    )


def weights(found: Restored) -> bytes:
    assert found.loaded is not None
    return bytes(found.loaded.tensors["w"])


@pytest.mark.parametrize("in_background", [True, False])
def test_manager_saves_to_and_restores_from_an_unknown_tier(tmp_path: Path, in_background: bool) -> None:
    first = manager(tmp_path, ShelfTier(in_background=in_background))
    first.restore()
    first.claim(step=0, attempt_id=None)
    assert first.save(snapshot(1)).committed
    (tier,) = first.tiers
    assert [step for step in range(1, 5) if tier.due_at(step)] == [2, 4]
    told: list[SaveResult] = []
    if in_background:
        saving = first.begin_on(tier, snapshot(2), told.append)
        saving.settle(lambda: None)
        assert told == [saving.result]
        assert saving.result.committed
    else:
        assert first.save_on(tier, snapshot(2)).committed
    assert [str(name) for name in FolderStore(tmp_path / "shared").commits()] == ["step-1.g1.a1"]

    shelf = ShelfTier(in_background=in_background)
    second = manager(tmp_path, shelf, AttemptId(1, 2))
    assert second.newest() == CheckpointName(step=2, attempt_id=FIRST)
    found = second.restore()
    assert (found.step, weights(found), second.read_from(found)) == (2, b"\x02" * 5, ["shelf"])
    assert shelf.resumed_from == CheckpointName(step=2, attempt_id=FIRST)
    assert not second.is_durable(CheckpointName(step=2, attempt_id=FIRST)), "it is on the shelf only"


def test_no_rank_saves_on_a_tier_that_some_launcher_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = ShelfTier(in_background=True)
    made = manager(tmp_path, shelf)
    assert (made.tiers, shelf.open) == ((shelf,), True)
    said = settings(tmp_path)
    with caplog.at_level(logging.WARNING):
        made.enter_tiers(said, [announced(said), {}], 0, lambda: None)
    assert (made.tiers, shelf.open) == ((), False)
    assert "some launchers have no shelf tier" in caplog.text


def test_the_intervals_are_those_of_rank_0(tmp_path: Path) -> None:
    made, own = manager(tmp_path, ShelfTier(in_background=True)), settings(tmp_path)
    first = announced({"shelf": {**own["shelf"], "interval": 7}})
    made.enter_tiers(own, [first, announced(own)], 0, lambda: None)
    assert [step for step in range(1, 15) if made.tiers[0].due_at(step)] == [7, 14]
