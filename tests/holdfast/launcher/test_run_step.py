"""A model that communicates in its forward pass, under a real launcher."""

from __future__ import annotations

from typing import Any


def test_rank_killed_in_a_collective_costs_a_retry_and_no_step(cluster: Any) -> None:
    """The collective is in the forward pass."""
    cluster.settings["processesPerWorker"] = 2
    (a,) = cluster.start("a", script="communicates.py")
    cluster.publish(1, "a")
    assert a.wait() == 0, cluster.tail()
    (incident,) = a.status["incidents"]
    assert (incident["reason"], incident["lostSteps"], incident["restoredFrom"]) == ("RankKilled", 0, "survivor")
    (broken,) = cluster.shared.glob("broken-*")
    told = broken.with_name(broken.name.replace("broken", "results")).read_text().split("\n")
    assert "Connection closed by peer" in broken.read_text() or "Connection reset by peer" in broken.read_text()
    assert [line for line in told if line.startswith("Retried")] == ["Retried 20"], "the same process went on"
    committed = [line for line in told if line.startswith("Committed")]
    assert committed == [f"Committed {step}" for step in range(1, 41)]
