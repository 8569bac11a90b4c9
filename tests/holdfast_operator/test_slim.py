"""What is kept of an object says the same to whoever reads it."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.occupancy import usage_of
from holdfast_operator.seen import parse_node, parse_pod
from holdfast_operator.shared import Parts
from holdfast_operator.slim import slim, slim_pod


def more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and objects of such."""
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)


FIELDS = [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}]


def test_a_slim_pod_reads_like_the_whole_one(trained: Any) -> None:
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


def test_a_priority_is_kept_of_a_pod_that_has_one(trained: Any) -> None:
    whole = copy.deepcopy(next(iter(trained.pods.values())))
    assert (whole["spec"]["priority"], whole["spec"]["preemptionPolicy"]) == (0, "PreemptLowerPriority")
    assert not {"priority", "preemptionPolicy"} & slim_pod(whole)["spec"].keys()
    whole["spec"] |= {"priority": -7, "preemptionPolicy": "Never"}
    kept = slim_pod(whole)
    assert (parse_pod(kept), usage_of(kept)) == (parse_pod(whole), usage_of(whole))
    assert (parse_pod(kept).priority, parse_pod(kept).preempts) == (-7, False)


def test_what_pods_have_in_common_is_in_memory_once(trained: Any) -> None:
    one, other = (slim_pod(copy.deepcopy(body)) for body in list(trained.pods.values())[:2])
    assert one != other
    assert one["spec"]["containers"] is other["spec"]["containers"]
    assert one["metadata"]["ownerReferences"] is other["metadata"]["ownerReferences"]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), more))
def test_a_shared_part_is_what_was_given(value: Any) -> None:
    parts = Parts(most=4)
    shared = [parts(copy.deepcopy(value)) for _ in range(2)]
    assert repr(shared) == repr([value, value])
    assert shared[0] is shared[1]


def test_a_slim_node_reads_like_the_whole_one(trained: Any) -> None:
    for body in trained.nodes.values():
        whole = {**body, "metadata": {**body["metadata"], "managedFields": FIELDS}}
        whole["status"] = {**body["status"], "images": [{"names": ["train:1"]}]}
        kept = slim(whole)
        assert "images" not in kept["status"]
        assert "managedFields" not in kept["metadata"]
        assert parse_node(kept) == parse_node(whole)
