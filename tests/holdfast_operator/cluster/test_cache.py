"""Caches: the newest of each object, and what vanished while nobody watched."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_operator.cluster.cache import Cache, Listing
from holdfast_operator.cluster.informer import Feed
from holdfast_operator.runtime.workqueue import KeyedQueue


def job(name: str, version: int, uid: str = "") -> dict[str, Any]:
    meta = {"namespace": "ml", "name": name, "uid": uid or f"job-{name}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}}


def pod(name: str, version: int, *, owner: str = "gpt", node: str = "n1") -> dict[str, Any]:
    reference = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "FaultTolerantJob",
        "name": owner,
        "uid": f"job-{owner}",
    }
    meta = {"namespace": "ml", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**meta, "ownerReferences": [reference]}, "spec": {"nodeName": node}, "status": {}}


def node(name: str, version: int, ready: str = "True", beat: str = "1") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": beat}
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": str(version)},
        "status": {"conditions": [condition]},
    }


def listing(*items: dict[str, Any], version: int) -> Listing:
    return Listing(items=items, version=version)


def test_an_older_version_never_replaces_a_newer_one() -> None:
    cache = Cache()
    cache.put_job(job("gpt", 7))
    cache.put_job(job("gpt", 5))
    found = cache.job("ml/gpt")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "7"


def test_the_end_of_an_earlier_job_does_not_drop_its_successor() -> None:
    cache = Cache()
    cache.put_job(job("gpt", 9, uid="new"))
    cache.drop_job(job("gpt", 5, uid="old"))
    assert cache.job("ml/gpt") is not None


def test_a_pods_last_state_outlives_it() -> None:
    cache = Cache()
    cache.put_pod(pod("w0", 3))
    assert cache.drop_pod(pod("w0", 4)) == "ml/gpt"
    assert cache.pods_of("job-gpt") == []
    assert [body["metadata"]["resourceVersion"] for body in cache.tombstones_of("job-gpt")] == ["4"]


def test_what_is_long_gone_is_forgotten() -> None:
    hour = iter((0.0, 3500.0, 3700.0))
    cache = Cache(clock=lambda: next(hour))
    for name in ("w0", "w1"):
        cache.put_pod(pod(name, 3))
        cache.drop_pod(pod(name, 4))
    cache.replace(listing(version=10), listing(version=10), listing(version=10))
    assert [body["metadata"]["name"] for body in cache.tombstones_of("job-gpt")] == ["w1"]


def test_a_full_list_prunes_what_vanished_and_names_its_job() -> None:
    cache = Cache()
    cache.put_job(job("gpt", 2))
    cache.put_pod(pod("w0", 3))
    cache.put_node(node("n1", 4))
    touched = cache.replace(listing(version=10), listing(version=10), listing(version=10))
    assert touched == {"ml/gpt"}
    assert (cache.job("ml/gpt"), cache.pods(), cache.nodes()) == (None, [], [])


def test_what_went_while_a_list_was_taken_does_not_come_back() -> None:
    cache = Cache()
    old = [job("gpt", 1, "job-gpt"), pod("w0", 2), node("n1", 3)]
    cache.put_job(old[0])
    cache.put_pod(old[1])
    cache.put_node(old[2])
    cache.drop_pod(pod("w0", 5))
    cache.drop_job(job("gpt", 6, "job-gpt"))
    cache.drop_node(node("n1", 7))
    cache.replace(listing(old[0], version=4), listing(old[1], version=4), listing(old[2], version=4))
    assert (cache.jobs(), cache.pods(), cache.usage(), cache.nodes()) == ([], [], (), [])


def test_the_end_of_an_earlier_node_does_not_drop_its_successor() -> None:
    cache, again = Cache(), node("n1", 9)
    again["metadata"]["uid"] = "again"
    cache.put_node(again)
    cache.drop_node(node("n1", 5))
    assert cache.node("n1") == again


class Server:
    """A small API server: each change is watched at once, and a list that was taken earlier arrives at any time."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.version = 0
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.lists: dict[str, Listing] = {}
        self.take()

    def change(self, kind: str, name: str) -> None:
        """Create the object, or change it where it exists."""
        self.version += 1
        make = {"job": job, "pod": pod, "node": node}[kind]
        known = self.objects.get((kind, name))
        body = make(name, self.version)
        body["metadata"]["uid"] = known["metadata"]["uid"] if known else f"uid-{self.version}"
        self.objects[kind, name] = body
        {"job": self.cache.put_job, "pod": self.cache.put_pod, "node": self.cache.put_node}[kind](body)

    def delete(self, kind: str, name: str) -> None:
        """The watch reports the last state, with the version of the deletion."""
        known = self.objects.pop((kind, name), None)
        if known is None:
            return
        self.version += 1
        body = {**known, "metadata": {**known["metadata"], "resourceVersion": str(self.version)}}
        {"job": self.cache.drop_job, "pod": self.cache.drop_pod, "node": self.cache.drop_node}[kind](body)

    def take(self, *kinds: str) -> None:
        """Take lists of these kinds; of all, if none is named."""
        for kind in kinds or ("job", "pod", "node"):
            items = [body for (of, _), body in self.objects.items() if of == kind]
            self.lists[kind] = Listing(items=items, version=self.version)

    def arrive(self) -> None:
        """The lists that were taken last are applied."""
        self.cache.replace(self.lists["job"], self.lists["pod"], self.lists["node"])

    def known(self) -> set[tuple[str, str, str]]:
        kept = {"job": self.cache.jobs(), "pod": self.cache.pods(), "node": self.cache.nodes()}
        return {(kind, *named(body)) for kind, bodies in kept.items() for body in bodies}

    def true(self) -> set[tuple[str, str, str]]:
        return {(kind, *named(body)) for (kind, _), body in self.objects.items()}


