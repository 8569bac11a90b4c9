"""A full list of a large fleet: in pages with pauses between them, and nothing made anew that has not changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from holdfast_operator.api import names as c
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.cluster.client import AT_ONCE, Cluster, ListPacing
from holdfast_operator.cluster.informer import Feed
from holdfast_operator.runtime.workqueue import KeyedQueue

OWNER = {"apiVersion": f"{c.GROUP}/{c.API_VERSION}", "kind": c.KIND, "name": "gpt", "uid": "uid-gpt"}


def job(version: int = 1) -> dict[str, Any]:
    meta = {"name": "gpt", "namespace": "ml", "uid": "uid-gpt", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}, "status": {}}


def pod(number: int, version: int = 1) -> dict[str, Any]:
    meta = {
        "name": f"gpt-w{number}",
        "namespace": "ml",
        "uid": f"uid-{number}",
        "resourceVersion": str(version),
        "ownerReferences": [OWNER],
    }
    return {"metadata": meta, "spec": {"nodeName": "a"}, "status": {}}


@dataclass(kw_only=True)
class Server:
    """Lists in pages, and the place of the official client's transport."""

    pods: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    pages: int = 0
    rests: list[float] = field(default_factory=list)

    def param_serialize(self, _method: str, path: str, *, query_params: Any, **_: Any) -> tuple[str, dict[str, str]]:
        return path, dict(query_params)

    def call_api(self, path: str, query: dict[str, str], **_: Any) -> Any:
        kind = urlsplit(path).path.rpartition("/")[2]
        items = {"pods": self.pods, c.PLURAL: self.jobs}.get(kind, [])
        first = int(query.get("continue", 0))
        last = first + int(query["limit"])
        more = {"continue": str(last)} if last < len(items) else {}
        self.pages += 1
        page = {"metadata": {"resourceVersion": "9", **more}, "items": items[first:last]}
        return SimpleNamespace(status=200, read=lambda: json.dumps(page).encode())


def relisted(cache: Cache, server: Server, pace: ListPacing = AT_ONCE) -> None:
    cluster: Any = Cluster(server, sleep=server.rests.append)  # type: ignore[arg-type]
    Feed(cache, KeyedQueue()).relist(cluster, (), pace=pace)


def test_next_leader_sees_changes_of_the_time_before() -> None:
    """A standby works on nothing, so its queue holds each job once, however often it changed."""
    cache, queue = Cache(), KeyedQueue()
    standby = Feed(cache, queue)
    for change in range(3):
        for number in range(500):
            body = job(version=change * 500 + number + 1)
            body["metadata"] |= {"name": f"gpt-{number}", "uid": f"uid-{number}"}
            standby.job("MODIFIED" if change else None, body)
    assert queue.depth() == 500
    assert {queue.get() for _ in range(500)} == {f"ml/gpt-{number}" for number in range(500)}


def test_a_rest_is_taken_between_pages_and_not_after_the_last() -> None:
    server = Server(pods=[pod(number) for number in range(5)], jobs=[job()])
    cache = Cache()
    relisted(cache, server, ListPacing(page=2, rest_seconds=0.25, rests=9))
    assert (server.pages, server.rests) == (1 + 1 + 3, [0.25, 0.25])
    assert len(cache.pods()) == 5


def test_pauses_between_pages_are_bounded() -> None:
    """After too many pauses, the list's continue token would expire."""
    server = Server(pods=[pod(number) for number in range(9)], jobs=[])
    relisted(Cache(), server, ListPacing(page=1, rest_seconds=0.25, rests=3))
    assert (server.pages, server.rests) == (1 + 1 + 9, [0.25] * 3)


def test_what_has_not_changed_stays_the_same_object() -> None:
    server = Server(pods=[pod(0), pod(1)], jobs=[job()])
    cache = Cache()
    relisted(cache, server)
    before = {body["metadata"]["uid"]: body for body in [*cache.jobs(), *cache.pods()]}
    server.pods[1] = pod(1, version=2)
    relisted(cache, server)
    after = {body["metadata"]["uid"]: body for body in [*cache.jobs(), *cache.pods()]}
    assert {uid for uid, body in after.items() if body is not before[uid]} == {"uid-1"}


def test_recreated_job_replaces_the_cached_one() -> None:
    """Its resource version may be lower than that of the old job."""
    server = Server(pods=[], jobs=[job()])
    cache = Cache()
    relisted(cache, server)
    again = job()
    again["metadata"]["uid"] = "uid-again"
    server.jobs = [again]
    relisted(cache, server)
    assert [body["metadata"]["uid"] for body in cache.jobs()] == ["uid-again"]
