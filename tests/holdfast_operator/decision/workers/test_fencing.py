"""A pod whose object is gone has ended only when its node's kubelet was there to end it.

Whatever happens to nodes and pods, the simulator asserts in each tick that nobody is proved gone whose process runs.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from sim import Make, Sim

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Phase, Progress, Worker
from holdfast_operator.api.times import parse_time
from holdfast_operator.cluster.trimming import slim
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.decision.workers import fencing, observed_workers
from holdfast_operator.views import NodeView, Renewals, Report, World, parse_node, read_renewal

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
GONE = Worker(
    incarnation=0,
    batch=0,
    phase=Phase.LOST,
    pod_uid="u",
    node="n",
    boot_id="b1",
    grace_seconds=30,
    since=NOW,
    absent_since=NOW,
)


def seconds(number: float) -> datetime:
    return NOW + timedelta(seconds=number)


def row(*, since: float = 0, first: float = 10, last: float = 75, skew: float = 0) -> Renewals:
    """The Lease is renewed without a gap; the node's clock is ahead by ``skew``."""
    return Renewals(
        value=seconds(last + skew),
        at=seconds(last),
        read_at=seconds(last),
        since=seconds(since),
        first=seconds(first + skew),
        first_at=seconds(first),
    )


NODE = NodeView(name="n", boot_id="b1", renewals=row())
LATE = row(since=600, first=600, last=725)
BEATS = replace(NODE, renewals=LATE, heartbeat=seconds(610))


def proved(
    observed: Observed, node: NodeView, *, at: float, pod: Any = None, reports: tuple[Report, ...] = ()
) -> bool:
    pods = () if pod is None else (pod,)
    draft = PlanDraft(seen=observed, now=seconds(at), status=observed.status)
    worker = replace(GONE, left_in_time=fencing.left_in_time(draft, GONE, pod, NOW))
    status = replace(observed.status, workers=(worker,), incarnations=1)
    seen = replace(observed, nodes=(node,), status=status, pods=pods, reports=reports)
    return fencing.proved_gone(fencing.apply(PlanDraft(seen=seen, now=seconds(at), status=status))) == {"u"}


@pytest.mark.parametrize(
    ("node", "ended"),
    [
        (NODE, True),
        (replace(NODE, renewals=None), False),
        (replace(NODE, ready=False), False),
        (replace(NODE, renewals=row(last=65)), False),  # no renewal since its time was over
        (replace(NODE, renewals=row(skew=-3600)), True),
        (replace(NODE, renewals=replace(row(), since=None, first=None, first_at=None)), False),
        (replace(NODE, renewals=row(since=600, first=600, last=610)), False),  # the first renewals after a gap
        (BEATS, True),
        (replace(BEATS, heartbeat=None), False),
        (replace(BEATS, heartbeat=seconds(599)), False),
        (replace(BEATS, renewals=row(since=600, first=600, last=715)), False),
    ],
)
def test_only_a_connected_kubelet_proves_an_end(
    observed: Observed, gone_pod: Any, node: NodeView, ended: bool
) -> None:
    """The kubelet must be connected all the time."""
    assert proved(observed, node, at=726, pod=gone_pod) is ended


def test_pod_that_outlived_its_deletion_is_not_proved_gone(observed: Observed, gone_pod: Any) -> None:
    """Its kubelet was connected and did not end it."""
    stuck = replace(gone_pod, deleted_at=seconds(-120))
    assert not proved(observed, NODE, at=76, pod=stuck), "its runtime does not end containers"
    late = replace(NODE, renewals=row(last=275), heartbeat=seconds(200))
    assert proved(observed, late, at=276, pod=stuck), "a kubelet whose runtime hangs is not ready for so long"


def test_what_is_not_known_of_a_pod_counts_as_the_worst(observed: Observed) -> None:
    assert not proved(observed, NODE, at=76)


@pytest.mark.parametrize(
    ("phase", "since", "progress", "in_time"),
    [
        (Phase.WANTED, -3600, -30, True),
        (Phase.WANTED, -3600, -31, False),
        (Phase.WANTED, -3600, None, False),
        (Phase.LEAVING, -30, -3600, True),
        (Phase.LEAVING, -31, -1, False),
        (Phase.LOST, -1, -1, False),
    ],
)
def test_new_operator_takes_the_deadline_from_the_status(
    observed: Observed, phase: Phase, since: float, progress: float | None, in_time: bool
) -> None:
    """The pod was gone before the operator started."""
    worker = replace(GONE, phase=phase, since=seconds(since), absent_since=None)
    told = None if progress is None else Progress(step=1, time=seconds(progress))
    status = replace(observed.status, workers=(worker,), incarnations=1, progress=told)
    (found,) = observed_workers.apply(
        PlanDraft(seen=replace(observed, pods=(), reports=()), now=NOW, status=status)
    ).status.workers
    assert (found.absent_since, found.left_in_time) == (NOW, in_time)
    assert Worker.from_json(found.to_json()) == found


