"""Which pod each worker has."""

from __future__ import annotations

import pytest
from sim import Sim

UNREADABLE = [
    None,
    "",
    "[]",
    '{"version":',
    '{"version":2,"workers":[]}',
    '{"version":1,"workers":null,"countedBatch":"many","of":{"the":"future"}}',
    17,
]


@pytest.mark.parametrize("state", UNREADABLE)
def test_a_status_without_its_roster_adopts_the_existing_pods(trained: Sim, state: object) -> None:
    """As after a restored backup, or when another version wrote what cannot be read: nothing is doubled."""
    trained.body["status"]["operatorState"] = state
    trained.run(10)
    assert trained.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert trained.world_names() == trained.names()
    assert trained.status.incarnations == 3
    assert trained.status.membership.generation == 1
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
