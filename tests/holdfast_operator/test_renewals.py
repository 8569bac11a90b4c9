"""Of a node's Lease the operator's own clock says how long nobody renewed it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast_operator.renewals import Renewals
from holdfast_operator.seen import NodeView

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def silent_until_stale(skew: float, *, renews: float = 10.0, dies: float = 35.0, asked: float = 0.0) -> float | None:
    """So long after a kubelet's death its Lease is stale to who asks from a moment on; None: within 120 s it is not.

    Its clock is so far ahead.
    """
    renewals = Renewals()
    for seconds in range(int(dies) + 120):
        now = NOW + seconds * SECOND
        last = NOW + (min(seconds, dies) // renews) * renews * SECOND
        node = NodeView(name="n", lease_renewed=last + skew * SECOND)
        if seconds >= asked and renewals.timed(node, now).lease_stale(now):
            return seconds - dies
    return None


@pytest.mark.parametrize("skew", [0.0, -20.0, -60.0, -3600.0, 20.0, 60.0, 3600.0])
def test_a_lease_that_is_renewed_is_not_stale_whatever_its_time_says(skew: float) -> None:
    stale = silent_until_stale(skew, dies=600.0)
    assert stale is not None
    assert stale > 0


def test_a_dead_kubelets_lease_is_stale_as_soon_as_it_was_when_its_time_alone_was_asked() -> None:
    assert silent_until_stale(0.0) == silent_until_stale(0.0, asked=43.0) == 36.0, "its last renewal is 5 s older"


def test_a_look_that_comes_late_is_followed_by_as_long_a_wait_as_a_renewal_takes() -> None:
    assert silent_until_stale(0.0, asked=100.0) == 100 + 16 - 35


def test_a_time_that_is_ahead_delays_no_longer_than_the_lease_lasts() -> None:
    assert silent_until_stale(3600.0, asked=43.0) == 43 + 41 - 35


def test_what_was_seen_of_nodes_that_are_gone_is_forgotten() -> None:
    renewals, node = Renewals(), NodeView(name="n", lease_renewed=NOW)
    renewals.timed(node, NOW)
    renewals.keep({"n"})
    assert renewals.timed(node, NOW + SECOND).lease_unchanged_since == NOW
    renewals.keep(set())
    assert renewals.timed(node, NOW + SECOND).lease_unchanged_since == NOW + SECOND
    assert renewals.timed(replace(node, lease_renewed=None), NOW).lease_unchanged_since is None


def test_an_operator_whose_clock_is_ahead_takes_no_node_for_lost_that_lives(trained: Any) -> None:
    trained.clocks = dict.fromkeys(trained.nodes, timedelta(seconds=-90))
    trained.freeze("gpt-w1")
    trained.run(30)
    assert [worker.reason for worker in trained.status.workers if worker.reason] == []
    trained.run(60, until=lambda: any(worker.reason == "LauncherSilent" for worker in trained.status.workers))


def test_an_operator_whose_clock_is_ahead_sees_a_node_die(trained: Any) -> None:
    trained.clocks = dict.fromkeys(trained.nodes, timedelta(seconds=-90))
    trained.run(5)
    trained.kill_node(trained.node_of("gpt-w1"))
    trained.run(30, until=lambda: any(worker.reason == "NodeLost" for worker in trained.status.workers))
