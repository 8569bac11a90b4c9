"""Writes and reads of ranks are counted once, although each rank reports them."""

from __future__ import annotations

from typing import Any

from holdfast.core.attempt import AttemptId
from holdfast.launcher.accounting.checkpoint_counters import CheckpointCounters, Failing

ONE, TWO = AttemptId(1, 1), AttemptId(1, 2)
NOW = 1e9


def commit(step: int, tier: str = "shared", **more: Any) -> dict[str, Any]:
    return {"step": step, "tier": tier, "seconds": 2.0, "bytes": 100, **more}


def test_a_commit_of_two_ranks_is_one_with_the_bytes_of_both() -> None:
    tallies = CheckpointCounters()
    for step in (10, 20):
        for _ in range(2):
            tallies.committed(ONE, commit(step))
    assert tallies.to_json()["checkpointWrites"] == {"shared": {"commits": 2, "bytes": 400, "seconds": 4.0}}


def test_memory_copies_on_another_node_count_as_peers() -> None:
    tallies = CheckpointCounters()
    tallies.committed(ONE, commit(1, "memory", copying=0.5))
    assert tallies.to_json()["checkpointWrites"] == {
        "memory": {"commits": 1, "bytes": 100, "seconds": 1.5},
        "peer": {"commits": 1, "bytes": 100, "seconds": 0.5},
    }


def test_failure_on_all_ranks_counts_once_under_the_agreed_cause() -> None:
    tallies = CheckpointCounters()
    for step, tier, cause in ((10, "shared", "Full"), (20, "shared", "Full"), (20, "peer", "Network")):
        told = commit(step, tier, cause=cause, message="")
        assert [tallies.failed(ONE, told, NOW) for _ in range(2)] == [cause, ""]
    assert tallies.to_json()["checkpointFailures"] == {"shared": 2, "peer": 1}
    assert tallies.to_json()["checkpointFailureCauses"] == {"shared": {"Full": 2}, "peer": {"Network": 1}}


def test_tier_fails_until_its_next_durable_checkpoint() -> None:
    """The failure starts with the first failed checkpoint."""
    tallies = CheckpointCounters()
    for step, cause in ((10, "Full"), (11, "Full"), (12, "ReadOnly")):
        for _ in range(2):
            tallies.failed(ONE, commit(step, cause=cause, message=f"step {step}"), NOW + step)
        message = "step 12" if cause == "ReadOnly" else "step 10"
        expected = Failing(since=NOW + 10, commits=step - 9, cause=cause, message=message)
        assert tallies.failing == {"shared": expected}
    tallies.committed(ONE, commit(12, "memory"))
    assert "shared" in tallies.failing
    tallies.committed(ONE, commit(13))
    assert tallies.failing == {}


def test_copy_on_another_node_ends_the_failure_of_the_peers_tier() -> None:
    tallies = CheckpointCounters()
    tallies.failed(ONE, commit(10, "peer", cause="Network", message="refused"), NOW)
    tallies.committed(ONE, commit(11, "memory"))
    assert set(tallies.failing) == {"peer"}
    tallies.committed(ONE, commit(12, "memory", copying=0.5))
    assert tallies.failing == {}


def test_a_job_without_a_folder_has_no_tier_that_fails() -> None:
    tallies = CheckpointCounters()
    tallies.failed(ONE, commit(10, cause="NoFolder", message="there is none"), NOW)
    assert (tallies.failures["shared"].total(), tallies.failing) == (1, {})


def test_restore_counts_once_per_attempt_by_its_tier() -> None:
    tallies = CheckpointCounters()
    for attempt_id, told in (
        (ONE, {"source": "none"}),
        (TWO, {"source": "memory"}),
        (AttemptId(2, 1), {"source": "checkpoint", "tiers": ["shared", "object"]}),
    ):
        for _ in range(2):
            tallies.restored(attempt_id, told)
    assert tallies.to_json()["restores"] == {"none": 1, "survivor": 1, "shared": 1, "object": 1}


def test_corrupt_checkpoint_counts_once_per_restore_skipping_it() -> None:
    tallies = CheckpointCounters()
    bad = {"source": "checkpoint", "tiers": ["shared"], "quarantined": [{"path": "a"}], "lost": [{"path": "a"}]}
    for attempt_id in (ONE, TWO):
        tallies.restored(attempt_id, bad)
        tallies.restored(attempt_id, {**bad, "lost": [{"path": "b"}]})
    assert tallies.to_json()["fallbacks"] == 4
