"""Jobs on a simulated cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bodies import job_body
from launchers import CONTRACT
from sim import Make, Sim

from holdfast_operator.decision.snapshot import Observed


@pytest.fixture
def sim() -> Sim:
    """Three workers on four nodes, nothing done yet."""
    return Sim()


@pytest.fixture
def make_sim() -> Make:
    """``make_sim(replicas=2, minimum=1, nodes=3, **spec)``."""

    def make(*, nodes: int = 4, **job: Any) -> Sim:
        return Sim(job_body(**job), nodes=nodes)

    return make


@pytest.fixture
def trained(sim: Sim) -> Sim:
    """The same, training with three."""

    def trains() -> bool:
        return sim.status.summary == "Training"

    sim.run(60, until=trains)
    return sim


@pytest.fixture
def observed(sim: Sim) -> Observed:
    """A new job on a quiet cluster."""
    return replace(sim.observe())


@pytest.fixture
def final_exit() -> str:
    """What a launcher that will not try again leaves in the termination log."""
    return (CONTRACT / "termination.json").read_text()
