"""What is kept of an object says the same to whoever reads it."""

from __future__ import annotations

import copy
from typing import Any

from holdfast_operator.occupancy import usage_of
from holdfast_operator.seen import parse_node, parse_pod
from holdfast_operator.slim import slim, slim_pod

FIELDS = [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}]


def test_a_slim_pod_reads_like_the_whole_one(trained: Any) -> None:
    for body in trained.pods.values():
        whole = copy.deepcopy(body)
        whole["metadata"] |= {"managedFields": FIELDS, "annotations": {"note": "x" * 4096}}
        whole["spec"]["volumes"] = [{"name": "shm", "emptyDir": {}}]
        kept = slim_pod(whole)
        assert "managedFields" not in kept["metadata"]
        assert "volumes" not in kept["spec"]
        assert (parse_pod(kept), usage_of(kept)) == (parse_pod(whole), usage_of(whole))
        assert slim_pod(kept) == kept


def test_a_slim_node_reads_like_the_whole_one(trained: Any) -> None:
    for body in trained.nodes.values():
        whole = {**body, "metadata": {**body["metadata"], "managedFields": FIELDS}}
        whole["status"] = {**body["status"], "images": [{"names": ["train:1"]}]}
        kept = slim(whole)
        assert "images" not in kept["status"]
        assert "managedFields" not in kept["metadata"]
        assert parse_node(kept) == parse_node(whole)
