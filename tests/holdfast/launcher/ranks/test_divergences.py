"""Divergences of replicas in the launcher's status."""

from __future__ import annotations

from typing import Any

from holdfast.launcher.ranks.progress import Progress


def test_divergences_of_local_ranks_are_counted_and_the_last_one_is_kept() -> None:
    progress = Progress()
    assert (progress.divergences, progress.last_divergence) == (0, None)
    body: dict[str, Any] = {"step": 4, "ranks": [1], "majority": True, "tensor": "model/weight"}
    progress.count_divergence(1, body, 7.0)
    progress.count_divergence(2, {**body, "step": 8, "majority": False}, 9.0)
    assert (progress.divergences, progress.repaired_divergences) == (2, 1)
    assert progress.last_divergence == {
        "rank": 2,
        "step": 8,
        "tensor": "model/weight",
        "repaired": False,
        "time": 9.0,
    }
