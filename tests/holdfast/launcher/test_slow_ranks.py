"""A rank for which the others wait is named with its worker and node, and nothing is restarted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.launcher.host.run_dir import TIMELINE_FILE

Wait = Callable[..., Any]


@pytest.mark.thorough
def test_a_slow_rank_of_another_launcher_is_named_until_it_recovers(cluster: Any, wait_for: Wait) -> None:
    a, b, c = cluster.start("a", "b", "c", script="slow.py")
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: a.status["slowRanks"], cluster.tail)
    (slow,) = a.status["slowRanks"]
    assert (slow["rank"], slow["pod"], slow["node"], slow["activity"]) == (1, "b", "node-b", "compute")
    assert slow["seconds"] > 1.5 * slow["medianSeconds"]
    wait_for(lambda: "rank 1 of b on node node-b is slow" in a.log.read_text(), cluster.tail)
    assert b.status["slowRanks"] == c.status["slowRanks"] == [], "one launcher reports for all"
    own = [pod.status["ranks"][0]["computeSeconds"] for pod in (a, b, c)]
    assert own[1] > 1.5 * max(own[0], own[2])

    (cluster.shared / "recovers").touch()
    wait_for(lambda: not a.status["slowRanks"], cluster.tail)
    lines = map(json.loads, (a.run_dir / TIMELINE_FILE).read_text().splitlines())
    assert [[one["rank"] for one in line["ranks"]] for line in lines if line["kind"] == "slow"] == [[1], []]
    assert not any(pod.status["incidents"] for pod in (a, b, c))
    assert a.status["world"]["attempt"] == 1
    assert a.status["accounting"]["lostSteps"] == 0
