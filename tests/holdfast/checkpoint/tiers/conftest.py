"""Fixtures of the tests in tiers/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from memory_nodes import Nodes

from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory import peer_client as peers
from holdfast.checkpoint.stores.memory import peer_server
from holdfast.checkpoint.stores.open import open_store
from holdfast.checkpoint.tiers.uploader import (
    Target,
)
from holdfast.core.attempt import AttemptId, Claim


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    """Nodes with a long limit for greetings, for busy machines."""
    made: list[Nodes] = []
    for module in (peers, peer_server):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 240.0)

    def make(names: str, **settings: Any) -> Nodes:
        made.append(Nodes(tmp_path, names, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def source(tmp_path: Path, commit: Callable[..., Any]) -> FolderStore:
    """Three checkpoints and a claim."""
    root = tmp_path / "shared"
    for step in (1, 2, 3):
        commit(root, step, {"w": bytes([step]) * 1000})
    write_claim(root, Claim(attempt_id=AttemptId(1, 1), job_uid="job-1", publication="p1", from_step=0))
    return FolderStore(root)


@pytest.fixture
def target() -> Target:
    return open_store(f"memory://{uuid4().hex}/job")
