"""Tokens, reports and resources that the operator must not trust, on a real API server."""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client
from players import token_for
from stage import Stage

SELECTOR = "holdfast.dev/job-name=gpt"


def test_token_of_another_pod_or_audience_is_refused(stage: Stage) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    one, other = sorted(player.agents.values(), key=lambda agent: agent.pod.metadata.name)
    report = json.dumps(
        {
            "version": 1,
            "sidecar": {"startId": "evil", "number": 10**9},
            "pod": {"namespace": stage.namespace, "name": "gpt-w0", "uid": one.uid, "node": ""},
            "launcher": None,
            "notices": [],
        }
    )
    assert other.call("POST", "/v1/report", report)[0] == 403
    wrong = token_for(stage.api, one.pod, "https://kubernetes.default.svc")
    assert one.call("POST", "/v1/report", report, token=wrong)[0] == 401
    assert one.call("GET", "/v1/membership", token="nonsense")[0] == 401
    stage.core.create_namespaced_pod(
        stage.namespace, {"metadata": {"name": "stranger"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    )
    token = token_for(stage.api, stage.pod("stranger"))
    assert one.call("GET", "/v1/membership", token=token)[0] == 404
    stage.core.delete_namespaced_pod("stranger", stage.namespace, grace_period_seconds=0)


JUNK: list[Any] = [None, 0, -1, 2**70, 1.5, "x", "", [], ["x"], {}, {"x": "y"}, True]


PLACES = ("world", "ports", "accepted", "checkpoints", "incidents", "notices", "exit", "ranks")


def test_a_launcher_that_reports_rubbish_harms_nobody(stage: Stage) -> None:
    stage.nodes(1)
    player = stage.run(replicas=1)
    (agent,) = player.agents.values()
    good = player._status(agent)
    for place, second, third in zip(PLACES, PLACES[1:] + PLACES[:1], PLACES[2:] + PLACES[:2], strict=True):
        for junk in JUNK:
            fields = {"generation": junk, "attempt": junk, "store": junk}
            # Three places at once: a pod may report so often only.
            assert agent.report({**good, place: junk, second: [junk], third: fields}) == 200
        complaints = [line for line in stage.operator.lines() if "unexpectedly" in line["message"]]
        assert complaints == [], place
        # A worker that says that it is in no world is not ready, until it says again that it is in one.
        stage.wait(lambda: stage.condition("Ready")["status"] == "True", f"ready again after rubbish in {place}")
    told = player.step
    stage.wait(lambda: stage.status()["progress"]["step"] > told, "the job goes on")


def test_a_status_of_the_future_is_read_as_far_as_it_goes(stage: Stage) -> None:
    stage.nodes(2)
    stage.run(replicas=2)
    state = {"version": 1, "workers": None, "countedBatch": "many", "new": {"a": [1]}}
    future = {"operatorState": json.dumps(state)}
    stage.custom.patch_namespaced_custom_object_status(
        "holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", "gpt", {"status": future}
    )
    before = stage.launchers[0].step
    stage.wait(lambda: stage.status()["progress"]["step"] > before + 3, "the job goes on")
    assert len(stage.members()) == 2
    complaints = [line for line in stage.operator.lines() if "unexpectedly" in line["message"]]
    assert complaints == []


def test_resource_unreadable_by_this_version_harms_nobody(stage: Stage, admin: Any) -> None:
    """As after a downgrade: the stored object has a shape that this operator does not know."""
    stage.nodes(1)
    extensions = client.ApiextensionsV1Api(admin)
    name = "faulttolerantjobs.holdfast.dev"
    strict = json.loads(extensions.read_custom_resource_definition(name, _preload_content=False).data)
    loose = json.loads(json.dumps(strict))
    schema = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema["x-kubernetes-validations"] = schema["x-kubernetes-validations"][:1]  # the others name fields of the spec
    extensions.patch_custom_resource_definition(name, [{"op": "replace", "path": "/spec", "value": loose["spec"]}])
    body = stage.job("odd", replicas=1)
    body["spec"] = {"workers": {"count": "three"}, "ofTheFuture": True}
    try:
        stage.wait(lambda: created(stage, body), "the odd job is taken")
        stage.wait(lambda: stage.condition("Degraded", "odd")["reason"] == "InvalidSpec", "it says so")
    finally:
        extensions.patch_custom_resource_definition(
            name, [{"op": "replace", "path": "/spec", "value": strict["spec"]}]
        )
        stage.wait(lambda: not taken(stage, body), "the strict schema is in force again")
    assert "spec.workers" in stage.condition("Degraded", "odd")["message"]
    stage.run("good", replicas=1)
    assert stage.operator.get("/healthz")[0] == 200


def created(stage: Stage, body: dict[str, Any]) -> bool:
    try:
        stage.apply(body)
    except client.ApiException as error:
        if error.status not in (400, 422):
            raise
        return False
    return True


def taken(stage: Stage, body: dict[str, Any]) -> bool:
    """Whether the schema that is served now would take another one like it."""
    another = {**body, "metadata": {**body["metadata"], "name": "another"}}
    where = ("holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs")
    try:
        stage.custom.create_namespaced_custom_object(*where, another, dry_run="All")
    except client.ApiException as error:
        if error.status not in (400, 422):
            raise
        return False
    return True
