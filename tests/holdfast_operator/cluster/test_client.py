"""What is written goes to the object that was looked at, or nowhere."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client import ApiClient

from holdfast_operator.cluster.client import Cluster, JsonObject
from holdfast_operator.errors import ConflictError

OWNED = {"name": "s", "namespace": "ml", "ownerReferences": [{"uid": "job"}]}
SERVICE: JsonObject = {"apiVersion": "v1", "kind": "Service", "metadata": OWNED}


class Raced(Cluster):
    """A foreign Service comes after the operator has looked and before it writes."""

    def __init__(self, found: JsonObject | None) -> None:
        super().__init__(ApiClient())
        self.found = found
        self.stored: JsonObject = {"metadata": {"name": "s", "uid": "foreign"}}

    def _get(self, path: str) -> JsonObject | None:
        return self.found

    def _call(self, method: str, path: str, query: Any, body: Any = None, content_type: str = "") -> JsonObject:
        uid = body["metadata"].get("uid")
        if method == "POST" or (uid and uid != self.stored["metadata"]["uid"]):
            raise ConflictError("409")
        self.stored = body
        return self.stored


@pytest.mark.parametrize("found", [None, {"metadata": {**OWNED, "uid": "ours"}}])
def test_a_foreign_object_that_comes_meanwhile_is_not_taken_over(found: JsonObject | None) -> None:
    cluster = Raced(found)
    with pytest.raises(ConflictError):
        cluster.apply(SERVICE)
    assert cluster.stored["metadata"]["uid"] == "foreign"
