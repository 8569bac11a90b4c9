"""What one pass sees of the cluster, and what it must not take for its own."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from sim import Make, Sim

from holdfast_operator.api.names import APPLY_AGAIN, LABEL_APP_MANAGED_BY
from holdfast_operator.api.status import operator_state
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.cache import Cache, Listing
from holdfast_operator.cluster.trimming import slim_pod
from holdfast_operator.reconcile.job_memories import JobMemory
from holdfast_operator.reconcile.observe import JobObserver
from holdfast_operator.scheduling.waiting_gang import GangPriority


class NoCluster:
    """Only caches are read here; a node that they do not know is gone."""

    def node(self, name: str) -> Any:
        self.read.append(name)
        return self.node_bodies.get(name)

    def lease(self, name: str) -> Any:
        return self.leases.get(name)

    def pod(self, _namespace: str, name: str) -> Any:
        self.read.append(name)
        return self.by_name.get(name)

    def __init__(self) -> None:
        self.events: dict[str, list[Any]] = {}
        self.asked: list[str] = []
        self.read: list[str] = []  # what was read by name
        self.by_name: dict[str, Any] = {}  # pods, however they are labelled
        self.node_bodies: dict[str, Any] = {}
        self.leases: dict[str, Any] = {}
        self.job_body: Any = None
        self.pod_bodies: list[Any] = []

    def job(self, _namespace: str, _name: str) -> Any:
        return self.job_body

    def pods(self, _namespace: str, _selector: str) -> Listing:
        return Listing(items=self.pod_bodies, version=1)

    def pod_events(self, _namespace: str, uid: str) -> list[Any]:
        self.asked.append(uid)
        return self.events.get(uid, [])


def owned(sim: Sim, name: str, namespace: str) -> dict[str, Any]:
    """A pod with an owner reference to the job."""
    body: dict[str, Any] = copy.deepcopy(next(iter(sim.pods.values())))
    job = sim.body
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": "gpt", "uid": job["metadata"]["uid"]}
    body["metadata"] |= {"name": name, "namespace": namespace, "uid": f"uid-{name}", "ownerReferences": [owner]}
    return body


def observer(sim: Sim, cache: Cache, hub: AgentHub, cluster: Any = None) -> JobObserver:
    cluster = cluster or NoCluster()
    return JobObserver(
        cluster=cluster,
        cache=cache,
        hub=hub,
        platform=lambda: sim.observe().platform,
        key_of_job=lambda _uid: "ab" * 32,
        nonce=lambda: "n",
        started_at=sim.started_at,
    )


def test_pods_of_another_namespace_are_no_workers(trained: Sim) -> None:
    """They may name a job of this namespace as owner."""
    cache, hub, bound = Cache(), AgentHub(lambda _token: None, lambda _uid: None), []
    hub.bind = lambda pod_uid, *_: bound.append(pod_uid)  # type: ignore[method-assign]
    cache.put_job(trained.body)
    for name, namespace in (("own", "ml"), ("forged", "elsewhere"), ("forged-grave", "elsewhere")):
        cache.put_pod(owned(trained, name, namespace))
    cache.drop_pod(owned(trained, "forged-grave", "elsewhere"))
    seen = observer(trained, cache, hub).cached("ml/gpt", JobMemory(), trained.now)
    assert seen is not None
    assert [pod.name for pod in seen.pods] == ["own"]
    assert bound == ["uid-own"]


def test_new_process_trusts_the_status_for_applied_children(trained: Sim) -> None:
    cache, hub = Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    status = trained.body["status"]
    status["operatorState"] = operator_state.encode({**operator_state.decode(status), "applied": "digest"})
    trained.started_at = trained.now
    cache.put_job(trained.body)
    seen = [observer(trained, cache, hub).cached("ml/gpt", JobMemory(), later(trained, s)) for s in (0, 60, 360)]
    assert [one.applied for one in seen if one is not None] == ["digest", "digest", ""]


def test_many_jobs_reapply_children_seldom(trained: Sim) -> None:
    cache, hub = Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    for number in range(1000):
        meta = {**trained.body["metadata"], "name": f"job-{number}", "uid": f"uid-{number}"}
        cache.put_job({**trained.body, "metadata": meta})
    memory = JobMemory(applied="digest", applied_at=trained.now)
    seen = observer(trained, cache, hub).cached("ml/job-1", memory, later(trained, 1400))
    assert seen is not None
    assert seen.applied == "digest"


def test_children_are_reapplied_at_different_times(trained: Sim) -> None:
    cache, hub = Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    memory = JobMemory(applied="digest", applied_at=trained.now)
    due = set()
    for number in range(20):
        body = {**trained.body, "metadata": {**trained.body["metadata"], "uid": f"uid-{number}"}}
        cache.put_job(body)
        seconds = 0
        while (seen := observer(trained, cache, hub).cached("ml/gpt", memory, later(trained, seconds))) is not None:
            if not seen.applied:
                break
            seconds += 10
        due.add(seconds)
    assert min(due) >= APPLY_AGAIN.total_seconds()
    assert max(due) <= 2 * APPLY_AGAIN.total_seconds() + 10
    assert len(due) > 5


def pulling(at: str) -> dict[str, Any]:
    return {"type": "Normal", "reason": "Pulling", "message": 'Pulling image "train:1"', "lastTimestamp": at}


def that_pull(trained: Sim, count: int) -> tuple[JobObserver, NoCluster]:
    """So many bound pods of a job that have pulled an image for a while."""
    cluster, cache, hub = NoCluster(), Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    for number in range(count):
        body = owned(trained, f"gpt-w{number}", "ml")
        body["status"] = {"phase": "Pending"}
        cluster.pod_bodies.append(body)
        cluster.events[body["metadata"]["uid"]] = [pulling(trained.stamp())]
        cache.put_pod(body)
    cluster.job_body = trained.body
    cache.put_job(trained.body)
    return observer(trained, cache, hub, cluster), cluster


def test_however_many_pods_pull_an_image_few_calls_ask_why(trained: Sim) -> None:
    seeing, cluster = that_pull(trained, 256)
    for second in range(60):
        for look in (seeing.cached, seeing.live):
            assert look("ml/gpt", JobMemory(), later(trained, 10 + second)) is not None
    assert len(cluster.asked) <= 16 * 12


def test_events_of_many_pods_are_read_in_turns(trained: Sim) -> None:
    """Earlier results are kept."""
    seeing, cluster = that_pull(trained, 256)
    mount = {"type": "Warning", "reason": "FailedMount", "message": "no such claim", "lastTimestamp": trained.stamp()}
    for uid in cluster.events:
        cluster.events[uid] = [mount]
    for second in range(90):
        seen = seeing.cached("ml/gpt", JobMemory(), later(trained, 10 + second))
    assert set(cluster.asked) == set(cluster.events)
    assert seen is not None
    assert all(pod.warnings == (("FailedMount", "no such claim"),) for pod in seen.pods)


def test_events_of_a_pending_pod_are_read_every_few_seconds(trained: Sim) -> None:
    """The first read is immediate."""
    seeing, cluster = that_pull(trained, 1)
    told = []
    for second in range(11):
        for look in (seeing.cached, seeing.live):
            seen = look("ml/gpt", JobMemory(), later(trained, 10 + second))
            told += [pod.pulling for pod in seen.pods] if seen is not None else []
        if second == 4:
            cluster.events["uid-gpt-w0"] = []
    assert told == ['Pulling image "train:1"'] * 10 + [""] * 12
    assert len(cluster.asked) == 3


def test_events_are_read_without_a_scheduler_report(trained: Sim) -> None:
    seeing, cluster = that_pull(trained, 1)
    warning = {"type": "Warning", "reason": "FailedResourceClaimCreation", "message": "no template eight"}
    cluster.events["uid-gpt-w0"] = [warning]
    (body,) = cluster.pod_bodies
    del body["spec"]["nodeName"]
    seen = seeing.live("ml/gpt", JobMemory(), later(trained, 10))
    assert seen is not None
    assert seen.pods[0].warnings == (("FailedResourceClaimCreation", "no template eight"),)


def a_gang_that_waits(make_sim: Make) -> Any:
    sim = make_sim(replicas=3, nodes=1)
    sim.priority = 10
    sim.run(10)
    assert sim.status.summary == "WaitingForCapacity"
    return sim


def standings(sim: Sim, cache: Cache) -> list[GangPriority]:
    hub = AgentHub(lambda _token: None, lambda _uid: None)
    for node in sim.nodes.values():
        cache.put_node(node)
    seen = observer(sim, cache, hub).cached("ml/gpt", JobMemory(), sim.now)
    assert seen is not None
    return [rival.standing for rival in seen.line.rivals] if seen.line is not None else []


def test_a_gang_stands_where_its_pods_say(make_sim: Make) -> None:
    sim, cache = a_gang_that_waits(make_sim), Cache()
    cache.put_job(sim.body)
    for name in ("one", "two"):
        cache.put_pod(slim_pod(owned(sim, name, "ml")))
    cache.put_pod(slim_pod(lowered(owned(sim, "forged", "elsewhere"))))
    assert standings(sim, cache) == [GangPriority(priority=10)]
    cache.put_pod(slim_pod(lowered(owned(sim, "three", "ml"))))
    assert standings(sim, cache) == [GangPriority(priority=-5)]


def test_gang_is_not_judged_before_its_pods_are_known(make_sim: Make) -> None:
    sim, cache = a_gang_that_waits(make_sim), Cache()
    cache.put_job(sim.body)
    assert standings(sim, cache) == []


def lowered(body: dict[str, Any]) -> dict[str, Any]:
    body["spec"]["priority"] = -5
    return body


def watched(sim: Sim) -> tuple[JobObserver, NoCluster, Cache]:
    """Three workers that train, all of them in the caches and in the list."""
    cluster, cache = NoCluster(), Cache()
    cluster.job_body = sim.body
    cache.put_job(sim.body)
    for body in sim.pods.values():
        cluster.pod_bodies.append(body)
        cache.put_pod(body)
    for name, body in sim.nodes.items():
        cache.put_node(body)
        cluster.node_bodies[name] = body
        lease = {"renewTime": sim.stamp(), "leaseDurationSeconds": 40}
        cluster.leases[name] = {"spec": lease}
    cluster.by_name = {body["metadata"]["name"]: body for body in sim.pods.values()}
    hub = AgentHub(lambda _token: None, lambda _uid: None)
    return observer(sim, cache, hub, cluster), cluster, cache


def present(seeing: JobObserver, sim: Sim) -> dict[str, bool]:
    seen = seeing.live("ml/gpt", JobMemory(), sim.now)
    assert seen is not None
    return {pod.name: not pod.absent for pod in seen.pods}


def test_only_a_direct_read_shows_that_a_pod_is_absent(trained: Sim) -> None:
    seeing, cluster, cache = watched(trained)
    hidden = cluster.pod_bodies.pop()
    relabelled = copy.deepcopy(hidden)
    del relabelled["metadata"]["labels"][LABEL_APP_MANAGED_BY]
    name = hidden["metadata"]["name"]
    cluster.by_name[name] = relabelled
    cache.drop_pod(hidden)  # as a watch by labels reports it
    assert present(seeing, trained)[name]
    del cluster.by_name[name]
    assert not present(seeing, trained)[name]


def test_pod_with_another_uid_is_not_the_worker(trained: Sim) -> None:
    """Somebody recreates a pod under our name and labels: it is not ours, and ours is gone."""
    seeing, cluster, _cache = watched(trained)
    other = copy.deepcopy(cluster.pod_bodies[0])
    other["metadata"] |= {"uid": "another", "ownerReferences": []}
    cluster.pod_bodies[0] = cluster.by_name[other["metadata"]["name"]] = other
    seen = seeing.live("ml/gpt", JobMemory(), trained.now)
    assert seen is not None
    assert "another" not in {pod.uid for pod in seen.pods}
    assert [pod.absent for pod in seen.pods if pod.name == other["metadata"]["name"]] == [True]


def test_pods_that_are_listed_or_ended_cost_no_direct_read(trained: Sim) -> None:
    trained.end("gpt-w1", 137)
    seeing, cluster, cache = watched(trained)
    ended = next(body for body in cluster.pod_bodies if body["metadata"]["name"] == "gpt-w1")
    cluster.pod_bodies.remove(ended)
    cache.drop_pod(ended)
    assert not present(seeing, trained)["gpt-w1"]
    assert cluster.read == []


def test_node_without_a_lease_is_read_first(trained: Sim) -> None:
    """Its Lease goes with a deleted Node, whatever an old list says."""
    node = trained.node_of("gpt-w1")
    trained.node_unready(node)
    seeing, cluster, cache = watched(trained)
    del cluster.node_bodies[node], cluster.leases[node]
    seen = seeing.cached("ml/gpt", JobMemory(), trained.now)
    assert seen is not None
    assert node not in {view.name for view in seen.nodes}
    assert cache.node(node) is None
    assert cluster.read == [node]


def later(sim: Sim, seconds: int) -> Any:
    return sim.now + timedelta(seconds=seconds)
