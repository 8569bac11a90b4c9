"""Rows of the drill matrix that no other test keeps on real nodes. `make drill` keeps them all."""

from __future__ import annotations

import pytest

from holdfast_testbed.cluster import Cluster
from holdfast_testbed.drill.faults import Stage
from holdfast_testbed.drill.install import DRILL_INTERVAL_STEPS, DRILL_JOB, apply_drill_job
from holdfast_testbed.drill.matrix import cases
from holdfast_testbed.drill.trial import run
from holdfast_testbed.drill.watch import Watcher

pytestmark = pytest.mark.e2e

HERE = ("sidecar-killed", "rank-stopped")


def test_a_fault_costs_no_more_than_the_matrix_says(cluster: Cluster, namespace: str) -> None:
    apply_drill_job(cluster, namespace)
    with Watcher(cluster, namespace, DRILL_JOB) as watcher:
        stage = Stage(cluster=cluster, watcher=watcher, say=print)
        for case in cases(DRILL_INTERVAL_STEPS):
            if case.name in HERE:
                trial = run(case, stage)
                assert trial.held(case), trial
