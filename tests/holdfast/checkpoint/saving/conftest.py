"""Fixtures of the tests in saving/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from delta_states import BLOCK, Tensors, fresh, save, touch
from lossy_states import State, moved, weights
from lossy_states import save as save_lossy

from holdfast.checkpoint.saving.incremental import Chain


@pytest.fixture
def lossy(tmp_path: Path) -> tuple[Path, list[State]]:
    """Step 1 is full. In steps 2 and 3 all weights changed a little, and some of them a lot."""
    chain, states = Chain(every=8, threshold=1e-3), [weights()]
    for step in (2, 3):
        drifted = {**states[-1], "weight": states[-1]["weight"] + np.float32(2e-4)}
        states.append(moved(drifted, 100 * step, 0.5))
    for step, state in enumerate(states, start=1):
        assert save_lossy(tmp_path, step, state, chain).committed
    return tmp_path, states


@pytest.fixture
def chained(tmp_path: Path) -> tuple[Path, Tensors]:
    """Steps 1 (full), 2 and 3. Step 2 changed `wide`. Step 3 changed `narrow`, and every 39th row of `wide`."""
    tensors, chain = fresh(), Chain(every=8)
    for step, (name, at) in enumerate([("wide", 0), ("wide", 5 * BLOCK), ("narrow", 7)], start=1):
        touch(tensors, name, at)
        touch(tensors, "wide", 39 * BLOCK)
        assert save(tmp_path, step, tensors, chain).committed
    return tmp_path, tensors
