"""Defaults of the spec, the fields of the status, and what kubectl prints of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.errors import TestbedError

from .jobs import Jobs, job

STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Degraded",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-31T12:00:00Z",
            "reason": "AwaitingFence",
            "message": "delete node node-3",
        }
    ],
    "summary": "AwaitingFence",
    "readyWorkers": 2,
    "workers": 3,
    "replicas": 3,
    "selector": "holdfast.dev/job-name=gpt",
    "incidentCount": 1,
    "membership": {
        "revision": 7,
        "generation": 2,
        "publication": "p2-6f1e",
        "previous": [{"generation": 1, "publication": "p1-aa07", "members": ["uid-w0"]}],
        "gone": ["uid-w2"],
        "claims": [
            {
                "version": 1,
                "jobUID": "u",
                "publication": "p1-aa07",
                "generation": 1,
                "attempt": 3,
                "fromStep": 350,
            }
        ],
        "members": [
            {
                "index": 0,
                "pod": "gpt-w0",
                "podUID": "uid-w0",
                "ip": "10.244.0.7",
                "ports": {"store": 29400, "control": 29401},
                "node": "node-1",
            }
        ],
        "directives": {"drain": []},
    },
    "incidentsByCause": [
        {
            "cause": "OOM",
            "count": 1,
            "windowStartTime": "2026-01-31T12:00:00Z",
            "lastTime": "2026-01-31T12:00:00Z",
        }
    ],
    "incidents": [
        {
            "number": 1,
            "generation": 1,
            "attempt": 3,
            "cause": "OOM",
            "action": "Shrink",
            "reason": "OOMKilled",
            "message": "m",
            "pod": "gpt-w1",
            "node": "node-2",
            "detectedTime": "2026-01-31T12:00:00.000000Z",
            "decision": "ReplaceNodeByRule",
            "why": "ReplaceNode: rule a matches GPU error Xid 79",
        }
    ],
    "lastCheckpoint": {
        "step": 400,
        "generation": 2,
        "attempt": 1,
        "tier": "shared",
        "time": "2026-01-31T12:00:00.000000Z",
    },
    "startedFrom": {"after": 0, "generation": 1, "attempt": 1, "step": 0, "message": "training starts at step 0"},
    "progress": {"step": 412, "loss": 2.125, "throughput": 1536.0, "time": "2026-01-31T12:00:00.000000Z"},
    "goodput": {
        "ratio": 0.968,
        "productiveSeconds": 121,
        "lostSeconds": {"startup": 3, "restart": 1},
        "time": "2026-01-31T12:00:00.000000Z",
    },
    "divergences": {
        "count": 2,
        "last": {
            "rank": 1,
            "node": "node-2",
            "step": 400,
            "tensor": "model/weight",
            "repaired": True,
            "time": "2026-01-31T12:00:00Z",
        },
    },
    "avoidedNodes": [{"node": "node-3", "reason": "dead", "expirationTime": "2026-01-31T12:10:00Z"}],
    "operatorState": '{"version":1,"incarnations":4}',
    "startTime": "2026-01-31T12:00:00Z",
}


def test_the_smallest_job_gets_every_default(trial: Jobs) -> None:
    spec = trial.create(job(), dry_run="All")["spec"]
    del spec["workers"]["template"]
    assert spec == {
        "workers": {"replicas": 3, "spares": 0, "onDemandReplicas": 0},
        "elasticity": {
            "replicaStep": 1,
            "onFailure": "Shrink",
            "shrinkAfterSeconds": 0,
            "growCooldownSeconds": 300,
        },
        "recovery": {
            "budgets": [{"cause": "Application", "maxRestarts": 3, "windowSeconds": 21600}],
            "backoff": {"initialSeconds": 5, "maxSeconds": 300, "jitterPercent": 10},
            "avoidRepeatOffenders": 0,
        },
        "checkpoint": {"fullEvery": 1, "retention": {"keepLast": 3}, "resume": "Always"},
        "suspend": False,
        "startupDeadlineSeconds": 1200,
        "interruption": {"providers": ["AWS", "GCP", "Azure"], "checkpointDeadlineSeconds": 25},
        "nodeRemediation": {"policy": "Allow"},
        "scheduling": {"gang": "Gates", "nodeSharing": "Allow"},
        "rendezvous": {"backend": "Holdfast"},
    }


def test_a_whole_status_is_kept_to_the_last_field(running: Jobs) -> None:
    assert running.replace_status("gpt", STATUS)["status"] == STATUS


def test_spec_and_status_do_not_write_over_each_other(running: Jobs) -> None:
    running.patch_status("gpt", STATUS)
    changed = running.patch("gpt", ("spec.workers.replicas", 4), ("status", {"workers": 9}))
    assert changed["status"]["workers"] == 3
    changed = running.patch_status("gpt", {"workers": 4})
    assert changed["metadata"]["generation"] == 2


def test_kubectl_get_shows_a_line_that_tells_the_story(cluster: Cluster, running: Jobs, namespace: str) -> None:
    running.patch_status("gpt", STATUS)
    head, line = cluster.kubectl("get", "ftj", "-n", namespace).splitlines()
    assert head.split() == [
        "NAME",
        "STATUS",
        "READY",
        "WORKERS",
        "STEP",
        "INCIDENTS",
        "GOODPUT",
        "LAST",
        "CHECKPOINT",
        "AGE",
    ]
    assert line.split()[:7] == ["gpt", "AwaitingFence", "2", "3", "412", "1", "0.968"]
    assert cluster.kubectl("get", "holdfast", "-n", namespace).splitlines()[1].split()[0] == "gpt"


def test_kubectl_refuses_in_the_same_words(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(TestbedError, match=r"spec\.elasticity\.minReplicas.*lower minReplicas or raise"):
        cluster.kubectl(
            "apply", "-n", namespace, "-f", "-", input=json.dumps(job(("spec.elasticity.minReplicas", 4)))
        )
