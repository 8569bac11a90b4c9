"""The inbox of alerts."""

from __future__ import annotations

import pytest
from alertmanager import Box


@pytest.fixture
def box() -> Box:
    return Box()
