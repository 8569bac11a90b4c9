"""Children: the user's pod spec goes through untouched except for what the contract lists."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast_operator.api import names as c
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.spec.checkpoint import LocalTier, MemoryTier, ObjectTier, PeerTier
from holdfast_operator.api.spec.hang import HangSpec
from holdfast_operator.api.status import Membership, Worker
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.manifests.children import children, disruption_budget
from holdfast_operator.manifests.common import digest
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.membership_document import membership_document, settings
from holdfast_operator.manifests.pod import pod
from holdfast_operator.views import parse_pod

WORKER = Worker(incarnation=4, batch=4, gated=True)
CONTRACT = Path(__file__).parents[2] / "contract"


@pytest.fixture
def make_pod(observed: Observed) -> Callable[..., Any]:
    """The pod of a job whose pod template is changed so."""

    def make(worker: Worker = WORKER, **pod_spec: Any) -> Any:
        spec = observed.job.spec
        assert spec is not None
        template = {**spec.template, "spec": {**spec.pod_spec, **pod_spec}}
        return pod(observed.job, replace(spec, template=template), worker, observed.platform)

    return make


def trainer(manifest: Any) -> Any:
    return next(item for item in manifest["spec"]["containers"] if item["name"] == "trainer")


def test_the_command_and_the_users_fields_stay(make_pod: Callable[..., Any]) -> None:
    given = {
        "hostNetwork": True,
        "nodeSelector": {"zone": "a"},
        "priorityClassName": "high",
        "securityContext": {"runAsUser": 1000},
        "serviceAccountName": "trainer",
        "runtimeClassName": "nvidia",
    }
    manifest = make_pod(**given)
    assert {key: manifest["spec"][key] for key in given} == given
    assert trainer(manifest)["command"] == ["holdfast", "run", "--", "python", "train.py"]
    assert trainer(manifest)["resources"] == {"requests": {"cpu": "900m"}}


@pytest.mark.parametrize(
    ("host", "given", "policy"),
    [
        (True, None, "ClusterFirstWithHostNet"),
        (True, "ClusterFirst", "ClusterFirstWithHostNet"),
        (True, "Default", "Default"),
        (True, "None", "None"),
        (False, "ClusterFirst", "ClusterFirst"),
        (False, None, None),
    ],
)
def test_host_network_pod_finds_the_operators_service(
    make_pod: Callable[..., Any], host: bool, given: str | None, policy: str | None
) -> None:
    asked = {} if given is None else {"dnsPolicy": given}
    assert make_pod(hostNetwork=host, **asked)["spec"].get("dnsPolicy") == policy


def test_the_template_itself_is_not_changed(observed: Observed) -> None:
    spec = observed.job.spec
    assert spec is not None
    before = copy.deepcopy(spec.template)
    pod(observed.job, spec, WORKER, observed.platform)
    assert spec.template == before


def test_identity_comes_by_environment_and_never_an_index(make_pod: Callable[..., Any]) -> None:
    names = {item["name"] for item in trainer(make_pod())["env"]}
    assert names == {
        "HOLDFAST_RUN_DIR",
        "HOLDFAST_POD_UID",
        "HOLDFAST_POD_NAME",
        "HOLDFAST_POD_NAMESPACE",
        "HOLDFAST_POD_IP",
        "HOLDFAST_NODE_NAME",
        "HOLDFAST_JOB_NAME",
        "HOLDFAST_CHECKPOINT_DIR",
    }


def test_the_sidecar_is_native_and_fits_the_restricted_standard(make_pod: Callable[..., Any]) -> None:
    manifest = make_pod(securityContext={"runAsUser": 0})
    (sidecar,) = manifest["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("holdfast-sidecar", "Always")
    context = sidecar["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] != 0
    env = {item["name"]: item.get("value") for item in sidecar["env"]}
    assert env["HOLDFAST_OPERATOR_URL"] == "https://operator:8443"
    assert env["HOLDFAST_CHECKPOINT_DEADLINE_SECONDS"] == "25"
    assert "HOLDFAST_METADATA_URL" not in env


def test_gpus_of_a_pod_are_watched_on_its_node(observed: Observed) -> None:
    platform = replace(observed.platform, dcgm_url="http://$(HOLDFAST_HOST_IP):9400/metrics")
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    assert sidecar_env(observed, platform, {}) == {}
    assert sidecar_env(observed, platform, {"resources": {"limits": {"cpu": 8}}}) == {}
    assert sidecar_env(observed, replace(platform, dcgm_url=""), gpu) == {}
    env = sidecar_env(observed, platform, gpu)
    assert list(env) == ["HOLDFAST_HOST_IP", "HOLDFAST_DCGM_URL"], "the kubelet knows only what it has read before"
    assert env["HOLDFAST_HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"
    assert env["HOLDFAST_DCGM_URL"]["value"] == platform.dcgm_url


def sidecar_env(observed: Observed, platform: Installation, container: dict[str, Any]) -> dict[str, Any]:
    """What of the sidecar's environment is about GPUs, in its order."""
    spec = observed.job.spec
    assert spec is not None
    containers = [{"name": "trainer", "image": "x", **container}]
    template = {**spec.template, "spec": {**spec.template["spec"], "containers": containers}}
    manifest = pod(observed.job, replace(spec, template=template), WORKER, platform)
    (sidecar,) = manifest["spec"]["initContainers"]
    names = ("HOLDFAST_HOST_IP", "HOLDFAST_DCGM_URL")
    return {item["name"]: item for item in sidecar["env"] if item["name"] in names}


