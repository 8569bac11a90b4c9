"""Nodes of different clouds at the true address of the metadata service: each one's notice ends in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.faults import Drill, DrillJob
from holdfast_testbed.drill.promises import Promise
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


@pytest.mark.thorough
@pytest.mark.usefixtures("clouds")
def test_notice_of_any_cloud_is_an_interruption_without_loss(own_job: Callable[..., DrillJob]) -> None:
    """Two workers on one node may leave one after the other: the second cloud's node may have the first one's."""
    stage = own_job()
    for node, cloud in CLOUD_OF_NODE.items():
        leaving = sum(worker.node == f"node-{node}" for worker in stage.workers())
        outcome = notice(node, cloud).run(stage)
        assert outcome.lost_steps == 0
        assert {incident.cause for incident in outcome.incidents} == {"Interruption"}
        assert len(outcome.incidents) <= leaving
        stage.watcher.wait_for_world(3, steps=2, timeout=300)


def notice(node: int, cloud: str) -> Drill:
    """The cloud takes the node away, but leaves it there: its worker's replacement goes elsewhere."""
    return Drill(
        name=f"{cloud} notice",
        promise=Promise(fault=f"{cloud} notice", within_seconds=10, max_lost_steps=0, cause="Interruption"),
        inflict=lambda stage: stage.cluster.notice(node, cloud=cloud, seconds=300),
    )
