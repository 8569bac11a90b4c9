"""Nodes of different clouds at the true address of the metadata service: each one's notice ends in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.faults import Drill, DrillJob
from holdfast_testbed.drill.promises import Promise, losses_and_causes
from holdfast_testbed.fakes.metadata import AWS, AZURE, GCP

pytestmark = pytest.mark.e2e

CLOUD_OF_NODE = {2: GCP, 3: AZURE}


@pytest.fixture
def clouds(cluster: Cluster) -> Iterator[None]:
    """Before the job starts: a sidecar asks a cloud that is not there but once a minute."""
    for node, cloud in CLOUD_OF_NODE.items():
        cluster.clear_notice(node, cloud=cloud)
    yield
    for node in CLOUD_OF_NODE:
        cluster.clear_notice(node, cloud=AWS)


@pytest.mark.usefixtures("clouds")
def test_a_notice_of_any_cloud_costs_no_step_and_counts_as_interruption(own_job: Callable[..., DrillJob]) -> None:
    stage = own_job()
    for node, cloud in CLOUD_OF_NODE.items():
        drill = notice(node, cloud)
        assert losses_and_causes(drill.promise, drill.run(stage)) == ()
        stage.watcher.wait_for_world(3, steps=2, timeout=300)


def notice(node: int, cloud: str) -> Drill:
    """The cloud takes the node away, but leaves it there: its worker's replacement goes elsewhere."""
    return Drill(
        name=f"{cloud} notice",
        promise=Promise(fault=f"{cloud} notice", within_seconds=10, max_lost_steps=0, cause="Interruption"),
        inflict=lambda stage: stage.cluster.notice(node, cloud=cloud, seconds=300),
    )
