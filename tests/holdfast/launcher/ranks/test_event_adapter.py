"""What the launcher concludes from the messages of its ranks, in worlds of two workers with two ranks each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from heard_ranks import HeardRanks

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership.document import Member
from holdfast.launcher.membership.events import RankFailed
from holdfast.launcher.membership.messages import World
from holdfast.launcher.ranks.environ import RankPlace
from holdfast.launcher.ranks.rank_process import Rank

WORLD = World(
    attempt_id=AttemptId(1, 1),
    publication="p1",
    members=(
        Member(index=0, pod_uid="uid-w0", pod="gpt-w0", node="node-1"),
        Member(index=1, pod_uid="uid-w1", pod="gpt-w1", node="node-2"),
    ),
    coordinator="uid-w0",
)


@pytest.fixture
def ranks(tmp_path: Path) -> HeardRanks:
    """The ranks 0 and 1, on the first worker."""
    here = [
        Rank(
            slot=local,
            local_rank=local,
            started_at=0.0,
            place=RankPlace(local_rank=local, local_world_size=2, group_rank=0, group_world_size=2),
            process=Mock(pid=30 + local, alive=True),
        )
        for local in (0, 1)
    ]
    return HeardRanks(WORLD, here, tmp_path)


def slow(*ranks: int) -> dict[str, Any]:
    told = [{"rank": rank, "seconds": 0.4, "medianSeconds": 0.1, "activity": "data"} for rank in ranks]
    return {"type": "slowRanks", "ranks": told}


def test_slow_ranks_have_the_worker_and_node_of_their_place(ranks: HeardRanks) -> None:
    ranks.hear(slow(1, 2, 3))
    named = [(one["rank"], one["pod"], one["node"]) for one in ranks.progress.slow_ranks]
    assert named == [(1, "gpt-w0", "node-1"), (2, "gpt-w1", "node-2"), (3, "gpt-w1", "node-2")]
    assert ranks.progress.slow_ranks[0] == {
        "rank": 1,
        "pod": "gpt-w0",
        "node": "node-1",
        "seconds": 0.4,
        "medianSeconds": 0.1,
        "activity": "data",
    }
    assert ranks.events == [], "nothing is restarted"


def test_slow_rank_is_logged_once_until_no_rank_is_slow(ranks: HeardRanks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for named in ((2,), (2, 3), (2, 3), ()):
        ranks.hear(slow(*named))
    lines = [line.removesuffix(" s, mostly for data") for line in caplog.messages]
    own = "is slow: it uses 0.4 s per step for itself, the median rank 0.1"
    assert lines == [
        f"rank 2 of gpt-w1 on node node-2 {own}",
        f"rank 3 of gpt-w1 on node node-2 {own}",
        "no rank is slow any more",
    ]
    assert ranks.progress.slow_ranks == []


def test_next_world_begins_without_slow_ranks(ranks: HeardRanks) -> None:
    ranks.hear(slow(2))
    ranks.enter(replace(WORLD, attempt_id=AttemptId(1, 2)))
    assert ranks.progress.slow_ranks == []


def test_messages_that_all_ranks_send_are_counted_for_one_of_them(ranks: HeardRanks) -> None:
    for slot in (0, 1):
        ranks.hear({"type": "skipped", "step": 4, "lowered": True}, slot=slot)
        ranks.hear({"type": "badSamples", "step": 4, "number": 2, "samples": []}, slot=slot)
    assert ranks.progress.non_finite == {"skippedSteps": 1, "learningRateChanges": 1}
    assert ranks.progress.bad_samples == 2


def test_rank_that_is_out_of_memory_is_counted_wherever_it_is(ranks: HeardRanks) -> None:
    ranks.hear({"type": "outOfMemory", "step": 4, "rank": 1, "microBatch": 0, "message": "full"}, slot=1)
    assert ranks.progress.out_of_memory == 1
    (event,) = ranks.events
    assert isinstance(event, RankFailed)
    assert (event.failure.reason, event.failure.rank) == ("OutOfMemoryRetried", 1)
    assert (event.failure.pod, event.failure.node, event.failure.message) == ("gpt-w0", "node-1", "full")


def test_message_without_its_fields_is_logged_and_changes_nothing(
    ranks: HeardRanks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.hear({"type": "slowRanks", "ranks": [{"rank": 2}]})
    assert "slowRanks from the process of rank 0 cannot be read" in caplog.text
    assert ranks.progress.slow_ranks == []
