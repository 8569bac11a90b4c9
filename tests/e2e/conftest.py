"""One real cluster for the end-to-end tests of the whole line, with Holdfast installed by its chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from holdfast_testbed.cluster import Cluster
from holdfast_testbed.drill.faults import Stage
from holdfast_testbed.drill.install import example_job, install_chart
from holdfast_testbed.drill.watch import Watcher

NODES = 3
JOB = "gpt"

RunningJob = Callable[..., Stage]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes with the chart installed; taken down whatever happens."""
    cluster = Cluster.up(name="e2e", nodes=NODES, replace=True)
    try:
        install_chart(cluster)
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A restricted namespace of the test's own, with the claims that the example mounts."""
    name = _namespace(request.node.name)
    cluster.prepare_namespace(name)
    yield name
    print(_story(cluster, name))  # pytest shows it when the test has failed
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def running_job(cluster: Cluster, namespace: str) -> Iterator[RunningJob]:
    """Apply the example in a namespace of the test's own and wait until all its workers train."""
    with ExitStack() as stack:

        def start(*, max_steps: int, workers: int = 3) -> Stage:
            return stack.enter_context(_job(cluster, namespace, max_steps, workers))

        yield start


@contextmanager
def _job(cluster: Cluster, namespace: str, max_steps: int, workers: int) -> Iterator[Stage]:
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=example_job(max_steps=str(max_steps)))
    with Watcher(cluster, namespace, JOB) as watcher:
        watcher.wait_for_world(workers, steps=5, timeout=180)
        yield Stage(cluster=cluster, watcher=watcher, say=print)


def _story(cluster: Cluster, namespace: str) -> str:
    """What a person would look at first: the job's own story, its pods, and the launchers' last words."""
    parts = [
        cluster.kubectl("-n", namespace, "describe", "ftj", check=False),
        cluster.kubectl("-n", namespace, "get", "pods", "-o", "wide", check=False),
        cluster.kubectl(
            "-n",
            namespace,
            "logs",
            "-l",
            "holdfast.dev/job-name",
            "-c",
            "trainer",
            "--prefix",
            "--tail=60",
            check=False,
        ),
    ]
    return "\n".join(parts)


def _namespace(test: str) -> str:
    words = "".join(letter if letter.isalnum() else "-" for letter in test.lower())
    return words.strip("-")[:50].strip("-")
