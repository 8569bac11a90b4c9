"""What is kept of an object says the same to whoever reads it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim import Sim

from holdfast_operator.api.job import parse_job
from holdfast_operator.cluster.interning import Interner
from holdfast_operator.cluster.node_usage import usage_of
from holdfast_operator.cluster.trimming import SPEC_BYTES, SPEC_DEPTH, slim, slim_job, slim_pod
from holdfast_operator.scheduling.waiting_gang import rival_of
from holdfast_operator.views import parse_node, parse_pod


def more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and objects of such."""
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


FIELDS = [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}]


def test_a_slim_pod_reads_like_the_whole_one(trained: Sim) -> None:
    for body in trained.pods.values():
        whole = copy.deepcopy(body)
        whole["metadata"] |= {"managedFields": FIELDS, "annotations": {"note": "x" * 4096}}
        whole["spec"]["volumes"] = [{"name": "shm", "emptyDir": {}}]
        whole["status"]["nominatedNodeName"] = "node-1"
        kept = slim_pod(whole)
        assert "managedFields" not in kept["metadata"]
        assert "volumes" not in kept["spec"]
        assert (parse_pod(kept), usage_of(kept)) == (parse_pod(whole), usage_of(whole))
        assert slim_pod(kept) == kept


def test_a_priority_is_kept_of_a_pod_that_has_one(trained: Sim) -> None:
    whole = copy.deepcopy(next(iter(trained.pods.values())))
    assert (whole["spec"]["priority"], whole["spec"]["preemptionPolicy"]) == (0, "PreemptLowerPriority")
    assert not {"priority", "preemptionPolicy"} & slim_pod(whole)["spec"].keys()
    whole["spec"] |= {"priority": -7, "preemptionPolicy": "Never"}
    kept = slim_pod(whole)
    assert (parse_pod(kept), usage_of(kept)) == (parse_pod(whole), usage_of(whole))
    assert (parse_pod(kept).priority, parse_pod(kept).preempts) == (-7, False)


def test_what_pods_have_in_common_is_in_memory_once(trained: Sim) -> None:
    one, other = (slim_pod(copy.deepcopy(body)) for body in list(trained.pods.values())[:2])
    assert one != other
    assert one["spec"]["containers"] is other["spec"]["containers"]
    assert one["metadata"]["ownerReferences"] is other["metadata"]["ownerReferences"]


def test_only_our_annotations_of_a_node_are_kept() -> None:
    """No annotation of a job is kept."""
    own = {"holdfast.dev/remediation": "{}"}
    notes = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 4096, **own}
    body = {"metadata": {"name": "a", "annotations": notes}, "spec": {"replicas": 1}}
    assert slim(body) == {"metadata": {"name": "a", "annotations": own}, "spec": {"replicas": 1}}
    assert slim_job(body) == {"metadata": {"name": "a"}, "spec": {"replicas": 1}}
    assert notes.keys() != own.keys(), "the given object was changed"


def test_a_slim_job_reads_like_the_whole_one(trained: Sim) -> None:
    whole = copy.deepcopy(trained.body)
    whole["metadata"] |= {
        "managedFields": FIELDS,
        "labels": {"a": "b"},
        "finalizers": ["x"],
        "annotations": {"c": "d"},
    }
    kept = slim_job(whole)
    assert (parse_job(kept), rival_of(kept)) == (parse_job(whole), rival_of(whole))
    assert kept["metadata"].keys() <= trained.body["metadata"].keys()
    assert slim_job(kept) == kept


@pytest.mark.parametrize(
    "values",
    [["x" * SPEC_BYTES], [{}] * (SPEC_BYTES // 64), [{str(n): str(n)} for n in range(SPEC_BYTES // 256)]],
    ids=["one text", "empty objects", "many texts"],
)
def test_of_a_job_that_is_too_large_nothing_is_kept_but_why(sim: Sim, values: list[Any]) -> None:
    sim.body["spec"]["workers"]["template"]["spec"]["containers"][0]["args"] = values
    kept = slim_job(sim.body)
    assert "spec" not in kept
    assert len(repr(kept)) < 1024
    assert slim_job(kept) == kept
    assert rival_of(kept) is None
    job = parse_job(kept)
    assert job.spec is None
    assert job.unreadable.startswith("its spec takes more than 128 KiB of the operator's memory: move large values")


def test_too_large_job_is_reported(sim: Sim) -> None:
    """Nothing is created for the job."""
    sim.body["spec"]["workers"]["template"]["spec"]["containers"][0]["args"] = ["x" * SPEC_BYTES]
    sim.body = slim_job(sim.body)
    sim.settle()
    degraded = sim.status.condition("Degraded")
    assert (degraded.status, degraded.reason) == (True, "InvalidSpec")
    assert "128 KiB of the operator's memory" in degraded.message
    assert [reason for reason, _ in sim.events] == ["InvalidSpec"]
    assert sim.created_names == []


@pytest.mark.parametrize(("levels", "read"), [(SPEC_DEPTH - 10, True), (SPEC_DEPTH, False), (300, False)])
def test_a_job_that_is_nested_deeper_than_any_pod_is_not_read(sim: Sim, levels: int, read: bool) -> None:
    sim.body["spec"]["workers"]["template"]["spec"]["containers"][0]["args"] = json.loads("[" * levels + "]" * levels)
    job = parse_job(slim_job(sim.body))
    assert (job.spec is not None) is read
    assert read or job.unreadable == "its spec is nested deeper than 64 levels"


# As in an operator's process: each of its threads decodes what tenants nested as deep as the API server takes it.
NESTED = """
import json, threading
from holdfast_operator.main import main
from holdfast_operator.cluster.trimming import slim_job

def decode():
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        body = '{"metadata":{"name":"a"},"spec":' + opened * 9990 + "1" + closed * 9990 + "}"
        print(slim_job(json.loads(body))["unread"])

main()
decode()
thread = threading.Thread(target=decode)
thread.start()
thread.join()
"""


def test_deeply_nested_job_breaks_no_list_and_no_watch() -> None:
    """The job is as deep as the API server admits."""
    done = subprocess.run([sys.executable, "-c", NESTED], env={}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "its spec is nested deeper than 64 levels\n" * 4, done.stderr[-2000:]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), more))
def test_a_shared_part_is_what_was_given(value: Any) -> None:
    parts = Interner(most=4)
    shared = [parts(copy.deepcopy(value)) for _ in range(2)]
    assert repr(shared) == repr([value, value])
    assert shared[0] is shared[1]


def test_a_slim_node_reads_like_the_whole_one(trained: Sim) -> None:
    for body in trained.nodes.values():
        whole = {**body, "metadata": {**body["metadata"], "managedFields": FIELDS}}
        whole["status"] = {**body["status"], "images": [{"names": ["train:1"]}]}
        kept = slim(whole)
        assert "images" not in kept["status"]
        assert "managedFields" not in kept["metadata"]
        assert parse_node(kept) == parse_node(whole)
