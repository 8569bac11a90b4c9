"""What one pass sees of the cluster, and what it must not take for its own."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from holdfast_operator.cache import Cache, Listing
from holdfast_operator.constants import APPLY_AGAIN
from holdfast_operator.observe import Memory, Observer
from holdfast_operator.seen import Standing
from holdfast_operator.slim import slim_pod
from holdfast_operator.webhook import AgentHub


class NoCluster:
    """Only caches are read here; a node that they do not know is gone."""

    def node(self, _name: str) -> None:
        return None

    def lease(self, _name: str) -> None:
        return None

    def __init__(self) -> None:
        self.events: dict[str, list[Any]] = {}
        self.asked: list[str] = []
        self.job_body: Any = None
        self.pod_bodies: list[Any] = []

    def job(self, _namespace: str, _name: str) -> Any:
        return self.job_body

    def pods(self, _namespace: str, _selector: str) -> Listing:
        return Listing(items=self.pod_bodies, version=1)

    def pod_events(self, _namespace: str, uid: str) -> list[Any]:
        self.asked.append(uid)
        return self.events.get(uid, [])


def owned(sim: Any, name: str, namespace: str) -> dict[str, Any]:
    """A pod with an owner reference to the job."""
    body: dict[str, Any] = copy.deepcopy(next(iter(sim.pods.values())))
    job = sim.body
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": "gpt", "uid": job["metadata"]["uid"]}
    body["metadata"] |= {"name": name, "namespace": namespace, "uid": f"uid-{name}", "ownerReferences": [owner]}
    return body


def observer(sim: Any, cache: Cache, hub: AgentHub, cluster: Any = None) -> Observer:
    cluster = cluster or NoCluster()
    return Observer(
        cluster=cluster,
        cache=cache,
        hub=hub,
        platform=lambda: sim.observe().platform,
        key_of_job=lambda _uid: "ab" * 32,
        nonce=lambda: "n",
        started_at=sim.started_at,
    )


def test_pods_of_another_namespace_are_no_workers_whatever_owner_they_name(trained: Any) -> None:
    cache, hub, bound = Cache(), AgentHub(lambda _token: None, lambda _uid: None), []
    hub.bind = lambda pod_uid, *_: bound.append(pod_uid)  # type: ignore[method-assign]
    cache.put_job(trained.body)
    for name, namespace in (("own", "ml"), ("forged", "elsewhere"), ("forged-grave", "elsewhere")):
        cache.put_pod(owned(trained, name, namespace))
    cache.drop_pod(owned(trained, "forged-grave", "elsewhere"))
    seen = observer(trained, cache, hub).cached("ml/gpt", Memory(), trained.now)
    assert seen is not None
    assert [pod.name for pod in seen.pods] == ["own"]
    assert bound == ["uid-own"]


def test_a_new_process_takes_the_statuss_word_for_what_was_applied(trained: Any) -> None:
    cache, hub = Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    trained.body["status"]["placement"]["applied"] = "digest"
    trained.started_at = trained.now
    cache.put_job(trained.body)
    seen = [observer(trained, cache, hub).cached("ml/gpt", Memory(), later(trained, s)) for s in (0, 60, 360)]
    assert [one.applied for one in seen if one is not None] == ["digest", "digest", ""]


def test_where_there_are_many_jobs_children_are_applied_anew_seldom(trained: Any) -> None:
    cache, hub = Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    for number in range(1000):
        meta = {**trained.body["metadata"], "name": f"job-{number}", "uid": f"uid-{number}"}
        cache.put_job({**trained.body, "metadata": meta})
    memory = Memory(applied="digest", applied_at=trained.now)
    seen = observer(trained, cache, hub).cached("ml/job-1", memory, later(trained, 1400))
    assert seen is not None
    assert seen.applied == "digest"


def test_children_are_applied_anew_after_a_while_and_not_all_jobs_at_once(trained: Any) -> None:
    cache, hub = Cache(), AgentHub(lambda _token: None, lambda _uid: None)
    memory = Memory(applied="digest", applied_at=trained.now)
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


def that_pull(trained: Any, count: int) -> tuple[Observer, NoCluster]:
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


def test_however_many_pods_pull_an_image_few_calls_ask_why(trained: Any) -> None:
    seeing, cluster = that_pull(trained, 256)
    for second in range(60):
        for look in (seeing.cached, seeing.live):
            assert look("ml/gpt", Memory(), later(trained, 10 + second)) is not None
    assert len(cluster.asked) <= 16 * 12


def test_each_of_many_pods_gets_its_turn_and_what_was_told_is_kept(trained: Any) -> None:
    seeing, cluster = that_pull(trained, 256)
    mount = {"type": "Warning", "reason": "FailedMount", "message": "no such claim", "lastTimestamp": trained.stamp()}
    for uid in cluster.events:
        cluster.events[uid] = [mount]
    for second in range(90):
        seen = seeing.cached("ml/gpt", Memory(), later(trained, 10 + second))
    assert set(cluster.asked) == set(cluster.events)
    assert seen is not None
    assert all(pod.warnings == (("FailedMount", "no such claim"),) for pod in seen.pods)


def test_why_one_pod_does_not_start_is_known_at_once_and_asked_anew_every_few_seconds(trained: Any) -> None:
    seeing, cluster = that_pull(trained, 1)
    told = []
    for second in range(11):
        for look in (seeing.cached, seeing.live):
            seen = look("ml/gpt", Memory(), later(trained, 10 + second))
            told += [pod.pulling for pod in seen.pods] if seen is not None else []
        if second == 4:
            cluster.events["uid-gpt-w0"] = []
    assert told == ['Pulling image "train:1"'] * 10 + [""] * 12
    assert len(cluster.asked) == 3


def a_gang_that_waits(make_sim: Any) -> Any:
    sim = make_sim(replicas=3, nodes=1)
    sim.priority = 10
    sim.run(10)
    assert sim.status.status == "WaitingForCapacity"
    return sim


def standings(sim: Any, cache: Cache) -> list[Standing]:
    hub = AgentHub(lambda _token: None, lambda _uid: None)
    for node in sim.nodes.values():
        cache.put_node(node)
    seen = observer(sim, cache, hub).cached("ml/gpt", Memory(), sim.now)
    assert seen is not None
    return [rival.standing for rival in seen.line.rivals] if seen.line is not None else []


def test_a_gang_stands_where_its_pods_say(make_sim: Any) -> None:
    sim, cache = a_gang_that_waits(make_sim), Cache()
    cache.put_job(sim.body)
    for name in ("one", "two"):
        cache.put_pod(slim_pod(owned(sim, name, "ml")))
    cache.put_pod(slim_pod(lowered(owned(sim, "forged", "elsewhere"))))
    assert standings(sim, cache) == [Standing(priority=10)]
    cache.put_pod(slim_pod(lowered(owned(sim, "three", "ml"))))
    assert standings(sim, cache) == [Standing(priority=-5)]


def test_a_gang_is_not_judged_before_its_pods_say_where_it_stands(make_sim: Any) -> None:
    sim, cache = a_gang_that_waits(make_sim), Cache()
    cache.put_job(sim.body)
    assert standings(sim, cache) == []


def lowered(body: dict[str, Any]) -> dict[str, Any]:
    body["spec"]["priority"] = -5
    return body


def later(sim: Any, seconds: int) -> Any:
    return sim.now + timedelta(seconds=seconds)
