"""Fixtures of the tests in restore/."""

from __future__ import annotations

from pathlib import Path

import pytest
from forged_commits import (
    objects,
)

from holdfast import checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two complete checkpoints: steps 10 and 20."""
    folder = tmp_path / "tier"
    for step in (10, 20):
        checkpoint.save(folder, step=step, **objects(float(step)))
    return folder