def test_report_of_the_pod_or_a_peer_contradicts_a_proof(observed: Observed, gone_pod: Any, reported: Report) -> None:
    own = replace(reported, pod_uid="u", world=None)
    world = World(attempt_id=reported.world.attempt_id, publication="p", members=("u", "v"), coordinator="v")  # type: ignore[union-attr]
    peer = replace(reported, pod_uid="v", world=world)
    for report in (replace(own, received_at=seconds(75)), replace(peer, received_at=seconds(75))):
        assert not proved(observed, NODE, at=76, pod=gone_pod, reports=(report,))
    rebooted = replace(NODE, boot_id="b2")
    assert not proved(observed, rebooted, at=76, reports=(replace(own, received_at=seconds(75)),))
    assert proved(observed, rebooted, at=76, reports=(replace(own, received_at=seconds(60)),))


@pytest.fixture
def gone_pod(trained: Sim) -> Any:
    (pod, *_) = trained.observe().pods
    return replace(pod, uid="u", absent=True, deleted_at=None)


@pytest.fixture
def reported(trained: Sim) -> Report:
    report: Report = trained.observe().reports[0]
    return report


# Rows of renewals


def test_renewals_must_have_no_gap() -> None:
    """A node that is not Ready, or reads that stop, end the row too."""

    def after(*reads: tuple[float, float, bool]) -> tuple[float | None, float | None]:
        """Reads of (second, age of the Lease at second 0, ready): since when the row goes on, and its first."""
        found = None
        for at, value, ready in reads:
            found = read_renewal(found, seconds(value), ready=ready, now=seconds(at))
        assert found is not None
        return tuple(None if t is None else (t - NOW).total_seconds() for t in (found.since, found.first_at))

    assert after((0, 1, True)) == (0, None), "whether it was renewed lately is not known yet"
    assert after((0, 1, True), (5, 1, True), (10, 2, True)) == (0, 10)
    assert after((0, 1, True), (10, 2, True), (30, 2, True), (52, 3, True)) == (52, 52), "a gap of 42 s"
    assert after((0, 1, True), (10, 2, True), (20, 3, False)) == (None, None)
    assert after((0, 1, False), (10, 2, False), (20, 3, True)) == (20, 20), "the first renewal that is seen"
    assert after((0, 1, True), (10, 2, True), (60, 3, True)) == (60, None), "nobody read in between"


def test_what_is_kept_of_a_node_tells_its_heartbeat(trained: Sim) -> None:
    assert parse_node(slim(trained.nodes["node-1"])).heartbeat is not None


# On simulated nodes


def seconds_until_proved_gone(sim: Sim, name: str, *, skew: int = 0) -> float:
    """Its object vanishes; the clock of its node is ahead by so many seconds, and its kubelet renews every ten."""
    node, uid = sim.node_of(name), sim.uid(name)
    sim.force_gone(name)
    began, renewed = sim.now, sim.now
    for _ in range(200):
        sim.tick()
        if sim.now - renewed >= timedelta(seconds=10):
            renewed = sim.now
        sim.leases[node] = renewed + timedelta(seconds=skew)
        if is_proved_gone(sim, uid):
            return float((sim.now - began).total_seconds())
    raise AssertionError("never proved gone")


def is_proved_gone(sim: Sim, uid: str) -> bool:
    return uid not in {w.pod_uid for w in sim.status.in_phase(Phase.WANTED, Phase.LEAVING, Phase.LOST)}


@pytest.mark.parametrize("skew", [0, -15, 90, 3600])
def test_no_nodes_clock_proves_a_worker_gone_early_or_late(trained: Sim, skew: int) -> None:
    assert 60 < seconds_until_proved_gone(trained, "gpt-w1", skew=skew) <= 85


def test_worker_is_proved_gone_after_a_partition(make_sim: Make) -> None:
    """The kubelet must have ended the pod."""
    sim = make_sim(replicas=2, minimum=1, nodes=4)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    node, uid = sim.node_of("gpt-w1"), sim.uid("gpt-w1")
    sim.kill_node(node)
    sim.run(50)
    sim.node_unready(node)
    sim.lingers = timedelta(seconds=30)
    sim.force_gone("gpt-w1")
    sim.run(300)
    assert sim.process_runs(uid), "its node is cut off, and it trains on"
    sim.heal_node(node, rebooted=False)
    sim.run(30)
    assert sim.process_runs(uid), "the kubelet renews its Lease, and learns only now what was deleted"
    sim.run(600, step=5.0, until=lambda: is_proved_gone(sim, uid))


