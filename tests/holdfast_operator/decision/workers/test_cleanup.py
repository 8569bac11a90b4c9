"""Pods that have ended are kept for their logs, but not all."""

from __future__ import annotations

from sim import Sim


def test_pods_of_the_past_are_kept_for_their_logs_but_not_all(trained: Sim) -> None:
    for _ in range(6):
        trained.end(trained.running()[0], 137)
        trained.tick()
        trained.run(60, until=lambda: len(trained.world_names()) == 3)
    ended = [name for name in trained.names() if name not in trained.running()]
    assert len(ended) == 3
    assert len(trained.status.workers) <= 3 + 3
