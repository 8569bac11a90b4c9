"""A world that is training."""

from __future__ import annotations

import pytest
from hang_scene import Scene


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.train()
    return made