def test_only_the_sidecar_gets_the_token(make_pod: Callable[..., Any]) -> None:
    manifest = make_pod()
    mounts = {mount["name"] for mount in trainer(manifest)["volumeMounts"]}
    assert "holdfast-agent" not in mounts
    volume = next(item for item in manifest["spec"]["volumes"] if item["name"] == "holdfast-agent")
    token = volume["projected"]["sources"][0]["serviceAccountToken"]
    assert token["audience"] == "holdfast"


def test_the_users_own_shm_mount_wins(make_pod: Callable[..., Any]) -> None:
    container = {"name": "trainer", "image": "x", "volumeMounts": [{"name": "mine", "mountPath": "/dev/shm/"}]}
    manifest = make_pod(containers=[container], volumes=[{"name": "mine", "emptyDir": {}}])
    assert "holdfast-shm" not in {item["name"] for item in manifest["spec"]["volumes"]}
    assert [mount["mountPath"] for mount in trainer(manifest)["volumeMounts"]].count("/dev/shm/") == 1


def test_without_a_claim_there_is_no_checkpoint_folder(observed: Observed) -> None:
    spec = observed.job.spec
    assert spec is not None
    bare = replace(spec, checkpoint=replace(spec.checkpoint, claim_name=None))
    manifest = pod(observed.job, bare, WORKER, observed.platform)
    assert "HOLDFAST_CHECKPOINT_DIR" not in json.dumps(manifest)
    assert "holdfast-checkpoints" not in json.dumps(manifest)


def test_default_tolerations_last_half_a_minute(make_pod: Callable[..., Any]) -> None:
    added = {item["key"]: item["tolerationSeconds"] for item in make_pod()["spec"]["tolerations"]}
    assert added == {c.TAINT_NOT_READY: 30, c.TAINT_UNREACHABLE: 30}
    own = [{"key": c.TAINT_NOT_READY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600}]
    kept = make_pod(tolerations=own)["spec"]["tolerations"]
    assert [item["tolerationSeconds"] for item in kept if item["key"] == c.TAINT_NOT_READY] == [600]


def test_avoided_nodes_are_excluded_from_every_alternative(make_pod: Callable[..., Any]) -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}, {"matchFields": []}]
    affinity = {"nodeAffinity": {required: {"nodeSelectorTerms": terms}}, "podAntiAffinity": {"x": 1}}
    worker = replace(WORKER, avoid=("node-1", "node-2"))
    result = make_pod(worker, affinity=affinity)["spec"]["affinity"]
    assert result["podAntiAffinity"] == {"x": 1}
    for term in result["nodeAffinity"][required]["nodeSelectorTerms"]:
        assert [field["values"] for field in term["matchFields"]] == [["node-1"], ["node-2"]]
    assert result["nodeAffinity"][required]["nodeSelectorTerms"][0]["matchExpressions"][0]["key"] == "zone"


def test_there_is_time_to_commit_before_the_end(make_pod: Callable[..., Any]) -> None:
    assert make_pod(terminationGracePeriodSeconds=5)["spec"]["terminationGracePeriodSeconds"] == 30
    assert make_pod(terminationGracePeriodSeconds=90)["spec"]["terminationGracePeriodSeconds"] == 90


def test_a_pod_is_read_back_as_it_was_made(make_pod: Callable[..., Any]) -> None:
    body = make_pod()
    body["metadata"]["uid"] = "u"
    view = parse_pod(body)
    assert (view.name, view.incarnation, view.gated, view.grace_seconds) == ("gpt-w4", 4, True, 30)


def test_children_belong_to_the_job_and_the_service_is_headless(observed: Observed) -> None:
    policy, service, config_map, budget = children(observed.job, observed.platform)
    for child in (policy, service, config_map, budget):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("FaultTolerantJob", "job-gpt", True)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert config_map["data"] == {"ca.crt": "PEM"}
    assert config_map["metadata"]["name"] == "gpt-holdfast-ca"


