"""Workers, their template, elasticity and placement: what the schema accepts, and its messages."""

from __future__ import annotations

from typing import Any

import pytest

from .jobs import MEMORY, POD, REMOVE, TRAINER, VOLUME, Jobs, job

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
    ("no least time", [("spec.hangDetection", {"minStepTimeoutSeconds": 0})], "greater than or equal to 1"),
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
    # -- fields that are not there
    ("a field of later versions", [("spec.networking", {})], 'unknown field "spec.networking"'),
    ("a misspelt field", [("spec.elasticity.minReplica", 2)], 'unknown field "spec.elasticity.minReplica"'),
]

GOOD: list[tuple[str, list[tuple[str, Any]]]] = [
    ("the smallest", []),
    ("longest name", [("metadata.name", "g" * 50)]),
    ("a number of processes", [("spec.workers.processesPerWorker", 8)]),
    ("no hang detection", [("spec.hangDetection", {"mode": "Disabled"})]),
    ("tight hang detection", [("spec.hangDetection", {"minStepTimeoutSeconds": 1})]),
    ("a queue", [("spec.scheduling.queue", "team-a")]),
    ("steps that fit", [("spec.workers.replicas", 4), ("spec.elasticity", {"replicaStep": 2, "minReplicas": 2})]),
    ("restartPolicy spelled out", [(f"{POD}.restartPolicy", "Never")]),
    ("suspended from the start", [("spec.suspend", True)]),
    ("deleted at once after its end", [("spec.ttlSecondsAfterFinished", 0)]),
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


def test_the_table_is_long_enough_and_names_each_case_once() -> None:
    names = [name for name, _changes, _says in BAD]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize(("changes", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_job_is_refused_in_words_that_help(trial: Jobs, changes: list[tuple[str, Any]], says: str) -> None:
    assert says in trial.refusal(job(*changes))


@pytest.mark.parametrize("changes", [g[1] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_good_job_is_taken_as_it_is(trial: Jobs, changes: list[tuple[str, Any]]) -> None:
    wanted = job(*changes)
    made = trial.create(wanted, dry_run="All")
    assert made["spec"]["workers"]["template"] == wanted["spec"]["workers"]["template"]