def test_hanging_container_runtime_proves_nothing(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=4)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    node, uid = sim.node_of("gpt-w1"), sim.uid("gpt-w1")
    sim.hang_runtime(node)
    sim.delete(uid)
    sim.run(90)
    sim.force_gone("gpt-w1")  # as is advised for pods that stick in Terminating
    sim.run(900, step=5.0)
    assert sim.process_runs(uid)
    sim.heal_node(node, rebooted=True)
    sim.run(10)
    assert is_proved_gone(sim, uid), "a boot ends everything"


LABELS = (
    (c.LABEL_APP_MANAGED_BY,),
    (c.LABEL_APP_COMPONENT,),
    (c.LABEL_JOB,),
    (c.LABEL_APP_MANAGED_BY, c.LABEL_JOB, c.LABEL_INCARNATION, c.LABEL_INDEX),
    (),
)


@pytest.mark.parametrize("labels", LABELS)
def test_a_relabelled_pod_trains_on_and_gets_its_labels_back(trained: Sim, labels: tuple[str, ...]) -> None:
    names = trained.world_names()
    before = {name: dict(trained.pods[trained.uid(name)]["metadata"]) for name in names}
    for name in names:
        trained.relabel(name, *labels)
    trained.run(120)
    assert trained.world_names() == trained.running() == names
    assert trained.status.membership.generation == 1
    assert trained.counted == []
    assert {name: trained.pods[trained.uid(name)]["metadata"] for name in names} == before
    assert [reason for reason, _ in trained.events if reason == "PodRelabelled"] == ["PodRelabelled"]


FAULTS = ("force", "cut", "heal", "reboot", "hang", "delete", "relabel", "restart", "unready")


@settings(
    max_examples=8,
    deadline=None,
    phases=(Part.explicit, Part.reuse, Part.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 2), st.integers(1, 40)), max_size=5),
    lingers=st.sampled_from((0, 5, 30)),
)
@example(faults=[("unready", 1, 20), ("force", 1, 40), ("heal", 1, 40)], lingers=30)
@example(faults=[("hang", 1, 1), ("delete", 1, 40), ("force", 1, 60)], lingers=0)
def test_running_worker_is_never_proved_gone(
    make_sim: Make, faults: list[tuple[str, int, int]], lingers: int
) -> None:
    """Random faults happen to nodes and pods."""
    sim = make_sim(nodes=5)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    sim.lingers = timedelta(seconds=lingers)
    for fault, pick, pause in faults:
        befall(sim, fault, pick)
        for _ in range(pause):
            sim.tick(2.0)
            assert not freshly_reporting(sim) & set(sim.status.membership.gone)
    sim.run(120, step=5.0)


def freshly_reporting(sim: Sim) -> set[str]:
    alive = {uid for uid in sim.heard if sim.process_runs(uid)}
    return {uid for uid in alive if sim.now - sim.heard[uid][0] <= c.REPORTS_NOW}


def _may_be_forced(sim: Sim, node: str, name: str) -> bool:
    """A runtime that began to hang a moment ago is a known limit, unless the pod is seen to outlive its deletion."""
    if node not in sim.hung or sim.now - sim.hung[node] > timedelta(minutes=4):
        return True
    deleted = parse_time(sim.pods[sim.uid(name)]["metadata"].get("deletionTimestamp"))
    return deleted is not None and sim.now - deleted > c.GONE_MARGIN


def befall(sim: Sim, fault: str, pick: int) -> None:
    """One fault on one of the nodes, or on the pod there."""
    name = f"node-{pick + 1}"
    pods = [body["metadata"]["name"] for body in sim.pods.values() if body["spec"].get("nodeName") == name]
    match fault:
        case "force" if pods and _may_be_forced(sim, name, pods[0]):
            sim.force_gone(pods[0])
        case "cut":
            sim.kill_node(name)
        case "unready":
            sim.kill_node(name)
            sim.node_unready(name)
        case "heal":
            sim.heal_node(name, rebooted=False)
        case "reboot":
            sim.heal_node(name, rebooted=True)
        case "hang" if not any(sim.graves[uid]["spec"]["nodeName"] == name for uid in sim.orphans):
            sim.hang_runtime(name)
        case "delete" if pods:
            sim.delete(sim.uid(pods[0]))
        case "relabel" if pods:
            sim.relabel(pods[0], c.LABEL_APP_MANAGED_BY)
        case "restart":
            sim.restart_operator(grace=True)
