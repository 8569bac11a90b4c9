"""Fixtures of the tests in state/."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, for DistributedDataParallel."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()
