"""What a sidecar takes in a real pod that trains, with all its sources on; `make bench-sidecar` measures the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.drill.faults import Stage

pytestmark = pytest.mark.e2e

MOST_MIB = 60


def test_a_sidecar_stays_within_its_memory_in_a_real_pod(running_job: Callable[..., Any]) -> None:
    stage: Stage = running_job().stage
    taken = {pod.name: pss_mib(stage.sidecar(pod).pid) for pod in stage.workers()}
    print(f"PSS of the sidecars, MiB: {taken}")
    assert len(taken) == 3
    assert max(taken.values()) <= MOST_MIB


def pss_mib(pid: int) -> float:
    """Its own memory and its share of what it has in common with others."""
    (line,) = (line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024
