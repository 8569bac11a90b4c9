"""One real cluster for the end-to-end tests of the whole line, with Holdfast installed by its chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.faults import DrillJob
from holdfast_testbed.drill.install import (
    DRILL_JOB,
    apply_drill_job,
    install_chart,
    remove_namespace,
    small_example,
)
from holdfast_testbed.drill.watcher import Watcher

NODES = 3
WORKERS = 3
JOB = "gpt"
ENDLESS_STEPS = 1_000_000
FAILED = pytest.StashKey[bool]()

RunningJob = Callable[..., DrillJob]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember which tests failed, for the fixtures that then leave nothing to the next one."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="package")
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
    remove_namespace(cluster, name)


@pytest.fixture(scope="module")
def stage(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[DrillJob]:
    """The drills' job of three in the namespace that the module names, for all its tests."""
    name = request.module.NAMESPACE
    cluster.prepare_namespace(name)
    apply_drill_job(cluster, name)
    with Watcher(cluster, name, DRILL_JOB) as watcher:
        yield DrillJob(cluster=cluster, watcher=watcher, say=print)
    print(cluster.kubectl("-n", name, "describe", "ftj", check=False))  # pytest shows it when a test has failed
    remove_namespace(cluster, name)


@pytest.fixture
def own_job(cluster: Cluster, namespace: str) -> Iterator[RunningJob]:
    """Apply the example in a namespace of the test's own and wait until all its workers train."""
    with ExitStack() as stack:

        def start(*, max_steps: int = ENDLESS_STEPS) -> DrillJob:
            return stack.enter_context(_job(cluster, namespace, max_steps))

        yield start


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """The job that trains, in the hands of one test."""

    stage: DrillJob
    known: Mapping[str, int]
    """What had been counted before, by cause."""

    @property
    def watcher(self) -> Watcher:
        return self.stage.watcher

    @property
    def counted(self) -> dict[str, int]:
        """What was counted in this test, by cause."""
        now = self.watcher.view.incidents_by_cause
        return {
            cause: count - self.known.get(cause, 0) for cause, count in now.items() if count != self.known.get(cause)
        }


@dataclass
class Trainees:
    """One job for many tests, one after the other; another one when a test failed, or wants what it cannot give."""

    cluster: Cluster
    begun: int = 0
    stage: DrillJob | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def take(self, *, spread: bool) -> Trainee:
        """All workers train; with `spread` each on a node of its own."""
        if self.stage is not None and not (_trains(self.stage) and (not spread or _is_spread(self.stage))):
            self.drop()
        if self.stage is None:
            self.begun += 1
            self.stage = self._begin(f"trainee-{self.begun}")
        return Trainee(stage=self.stage, known=dict(self.stage.watcher.view.incidents_by_cause))

    def _begin(self, namespace: str) -> DrillJob:
        self.cluster.prepare_namespace(namespace)
        self._stack.callback(remove_namespace, self.cluster, namespace)
        return self._stack.enter_context(_job(self.cluster, namespace, ENDLESS_STEPS))

    def story(self) -> str:
        return _story(self.cluster, self.stage.watcher.namespace) if self.stage else "no job trains"

    def drop(self) -> None:
        self.stage = None
        self._stack.close()


@pytest.fixture(scope="package")
def trainees(cluster: Cluster) -> Iterator[Trainees]:
    """What `running_job` hands out."""
    made = Trainees(cluster)
    try:
        yield made
    finally:
        made.drop()


@pytest.fixture
def running_job(trainees: Trainees, request: pytest.FixtureRequest) -> Iterator[Callable[..., Trainee]]:
    """The example, training with all its workers, as the tests before have left it if they all passed."""

    def take(*, spread: bool = False) -> Trainee:
        return trainees.take(spread=spread)

    yield take
    if request.node.stash.get(FAILED, False):
        print(trainees.story())
        trainees.drop()


def _trains(stage: DrillJob) -> bool:
    """Whether all workers come to train, whatever the test before did; a job that does not is none for a test."""
    try:
        stage.watcher.wait_for_world(WORKERS, steps=5, timeout=240)
    except TimeoutError:
        return False
    return True


def _is_spread(stage: DrillJob) -> bool:
    return len({pod.node for pod in stage.workers()}) == WORKERS


@contextmanager
def _job(cluster: Cluster, namespace: str, max_steps: int) -> Iterator[DrillJob]:
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(small_example(max_steps)))
    with Watcher(cluster, namespace, JOB) as watcher:
        watcher.wait_for_world(WORKERS, steps=5, timeout=300)
        yield DrillJob(cluster=cluster, watcher=watcher, say=print)


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