@pytest.mark.parametrize(
    ("replicas", "fewest", "on_failure", "kept"),
    [
        pytest.param(3, 3, "Shrink", 2, id="all are needed, and one may go"),
        pytest.param(8, 6, "Shrink", 6, id="as few as may train"),
        pytest.param(8, 6, "Replace", 7, id="the others wait for each that is lost"),
        pytest.param(1, 1, "Shrink", 0, id="a node can always be drained"),
        pytest.param(1, 1, "Wait", 0, id="also if the job waits for its one worker"),
        pytest.param(4, 4, "Wait", 3, id="one may go also of those that are waited for"),
    ],
)
def test_an_eviction_waits_while_too_many_workers_are_missing(
    observed: Observed, replicas: int, fewest: int, on_failure: str, kept: int
) -> None:
    spec = observed.job.spec
    assert spec is not None
    spec = replace(spec, replicas=replicas, min_replicas=fewest, on_failure=on_failure)
    asked = disruption_budget(observed.job, spec)["spec"]
    assert asked["minAvailable"] == kept
    assert asked["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    worker = pod(observed.job, spec, Worker(incarnation=0, batch=0), observed.platform)
    assert asked["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()


def test_there_is_no_budget_where_the_installation_wants_none(observed: Observed) -> None:
    platform = replace(observed.platform, disruption_budgets=False)
    assert "PodDisruptionBudget" not in [child["kind"] for child in children(observed.job, platform)]


def test_the_document_has_exactly_the_contracts_fields(observed: Observed) -> None:
    golden = json.loads((CONTRACT / "membership.json").read_text())
    spec = observed.job.spec
    assert spec is not None
    membership = Membership.from_json(golden)
    document = membership_document(
        observed.job, spec, membership, golden["restarts"], golden["jobKey"], durable_step=400
    )
    assert document.keys() == golden.keys()
    for key in ("revision", "generation", "publication", "active", "previous", "gone", "members", "claims"):
        assert document[key] == golden[key], key
    assert document["acknowledged"] == golden["acknowledged"]
    assert document["directives"] == golden["directives"]


def test_settings_are_those_of_the_contract(observed: Observed) -> None:
    golden = json.loads((CONTRACT / "membership.json").read_text())["settings"]
    codes = {"operator": "In", "values": [2]}
    rules = [
        {"name": "bug", "action": "FailJob", "cause": "Application", "onExitCodes": codes},
        {"name": "gpu", "action": "ReplaceNode", "onGpuErrors": {"xids": [79]}},
        {"name": "hang", "action": "InPlace", "onHang": True},
    ]
    body = {
        "metadata": {"name": "gpt", "namespace": "ml", "uid": "u"},
        "spec": {
            "workers": {"replicas": 3, "template": {"spec": {"containers": [{"name": "a", "image": "b"}]}}},
            "elasticity": {"minReplicas": 2},
            "recovery": {"backoff": {"initialSeconds": 1, "maxSeconds": 60}, "rules": rules},
            "checkpoint": {
                "intervalSteps": 50,
                "retention": {"keepEvery": 10000, "keepBest": [{"metric": "val_loss", "count": 3}]},
            },
            "startupDeadlineSeconds": 300,
            "hangDetection": {"stepTimeoutSeconds": 120},
        },
    }
    spec = parse_job(body).spec
    assert spec is not None
    assert settings(spec) == golden


def test_hang_detection_is_a_setting_only_where_it_was_asked_for(observed: Observed) -> None:
    spec = observed.job.spec
    assert spec is not None
    assert "hangDetection" not in settings(spec)
    limits = {"dataTimeoutSeconds": 900.0, "checkpointTimeoutSeconds": 900.0, "evaluationTimeoutSeconds": 3600.0}
    asked = replace(spec, hang=HangSpec(step=60))
    assert settings(asked)["hangDetection"] == {"mode": "Enabled", "stepTimeoutSeconds": 60, **limits}
    off = replace(spec, hang=HangSpec(enabled=False))
    assert settings(off)["hangDetection"] == {"mode": "Disabled", **limits}
    tight = replace(spec, hang=HangSpec(min_step=1))
    assert settings(tight)["hangDetection"] == {"mode": "Enabled", "minStepTimeoutSeconds": 1, **limits}


def test_a_digest_names_a_content() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_the_object_store_reaches_the_trainer_alone(observed: Observed) -> None:
    job = observed.job
    spec = job.spec
    assert spec is not None
    store = ObjectTier(
        url="s3://b/p",
        secret_name="writer",
        interval_seconds=900,
        keep_last=5,
        retention="daily=7",
        bytes_per_second=1000,
    )
    manifest = pod(
        job, replace(spec, checkpoint=replace(spec.checkpoint, object_store=store)), WORKER, observed.platform
    )

    env = {entry["name"]: entry.get("value") for entry in trainer(manifest)["env"]}
    assert {name: value for name, value in env.items() if name.startswith("HOLDFAST_OBJECT_")} == {
        "HOLDFAST_OBJECT_URL": f"s3://b/p/{job.namespace}/{job.name}",
        "HOLDFAST_OBJECT_INTERVAL_SECONDS": "900",
        "HOLDFAST_OBJECT_KEEP": "5",
        "HOLDFAST_OBJECT_RETENTION": "daily=7",
        "HOLDFAST_OBJECT_BYTES_PER_SECOND": "1000",
    }
    assert trainer(manifest)["envFrom"] == [{"secretRef": {"name": "writer"}}]
    assert "OBJECT" not in json.dumps(manifest["spec"]["initContainers"])
    without = pod(job, spec, WORKER, observed.platform)
    assert "OBJECT" not in json.dumps(without)
    assert "envFrom" not in trainer(without)


def test_without_a_volume_the_object_store_is_the_folder_of_checkpoints(observed: Observed) -> None:
    job = observed.job
    spec = job.spec
    assert spec is not None
    store = ObjectTier(url="s3://b/p", secret_name="writer")
    checkpoint = replace(spec.checkpoint, claim_name=None, object_store=store, memory=MemoryTier(size="4Gi"))
    manifest = pod(job, replace(spec, checkpoint=checkpoint), WORKER, observed.platform)

    given = {entry["name"]: entry.get("value") for entry in trainer(manifest)["env"]}
    assert given["HOLDFAST_CHECKPOINT_DIR"] == f"s3://b/p/{job.namespace}/{job.name}"
    assert not [name for name in given if name.startswith("HOLDFAST_OBJECT_")], "they describe copies of a volume"
    assert "HOLDFAST_MEMORY_TIER" in given
    assert trainer(manifest)["envFrom"] == [{"secretRef": {"name": "writer"}}]
    assert "holdfast-checkpoints" not in json.dumps(manifest)
    assert "persistentVolumeClaim" not in json.dumps(manifest)


def test_local_tier_is_a_limited_volume_on_the_nodes_disk(observed: Observed) -> None:
    spec = observed.job.spec
    assert spec is not None
    asked = replace(
        spec,
        checkpoint=replace(spec.checkpoint, local=LocalTier(size="40Gi", interval=25)),
    )
    manifest = pod(observed.job, asked, WORKER, observed.platform)
    volumes = {volume["name"]: volume for volume in manifest["spec"]["volumes"]}
    assert volumes["holdfast-local"]["emptyDir"] == {"sizeLimit": "40Gi"}, "of no medium: on disk"
    mounts = {mount["name"]: mount["mountPath"] for mount in trainer(manifest)["volumeMounts"]}
    assert mounts["holdfast-local"] == "/var/run/holdfast-local"
    given = {entry["name"]: entry.get("value") for entry in trainer(manifest)["env"]}
    assert given["HOLDFAST_LOCAL_TIER"] == f"/var/run/holdfast-local:{40 << 30}"
    assert given["HOLDFAST_LOCAL_INTERVAL"] == "25"
    without = json.dumps(pod(observed.job, spec, WORKER, observed.platform))
    assert "holdfast-local" not in without
    assert "HOLDFAST_LOCAL" not in without


def test_the_memory_tier_is_a_volume_of_its_own_with_its_limit(observed: Observed) -> None:
    spec = observed.job.spec
    assert spec is not None
    asked = replace(
        spec,
        checkpoint=replace(
            spec.checkpoint,
            memory=MemoryTier(size="4Gi", interval=2),
            peer=PeerTier(interval=4),
        ),
    )
    manifest = pod(observed.job, asked, WORKER, observed.platform)
    volumes = {volume["name"]: volume for volume in manifest["spec"]["volumes"]}
    assert volumes["holdfast-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    given = {entry["name"]: entry.get("value") for entry in trainer(manifest)["env"]}
    assert given["HOLDFAST_MEMORY_TIER"] == f"/var/run/holdfast-memory:{4 << 30}"
    assert (given["HOLDFAST_MEMORY_INTERVAL"], given["HOLDFAST_PEER_INTERVAL"]) == ("2", "4")
    assert "holdfast-memory" not in json.dumps(pod(observed.job, spec, WORKER, observed.platform))