def named(body: dict[str, Any]) -> tuple[str, str]:
    return str(body["metadata"]["uid"]), str(body["metadata"]["resourceVersion"])


KINDS = st.sampled_from(("job", "pod", "node"))
STEPS = st.one_of(
    st.tuples(st.sampled_from(("change", "delete")), KINDS, st.sampled_from(("a", "b"))),
    st.tuples(st.just("take"), KINDS),
    st.tuples(st.just("arrive")),
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEPS, max_size=25))
def test_whenever_lists_were_taken_the_cache_holds_what_exists(steps: list[tuple[str, ...]]) -> None:
    server = Server()
    for step, *arguments in steps:
        getattr(server, step)(*arguments)
        assert server.known() == server.true()


def test_a_pod_that_is_one_of_ours_again_is_known_again() -> None:
    cache = Cache()
    cache.put_pod(pod("w0", 2))
    cache.drop_pod(pod("w0", 5))  # somebody took its labels, which a watch tells as its end
    cache.put_pod(pod("w0", 7))
    assert [body["metadata"]["name"] for body in cache.pods()] == ["w0"]


def test_pod_without_its_owner_reference_wakes_its_job() -> None:
    """The pod is no longer listed for the job."""
    cache = Cache()
    cache.put_pod(pod("w0", 2))
    disowned = pod("w0", 3)
    disowned["metadata"]["ownerReferences"] = []
    assert cache.put_pod(disowned) == "ml/gpt"
    assert cache.pods_of("job-gpt") == []
    assert cache.put_pod(pod("w0", 4)) == "ml/gpt"
    assert len(cache.pods_of("job-gpt")) == 1


def test_what_is_newer_than_the_list_stays() -> None:
    cache = Cache()
    cache.put_pod(pod("w0", 11))
    cache.replace(listing(version=10), listing(version=10), listing(version=10))
    assert len(cache.pods()) == 1


def test_strangers_pods_are_nobodys() -> None:
    cache = Cache()
    stranger = pod("x", 1)
    stranger["metadata"]["ownerReferences"] = []
    assert cache.put_pod(stranger) is None
    assert cache.pods() == []


def test_a_nodes_heartbeat_wakes_no_job_and_its_silence_does() -> None:
    cache, queue = Cache(), KeyedQueue()
    feed = Feed(cache, queue)
    cache.put_pod(pod("w0", 1))
    feed.node(None, node("n1", 1))
    assert queue.get() == "ml/gpt"
    queue.done("ml/gpt")
    feed.node("MODIFIED", node("n1", 2, beat="2"))
    assert queue.depth() == 0
    feed.node("MODIFIED", node("n1", 3, ready="Unknown"))
    assert queue.depth() == 1


def test_a_report_wakes_its_job() -> None:
    cache, queue = Cache(), KeyedQueue()
    cache.put_job(job("gpt", 1))
    feed = Feed(cache, queue)
    feed.report("job-gpt")
    feed.report("job-unknown")
    assert queue.get() == "ml/gpt"
    assert queue.depth() == 0


def test_usage_of_a_node_excludes_ended_pods() -> None:
    """The usage of a node is the sum over pods that have not ended."""
    cache = Cache()
    for version, name in enumerate(("w0", "w1", "w2"), start=1):
        cache.put_pod(asking(name, version, cpu="2"))
    cache.put_pod(asking("w1", 4, cpu="3"))
    cache.put_pod({**asking("w2", 5, cpu="2"), "status": {"phase": "Failed"}})
    (taken,) = cache.usage()
    assert (taken.node, taken.amounts) == ("n1", {"cpu": 5, "pods": 2})
    cache.drop_pod(pod("w0", 6))
    cache.drop_pod(pod("w1", 7))
    assert cache.usage() == ()


def asking(name: str, version: int, *, cpu: str) -> dict[str, Any]:
    body = pod(name, version)
    body["spec"]["containers"] = [{"name": "trainer", "resources": {"requests": {"cpu": cpu}}}]
    return body


def test_a_job_is_found_by_its_uid_until_it_is_gone() -> None:
    cache = Cache()
    cache.put_job(job("gpt", 1, uid="old"))
    cache.put_job(job("gpt", 2, uid="new"))
    assert (cache.key_of_uid("old"), cache.key_of_uid("new")) == (None, "ml/gpt")
    cache.drop_job(job("gpt", 3, uid="new"))
    assert cache.key_of_uid("new") is None


def test_full_list_wakes_only_changed_jobs() -> None:
    cache = Cache()
    cache.put_job(job("gpt", 2))
    cache.put_job(job("bert", 3))
    cache.put_pod(pod("w0", 4, owner="bert"))
    told = [job("gpt", 2), job("bert", 3)], [pod("w0", 5, owner="bert")]
    assert cache.replace(listing(*told[0], version=10), listing(*told[1], version=10), listing(version=10)) == {
        "ml/bert"
    }
