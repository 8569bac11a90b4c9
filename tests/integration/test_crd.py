"""The schema of FaultTolerantJob, judged by a real API server: what it refuses, and in which words."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from holdfast_testbed.cluster.cluster import Cluster

GROUP = ("holdfast.dev", "v1alpha1")
PLURAL = "faulttolerantjobs"
REMOVE = object()

SMALLEST: dict[str, Any] = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "FaultTolerantJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "workers": {
            "replicas": 3,
            "template": {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}},
        }
    },
}
POD = "spec.workers.template.spec"
TRAINER = f"{POD}.containers.0"


def job(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The smallest job with values put at dotted paths."""
    made = copy.deepcopy(SMALLEST)
    for path, value in changes:
        put(made, path.split("."), value)
    return made


def put(node: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    if value is REMOVE:
        del node[path[-1]]
    elif isinstance(node, list):
        node.append(value)
    else:
        node[path[-1]] = value


RULES = "spec.recovery.rules"
VOLUME, OBJECT = "spec.checkpoint.volume.claimName", "spec.checkpoint.object"
MEMORY = "spec.checkpoint.memory"
LOCAL = "spec.checkpoint.local"


def rule(**asked: Any) -> dict[str, Any]:
    """A rule, as it stands in a job."""
    return {"name": "a", "action": "Ignore", **asked}


BAD: list[tuple[str, list[tuple[str, Any]], str]] = [
    # -- what is needed
    ("no spec", [("spec", REMOVE)], "spec: Required value"),
    ("no workers", [("spec.workers", REMOVE)], "spec.workers: Required value"),
    ("no replicas", [("spec.workers.replicas", REMOVE)], "spec.workers.replicas: Required value"),
    ("no template", [("spec.workers.template", REMOVE)], "spec.workers.template: Required value"),
    ("no pod spec", [("spec.workers.template", {})], "spec.workers.template.spec: Required value"),
    ("no containers", [(POD, {})], "template.spec.containers: Required value"),
    ("empty containers", [(f"{POD}.containers", [])], "should have at least 1 items"),
    ("container without a name", [(TRAINER + ".name", REMOVE)], "containers[0].name: Required value"),
    ("container without an image", [(TRAINER + ".image", REMOVE)], "containers[0].image: Required value"),
    ("empty image", [(TRAINER + ".image", "")], "should be at least 1 chars long"),
    # -- names
    ("name too long", [("metadata.name", "g" * 51)], "at most 50 characters from a-z"),
    ("name begins with a digit", [("metadata.name", "7b")], "start with a letter"),
    ("name with a dot", [("metadata.name", "gpt.small")], "it becomes the name of the job's Service"),
    ("container name with capitals", [(TRAINER + ".name", "Trainer")], "should match"),
    # -- numbers
    ("no workers at all", [("spec.workers.replicas", 0)], "greater than or equal to 1"),
    ("too many workers", [("spec.workers.replicas", 1025)], "less than or equal to 1024"),
    ("replicas as a word", [("spec.workers.replicas", "three")], 'must be of type integer: "string"'),
    ("half a worker", [("spec.workers.replicas", 2.5)], "must be of type integer"),
    ("no process", [("spec.workers.processesPerWorker", 0)], "greater than or equal to 1"),
    ("too many processes", [("spec.workers.processesPerWorker", 65)], "less than or equal to 64"),
    ("processes as a word", [("spec.workers.processesPerWorker", "auto")], "must be of type integer"),
    ("startup deadline too short", [("spec.startupDeadlineSeconds", 9)], "greater than or equal to 10"),
    ("startup deadline too long", [("spec.startupDeadlineSeconds", 86401)], "less than or equal to 86400"),
    ("step timeout as a word", [("spec.hangDetection", {"stepTimeoutSeconds": "Auto"})], "must be of type integer"),
    ("no time for a step", [("spec.hangDetection", {"stepTimeoutSeconds": 0})], "greater than or equal to 1"),
    ("unknown mode", [("spec.hangDetection", {"mode": "Off"})], 'supported values: "Enabled", "Disabled"'),
    ("no time for a batch", [("spec.hangDetection", {"dataTimeoutSeconds": 0})], "greater than or equal to 1"),
    (
        "a hang that is ignored",
        [("spec.hangDetection", {"action": "Ignore"})],
        "hangDetection.action: Unsupported value",
    ),
    # -- the template
    (
        "restart by the kubelet",
        [(f"{POD}.restartPolicy", "Always")],
        "Holdfast decides what to restart and counts it",
    ),
    ("restart on failure", [(f"{POD}.restartPolicy", "OnFailure")], "must be Never or absent"),
    ("pinned to a node", [(f"{POD}.nodeName", "node-1")], "use nodeSelector or affinity"),
    (
        "own scheduling gate",
        [(f"{POD}.schedulingGates", [{"name": "x"}])],
        "Holdfast sets its own gate until all workers",
    ),
    (
        "container with the sidecar's name",
        [(f"{POD}.containers.1", {"name": "holdfast-sidecar", "image": "x"})],
        "the container name holdfast-sidecar is reserved: choose another name",
    ),
    (
        "init container with the sidecar's name",
        [(f"{POD}.initContainers", [{"name": "holdfast-sidecar", "image": "x"}])],
        "the container name holdfast-sidecar is reserved: choose another name",
    ),
    (
        "two trainers",
        [(f"{POD}.containers.1", {"name": "trainer", "image": "x"})],
        'containers[1]: Duplicate value: {"name":"trainer"}',
    ),
    (
        "reserved variable",
        [(TRAINER + ".env", [{"name": "HOLDFAST_POD_UID", "value": "x"}])],
        "names begin with HOLDFAST_ are set by Holdfast",
    ),
    (
        "reserved variable in an init container",
        [(f"{POD}.initContainers", [{"name": "a", "image": "x", "env": [{"name": "HOLDFAST_X"}]}])],
        "names begin with HOLDFAST_ are set by Holdfast",
    ),
    (
        "reserved volume",
        [(f"{POD}.volumes", [{"name": "holdfast-run", "emptyDir": {}}])],
        "names begin with holdfast- are added by Holdfast: choose another name",
    ),
    (
        "reserved label",
        [("spec.workers.template.metadata.labels", {"holdfast.dev/job-name": "x"})],
        "labels under holdfast.dev/ are set by Holdfast: remove them",
    ),
    (
        "reserved annotation",
        [("spec.workers.template.metadata.annotations", {"holdfast.dev/x": "y"})],
        "annotations under holdfast.dev/ are set by Holdfast: remove them",
    ),
    (
        "misspelt field in the template's metadata",
        [("spec.workers.template.metadata.lables", {"a": "b"})],
        'unknown field "spec.workers.template.metadata.lables"',
    ),
    # -- elasticity
    (
        "fewest above wanted",
        [("spec.elasticity.minReplicas", 4)],
        "lower minReplicas or raise workers.replicas",
    ),
    ("fewest is none", [("spec.elasticity.minReplicas", 0)], "greater than or equal to 1"),
    (
        "wanted is no multiple of the step",
        [("spec.elasticity.replicaStep", 2)],
        "workers.replicas is not a multiple of elasticity.replicaStep",
    ),
    (
        "fewest is no multiple of the step",
        [("spec.workers.replicas", 4), ("spec.elasticity", {"replicaStep": 2, "minReplicas": 3})],
        "minReplicas is not a multiple of replicaStep",
    ),
    ("no step", [("spec.elasticity.replicaStep", 0)], "greater than or equal to 1"),
    ("wanted above the most", [("spec.elasticity.maxReplicas", 2)], "lower it or raise maxReplicas"),
    (
        "the most is no multiple of the step",
        [("spec.workers.replicas", 4), ("spec.elasticity", {"replicaStep": 2, "maxReplicas": 5})],
        "maxReplicas is not a multiple of replicaStep",
    ),
    (
        "a wait before a shrink that never comes",
        [("spec.elasticity", {"onFailure": "Replace", "shrinkAfterSeconds": 60})],
        "shrinkAfterSeconds requires onFailure Shrink",
    ),
    ("a wait below none", [("spec.elasticity.shrinkAfterSeconds", -1)], "greater than or equal to 0"),
    # -- placement
    (
        "more off spot capacity than there are",
        [("spec.workers.onDemandReplicas", 4)],
        "onDemandReplicas is above workers.replicas: lower it or raise workers.replicas",
    ),
    (
        "spares that could never take a place",
        [("spec.workers.spares", 1), ("spec.elasticity.onFailure", "Wait")],
        "with Wait a lost worker keeps its place",
    ),
    ("too many spares", [("spec.workers.spares", 65)], "less than or equal to 64"),
    ("a topology without a policy", [("spec.scheduling.topologyKey", "zone")], "set both, or neither"),
    ("a policy without a topology", [("spec.scheduling.topologyPolicy", "Packed")], "set both, or neither"),
    (
        "a backend that torch no longer finds a server for",
        [("spec.rendezvous.backend", "Etcd")],
        'supported values: "Holdfast", "C10d", "None"',
    ),
    (
        "spares without the launcher",
        [("spec.rendezvous.backend", "C10d"), ("spec.workers.spares", 1)],
        "or remove spares",
    ),
    (
        "preflight without the launcher",
        [("spec.rendezvous.backend", "None"), ("spec.preflight", {"checks": ["GPU"]})],
        "or remove preflight",
    ),
    (
        "hang detection without the launcher",
        [("spec.rendezvous.backend", "C10d"), ("spec.hangDetection", {})],
        "or remove hangDetection",
    ),
    (
        "a memory tier without the launcher",
        [("spec.rendezvous.backend", "C10d"), (VOLUME, "c"), (MEMORY, {"sizeLimit": "1Gi"})],
        "or use only checkpoint.volume",
    ),
    (
        "steps of replicas without the launcher",
        [("spec.rendezvous.backend", "C10d"), ("spec.elasticity", {"replicaStep": 3})],
        "or replicaStep to 1",
    ),
    (
        "a packed job without a gang",
        [("spec.scheduling", {"topologyKey": "zone", "topologyPolicy": "Packed", "gang": "None"})],
        "set gang to Gates",
    ),
    (
        "unknown policy",
        [("spec.scheduling", {"topologyKey": "zone", "topologyPolicy": "Stacked"})],
        'supported values: "Spread", "Packed"',
    ),
    (
        "what is no label",
        [("spec.scheduling", {"topologyKey": "a b", "topologyPolicy": "Packed"})],
        "spec.scheduling.topologyKey in body should match",
    ),
    ("a queue that is no name", [("spec.scheduling.queue", "Team A")], "scheduling.queue in body should match"),
    (
        "two queues",
        [
            ("spec.scheduling.queue", "a"),
            ("spec.workers.template.metadata.labels", {"kueue.x-k8s.io/queue-name": "b"}),
        ],
        "name different queues: remove the label",
    ),
    ("unknown reaction", [("spec.elasticity.onFailure", "Panic")], 'supported values: "Shrink", "Replace", "Wait"'),
    # -- recovery
    (
        "budget for an unknown cause",
        [("spec.recovery.budgets", [{"cause": "Cosmic", "maxRestarts": 1}])],
        'supported values: "Application", "Infrastructure", "Interruption", "OOM"',
    ),
    (
        "two budgets for one cause",
        [("spec.recovery.budgets", [{"cause": "OOM", "maxRestarts": 1}, {"cause": "OOM", "maxRestarts": 2}])],
        'Duplicate value: {"cause":"OOM"}',
    ),
    ("budget without a number", [("spec.recovery.budgets", [{"cause": "OOM"}])], "maxRestarts: Required value"),
    (
        "negative budget",
        [("spec.recovery.budgets", [{"cause": "OOM", "maxRestarts": -1}])],
        "greater than or equal to 0",
    ),
    (
        "window too short",
        [("spec.recovery.budgets", [{"cause": "OOM", "maxRestarts": 1, "windowSeconds": 5}])],
        "greater than or equal to 60",
    ),
    (
        "first pause above the longest",
        [("spec.recovery.backoff", {"initialSeconds": 60, "maxSeconds": 30})],
        "initialSeconds is above maxSeconds",
    ),
    (
        "first pause above the longest by default",
        [("spec.recovery.backoff", {"initialSeconds": 600})],
        "lower it or raise maxSeconds",
    ),
    ("more jitter than pause", [("spec.recovery.backoff", {"jitterPercent": 101})], "less than or equal to 100"),
    # -- rules
    ("rule without a name", [(RULES, [{"action": "Ignore", "onHang": True}])], "rules[0].name: Required value"),
    ("rule without an action", [(RULES, [{"name": "a", "onHang": True}])], "rules[0].action: Required value"),
    (
        "rule that asks for nothing",
        [(RULES, [{"name": "a", "action": "Ignore"}])],
        "the rule has no condition: set at least one of",
    ),
    ("two rules of one name", [(RULES, [rule(onHang=True), rule(onOOM="Any")])], 'Duplicate value: {"name":"a"}'),
    ("unknown action", [(RULES, [rule(action="Pray", onHang=True)])], "rules[0].action: Unsupported value"),
    ("unknown cause of a rule", [(RULES, [rule(cause="Fate", onHang=True)])], "rules[0].cause: Unsupported value"),
    ("onHang: false", [(RULES, [rule(onHang=False)])], "rules[0].onHang: Unsupported value"),
    ("unknown signal", [(RULES, [rule(onSignals=["SIGNAL"])])], "onSignals[0]: Unsupported value"),
    ("unknown memory", [(RULES, [rule(onOOM="Node")])], "rules[0].onOOM: Unsupported value"),
    ("exit code 0", [(RULES, [rule(onExitCodes={"operator": "In", "values": [0]})])], "greater than or equal to 1"),
    (
        "exit code 256",
        [(RULES, [rule(onExitCodes={"operator": "In", "values": [256]})])],
        "less than or equal to 255",
    ),
    ("no exit code", [(RULES, [rule(onExitCodes={"operator": "In", "values": []})])], "at least 1 items"),
    ("exit codes alone", [(RULES, [rule(onExitCodes={"values": [1]})])], "onExitCodes.operator: Required value"),
    ("no GPU error", [(RULES, [rule(onGpuErrors={})])], "onGpuErrors is empty: set xids"),
    ("condition without a type", [(RULES, [rule(onPodConditions=[{}])])], "onPodConditions[0].type: Required value"),
    (
        "ladder that goes down",
        [("spec.recovery.escalation", {"actions": ["RestartGang", "InPlace"]})],
        "the actions must be in the order",
    ),
    (
        "a rung twice",
        [("spec.recovery.escalation", {"actions": ["InPlace", "InPlace"]})],
        "each at most once",
    ),
    ("one rung", [("spec.recovery.escalation", {"actions": ["InPlace"]})], "should have at least 2 items"),
    ("ladder without rungs", [("spec.recovery.escalation", {"failures": 2})], "actions: Required value"),
    ("too patient with nodes", [("spec.recovery.avoidRepeatOffenders", 11)], "less than or equal to 10"),
    # -- checkpoints
    ("no steps between checkpoints", [("spec.checkpoint.intervalSteps", 0)], "greater than or equal to 1"),
    ("no time between checkpoints", [("spec.checkpoint.intervalSeconds", 0)], "greater than or equal to 1"),
    ("negative interval", [("spec.checkpoint.intervalSteps", -5)], "greater than or equal to 1"),
    ("interval with a unit", [("spec.checkpoint.intervalSeconds", "30s")], "must be of type integer"),
    (
        "two intervals",
        [("spec.checkpoint", {"intervalSteps": 50, "intervalSeconds": 300})],
        "both intervalSteps and intervalSeconds: set only one of them",
    ),
    ("no full checkpoint", [("spec.checkpoint.fullEvery", 0)], "spec.checkpoint.fullEvery"),
    ("endless deltas", [("spec.checkpoint.fullEvery", 101)], "spec.checkpoint.fullEvery"),
    (
        "a threshold without deltas",
        [("spec.checkpoint.deltaThreshold", 0.001)],
        "set fullEvery above 1",
    ),
    ("no threshold", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": 0})], "deltaThreshold"),
    ("a threshold too high", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": 1.5})], "deltaThreshold"),
    ("a threshold in words", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": "low"})], "deltaThreshold"),
    ("interval as a word", [("spec.checkpoint.intervalSteps", "Auto")], "must be of type integer"),
    (
        "interval of more than 30 days",
        [("spec.checkpoint.intervalSeconds", 2592001)],
        "less than or equal to 2592000",
    ),
    ("interval as a fraction", [("spec.checkpoint.intervalSteps", 0.5)], "must be of type integer"),
    ("volume without a claim", [("spec.checkpoint.volume", {})], "volume.claimName: Required value"),
    ("claim with a bad name", [("spec.checkpoint.volume.claimName", "My Claim")], "should match"),
    ("nothing kept", [("spec.checkpoint.retention.keepLast", 0)], "greater than or equal to 1"),
    ("the best of what", [("spec.checkpoint.retention.keepBest", [{"mode": "Max"}])], "metric"),
    ("a metric in words", [("spec.checkpoint.retention.keepBest", [{"metric": "val loss"}])], "should match"),
    (
        "a mode that is none",
        [("spec.checkpoint.retention.keepBest", [{"metric": "a", "mode": "min"}])],
        '"Min", "Max"',
    ),
    ("a metric twice", [("spec.checkpoint.retention.keepBest", [{"metric": "a"}] * 2)], "Duplicate value"),
    ("no day kept", [("spec.checkpoint.retention.keepDaily", 0)], "greater than or equal to 1"),
    ("hours beyond a year", [("spec.checkpoint.retention.keepHours", 8761)], "less than or equal to 8760"),
    (
        "an object store without a volume",
        [("spec.checkpoint.object", {"url": "s3://b/p"})],
        "copies of the checkpoints in checkpoint.volume",
    ),
    ("an object store without a URL", [(VOLUME, "c"), (OBJECT, {})], "object.url: Required value"),
    ("a URL without a scheme", [(VOLUME, "c"), (OBJECT, {"url": "bucket/prefix"})], "should match"),
    ("credentials in a URL", [(VOLUME, "c"), (OBJECT, {"url": "s3://key:secret@b/p"})], "should match"),
    (
        "a limit without bytes",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b", "maxBytesPerSecond": "0"})],
        "must be above 0",
    ),
    (
        "no day of copies kept",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b", "retention": {"keepDaily": 0}})],
        "object.retention.keepDaily",
    ),
    (
        "copies now and then",
        [(VOLUME, "c"), (OBJECT, {"url": "s3://b", "intervalSeconds": "daily"})],
        "of type integer",
    ),
    ("memory of no size", [(MEMORY, {})], "memory.sizeLimit: Required value"),
    (
        "memory in words",
        [(VOLUME, "c"), (MEMORY, {"sizeLimit": "much"})],
        "should match",
    ),
    (
        "memory without a volume",
        [(MEMORY, {"sizeLimit": "1Gi"})],
        "checkpoint.memory requires checkpoint.volume",
    ),
    ("a disk of no size", [(VOLUME, "c"), (LOCAL, {})], "local.sizeLimit: Required value"),
    ("a disk in words", [(VOLUME, "c"), (LOCAL, {"sizeLimit": "much"})], "should match"),
    (
        "a commit on disk after no step",
        [(VOLUME, "c"), (LOCAL, {"sizeLimit": "1Gi", "intervalSteps": 0})],
        "local.intervalSteps: Invalid value",
    ),
    ("a disk without a volume", [(LOCAL, {"sizeLimit": "1Gi"})], "checkpoint.local requires checkpoint.volume"),
    (
        "a local tier without the launcher",
        [("spec.rendezvous.backend", "C10d"), (VOLUME, "c"), (LOCAL, {"sizeLimit": "1Gi"})],
        "or use only checkpoint.volume",
    ),
    (
        "copies more often than what is copied",
        [(VOLUME, "c"), (MEMORY, {"sizeLimit": "1Gi", "intervalSteps": 2}), ("spec.checkpoint.peer", {})],
        "peer.intervalSteps is not a multiple of memory.intervalSteps",
    ),
    ("copies of nothing", [("spec.checkpoint.peer", {})], "checkpoint.peer requires checkpoint.memory"),
    ("unknown resume", [("spec.checkpoint.resume", "Maybe")], 'supported values: "Always", "Never"'),
    # -- interruption
    ("unknown cloud", [("spec.interruption.providers", ["Acme"])], 'supported values: "AWS", "GCP", "Azure"'),
    ("a cloud twice", [("spec.interruption.providers", ["AWS", "AWS"])], 'Duplicate value: "AWS"'),
    ("no time to commit", [("spec.interruption.checkpointDeadlineSeconds", 4)], "greater than or equal to 5"),
    # -- preflight
    ("no check", [("spec.preflight.checks", [])], "should have at least 1 items"),
    (
        "an unknown check",
        [("spec.preflight.checks", ["Moon"])],
        '"GPU", "Storage", "ObjectStore", "Network", "Clock"',
    ),
    ("unknown answer", [("spec.preflight.onFailure", "Pray")], 'supported values: "AvoidNode", "Fail", "Ignore"'),
    ("no time to check", [("spec.preflight.timeoutSeconds", 4)], "greater than or equal to 5"),
    ("room in words", [("spec.preflight.storage.minFreeBytes", "much")], "should match"),
    ("no pace", [("spec.preflight.storage.minWriteBytesPerSecond", "0Mi")], "must be above 0, for example 100Mi"),
    ("a negative pace", [("spec.preflight.storage.minWriteBytesPerSecond", -1)], "must be above 0"),
    ("no skew at all", [("spec.preflight.clock.maxSkewSeconds", 0)], "greater than or equal to 1"),
    # -- life cycle
    ("suspended as a word", [("spec.suspend", "yes")], 'must be of type boolean: "string"'),
    ("no time to be active", [("spec.activeDeadlineSeconds", 0)], "greater than or equal to 1"),
    ("a life after the end below none", [("spec.ttlSecondsAfterFinished", -1)], "greater than or equal to 0"),
    # -- fields that are not there
    ("a field of later versions", [("spec.networking", {})], 'unknown field "spec.networking"'),
    ("a misspelt field", [("spec.elasticity.minReplica", 2)], 'unknown field "spec.elasticity.minReplica"'),
]

LADDER = ("InPlace", "RecreatePod", "ReplaceNode", "RestartGang", "FailJob")
ALL_RULES = [
    rule(name="codes", onExitCodes={"operator": "NotIn", "values": [1, 255]}),
    rule(name="signals", onSignals=["SIGSEGV", "SIGKILL"]),
    rule(name="memory", onOOM="Process", cause="OOM"),
    rule(name="conditions", onPodConditions=[{"type": "DisruptionTarget"}, {"type": "Ready", "status": "False"}]),
    rule(name="gpus", onGpuErrors={"xids": [79, 48], "kinds": ["DoubleBitEcc"]}),
    rule(name="hang-of-memory", onHang=True, onOOM="Any"),
]

GOOD: list[tuple[str, list[tuple[str, Any]]]] = [
    ("the smallest", []),
    ("longest name", [("metadata.name", "g" * 50)]),
    ("a number of processes", [("spec.workers.processesPerWorker", 8)]),
    ("no hang detection", [("spec.hangDetection", {"mode": "Disabled"})]),
    ("a queue", [("spec.scheduling.queue", "team-a")]),
    ("an interval in steps", [("spec.checkpoint.intervalSteps", 50)]),
    ("an interval of an hour", [("spec.checkpoint.intervalSeconds", 3600)]),
    ("sizes of all kinds", [("spec.preflight.storage", {"minFreeBytes": 4096, "minWriteBytesPerSecond": "1.5G"})]),
    ("deltas", [("spec.checkpoint.fullEvery", 8)]),
    ("deltas that leave out little", [("spec.checkpoint", {"fullEvery": 8, "deltaThreshold": 0.0001})]),
    ("copies to an object store", [(VOLUME, "c"), (OBJECT, {"url": "s3://b/p", "secretRef": {"name": "s"}})]),
    ("steps that fit", [("spec.workers.replicas", 4), ("spec.elasticity", {"replicaStep": 2, "minReplicas": 2})]),
    ("restartPolicy spelled out", [(f"{POD}.restartPolicy", "Never")]),
    ("no provider", [("spec.interruption.providers", [])]),
    ("no budget at all", [("spec.recovery.budgets", [])]),
    ("suspended from the start", [("spec.suspend", True)]),
    ("deleted at once after its end", [("spec.ttlSecondsAfterFinished", 0)]),
    ("a preflight by its defaults", [("spec.preflight", {})]),
    ("a preflight of the store", [("spec.preflight", {"checks": ["ObjectStore"]})]),
    ("a preflight of the clock", [("spec.preflight", {"checks": ["Clock"], "clock": {"maxSkewSeconds": 60}})]),
    ("the whole ladder", [("spec.recovery.escalation", {"actions": list(LADDER)})]),
    ("rules of all kinds", [(RULES, ALL_RULES)]),
    (
        "pod fields that the schema does not list",
        [
            (f"{POD}.tolerations", [{"key": "gpu", "operator": "Exists"}]),
            (f"{POD}.nodeSelector", {"pool": "a"}),
            (TRAINER + ".resources", {"limits": {"nvidia.com/gpu": 8}}),
            (TRAINER + ".env", [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]),
            (f"{POD}.volumes", [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]),
        ],
    ),
]


class Jobs:
    """Jobs of one namespace."""

    def __init__(self, api: client.CustomObjectsApi, namespace: str) -> None:
        self._api = api
        self._where = (*GROUP, namespace, PLURAL)

    def create(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        made: dict[str, Any] = self._api.create_namespaced_custom_object(
            *self._where, body, field_validation="Strict", **options
        )
        return made

    def patch(self, name: str, *changes: tuple[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for path, value in changes:
            put(body, path.split("."), value)
        changed: dict[str, Any] = self._api.patch_namespaced_custom_object(*self._where, name, body)
        return changed

    def replace_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        body = self._api.get_namespaced_custom_object(*self._where, name)
        changed: dict[str, Any] = self._api.replace_namespaced_custom_object_status(
            *self._where, name, {**body, "status": status}
        )
        return changed

    def patch_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = self._api.patch_namespaced_custom_object_status(
            *self._where, name, {"status": status}
        )
        return changed


@pytest.fixture
def jobs(admin: Any, namespace: str) -> Jobs:
    return Jobs(client.CustomObjectsApi(admin), namespace)


@pytest.fixture(scope="module")
def trial(admin: Any, cluster: Cluster) -> Jobs:
    """Creates in the default namespace, dry runs only."""
    return Jobs(client.CustomObjectsApi(admin), "default")


def message(error: ApiException) -> str:
    return str(json.loads(error.body)["message"])


def test_the_table_is_long_enough_and_names_each_case_once() -> None:
    names = [name for name, _changes, _says in BAD]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize(("changes", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_job_is_refused_in_words_that_help(trial: Jobs, changes: list[tuple[str, Any]], says: str) -> None:
    with pytest.raises(ApiException) as caught:
        trial.create(job(*changes), dry_run="All")
    assert caught.value.status in (400, 422)
    assert says in message(caught.value)


@pytest.mark.parametrize("changes", [g[1] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_good_job_is_taken_as_it_is(trial: Jobs, changes: list[tuple[str, Any]]) -> None:
    wanted = job(*changes)
    made = trial.create(wanted, dry_run="All")
    assert made["spec"]["workers"]["template"] == wanted["spec"]["workers"]["template"]


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


CHANGES_REFUSED = [
    ("another image", [(f"{POD}.containers", [{"name": "trainer", "image": "train:2"}])], "template is immutable"),
    (
        "a pod field that the schema does not list",
        [(f"{POD}.priorityClassName", "high")],
        "template is immutable",
    ),
    (
        "an unlisted field for another",
        [(f"{POD}.nodeSelector", None), (f"{POD}.priorityClassName", "high")],
        "template is immutable",
    ),
    (
        "another variable by another way",
        [(f"{POD}.containers", [{"name": "trainer", "image": "train:1", "env": [{"name": "A", "valueFrom": {}}]}])],
        "template is immutable",
    ),
    ("a group", [(f"{POD}.schedulingGroup", {"podGroupName": "group"})], "template is immutable"),
    (
        "another kind of volume",
        [(f"{POD}.volumes", [{"name": "data", "emptyDir": {}}])],
        "template is immutable",
    ),
    ("another label", [("spec.workers.template.metadata.labels", {"a": "b"})], "delete the job and apply it again"),
    ("more processes", [("spec.workers.processesPerWorker", 2)], "processesPerWorker is immutable"),
    ("processes by the GPUs", [("spec.workers.processesPerWorker", None)], "processesPerWorker is immutable"),
    ("exclusive nodes", [("spec.scheduling.nodeSharing", "Exclusive")], "scheduling is immutable"),
    ("another queue", [("spec.scheduling.queue", "b")], "scheduling is immutable"),
    ("another backend", [("spec.rendezvous.backend", "C10d")], "rendezvous is immutable"),
    ("another volume", [("spec.checkpoint.volume.claimName", "other")], "checkpoint.volume is immutable"),
    ("no volume", [("spec.checkpoint.volume", None)], "checkpoint.volume is immutable"),
    ("no volume by the back door", [("spec.checkpoint", None)], "checkpoint.volume is immutable"),
    ("fewer than the fewest", [("spec.workers.replicas", 1)], "minReplicas is above workers.replicas"),
]


@pytest.fixture
def running(jobs: Jobs) -> Jobs:
    jobs.create(
        job(
            ("spec.elasticity.minReplicas", 2),
            ("spec.workers.processesPerWorker", 1),
            ("spec.checkpoint.volume.claimName", "checkpoints"),
            (f"{POD}.nodeSelector", {"pool": "a"}),
            (f"{POD}.volumes", [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]),
            (f"{TRAINER}.env", [{"name": "A", "value": "1"}]),
        )
    )
    return jobs


@pytest.mark.parametrize(("changes", "says"), [c[1:] for c in CHANGES_REFUSED], ids=[c[0] for c in CHANGES_REFUSED])
def test_a_change_that_cannot_be_carried_out_is_refused(
    running: Jobs, changes: list[tuple[str, Any]], says: str
) -> None:
    with pytest.raises(ApiException) as caught:
        running.patch("gpt", *changes)
    assert says in message(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        ("spec.workers.replicas", 5),
        ("spec.elasticity.minReplicas", 1),
        ("spec.elasticity.maxReplicas", 8),
        ("spec.elasticity.onFailure", "Replace"),
        ("spec.recovery.budgets", []),
        (RULES, ALL_RULES),
        ("spec.recovery.escalation", {"actions": ["InPlace", "FailJob"]}),
        ("spec.checkpoint.intervalSteps", 10),
        ("spec.checkpoint.retention.keepLast", 9),
        ("spec.checkpoint.retention", {"keepHours": 6, "keepDaily": 7, "keepWeekly": 13, "keepEvery": 10000}),
        ("spec.checkpoint.retention.keepBest", [{"metric": "val_loss", "mode": "Min", "count": 3}]),
        ("spec.startupDeadlineSeconds", 60),
    ],
    ids=lambda change: change[0],
)
def test_what_a_running_job_can_follow_may_change(running: Jobs, change: tuple[str, Any]) -> None:
    assert running.patch("gpt", change)["metadata"]["generation"] == 2


SUSPENDED = {
    "type": "Suspended",
    "status": "True",
    "observedGeneration": 2,
    "lastTransitionTime": "2026-01-31T12:00:00Z",
    "reason": "Suspended",
    "message": "no worker is left",
}
IN_SUSPENSION: list[tuple[str, Any]] = [
    (f"{POD}.containers", [{"name": "trainer", "image": "train:2"}]),
    (f"{POD}.priorityClassName", "high"),
    ("spec.workers.processesPerWorker", 2),
    ("spec.workers.processesPerWorker", None),
]


@pytest.mark.parametrize("change", IN_SUSPENSION, ids=lambda change: f"{change[0]}={change[1]}"[-60:])
def test_a_suspended_job_may_change_once_no_worker_is_left(running: Jobs, change: tuple[str, Any]) -> None:
    running.patch("gpt", ("spec.suspend", True))
    with pytest.raises(ApiException, match="unless the job's condition Suspended is true"):
        running.patch("gpt", change)
    running.patch_status("gpt", {"conditions": [SUSPENDED]})
    assert running.patch("gpt", change)["metadata"]["generation"] == 3
    running.patch("gpt", change, ("spec.suspend", False))
    with pytest.raises(ApiException, match="immutable"):
        running.patch("gpt", ("spec.workers.processesPerWorker", 3))


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
    "avoidedNodes": [{"node": "node-3", "reason": "dead", "expirationTime": "2026-01-31T12:10:00Z"}],
    "operatorState": '{"version":1,"incarnations":4}',
    "startTime": "2026-01-31T12:00:00Z",
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
    from holdfast_testbed.errors import TestbedError

    with pytest.raises(TestbedError, match=r"spec\.elasticity\.minReplicas.*lower minReplicas or raise"):
        cluster.kubectl(
            "apply", "-n", namespace, "-f", "-", input=json.dumps(job(("spec.elasticity.minReplicas", 4)))
        )


def test_every_field_is_explained(cluster: Cluster) -> None:
    """`kubectl explain` is the documentation: no field of spec or status is without words, top to bottom."""
    crd = json.loads(cluster.kubectl("get", "crd", "faulttolerantjobs.holdfast.dev", "-o", "json"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = schema["properties"]["spec"]
    assert [path for path, node in walk(spec, "spec") if not node.get("description")] == []
    status = schema["properties"]["status"]["properties"]
    assert [name for name, node in status.items() if not node.get("description")] == []


def walk(node: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += walk(child, f"{path}.{name}")
    if node.get("items", {}).get("properties"):
        found += walk(node["items"], f"{path}[]")
    return found


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("ftj.spec.recovery", "How many failures the job tolerates before it fails"),
        ("ftj.spec.recovery.budgets", "A cause without a budget has no limit"),
        ("ftj.spec.elasticity.onFailure", "Replace: the other workers wait for the replacement"),
        ("ftj.spec.checkpoint.intervalSteps", "Holdfast chooses an interval between 10 seconds and 30 minutes"),
    ],
)
def test_kubectl_explain_reads_like_documentation(cluster: Cluster, path: str, says: str) -> None:
    text = " ".join(cluster.kubectl("explain", path).split())
    assert says in text


README = Path(__file__).resolve().parents[2] / "charts" / "holdfast" / "README.md"
DEFINITION = README.parent / "crds" / "holdfast.dev_faulttolerantjobs.yaml"


def test_a_definition_that_helm_installed_is_upgraded_as_documented(cluster: Cluster, tmp_path: Path) -> None:
    """The definition has to differ: the same one twice raises no conflict."""
    command = re.search(r"`kubectl (apply [^`]*) -f charts/holdfast/crds/`", README.read_text())
    assert command is not None
    other = (
        DEFINITION.read_text().replace("holdfast.dev", "upgrade.holdfast.dev").replace("faulttolerantjob", "jobcopy")
    )
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(other.replace("FaultTolerantJob", "JobCopy").replace("shortNames: [ftj]", "shortNames: [jc]"))
    new.write_text(old.read_text().replace("Number of workers", "The number of workers"))
    assert old.read_text() != new.read_text()
    cluster.kubectl("create", "--field-manager=helm", "-f", str(old))
    try:
        cluster.kubectl(*command[1].split(), "-f", str(new))
        found = cluster.kubectl("get", "crd", "jobcopys.upgrade.holdfast.dev", "-o", "yaml")
        assert "The number of workers" in found
    finally:
        cluster.kubectl("delete", "--wait=false", "-f", str(old))
