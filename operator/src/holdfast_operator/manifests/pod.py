"""A worker's pod as a plain dictionary.

The user's pod spec stays unchanged except for what docs/reference/protocol.md lists. The command is never rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import ca_config_map, pod_name
from holdfast_operator.api.job import Job
from holdfast_operator.api.spec.pod_template import trainer_container
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests import environment
from holdfast_operator.manifests.common import Manifest, worker_marks
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.placement import in_host_network, placed


def pod(job: Job, spec: JobSpec, worker: Worker, platform: Installation, rendezvous_ip: str = "") -> Manifest:
    template_meta: Mapping[str, Any] = spec.template.get("metadata") or {}
    marks = worker_marks(job, worker.incarnation)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(job.name, worker.incarnation),
            "namespace": job.namespace,
            "labels": {
                **(template_meta.get("labels") or {}),
                **({c.LABEL_QUEUE: spec.scheduling.queue} if spec.scheduling.queue else {}),
                **marks["labels"],
            },
            "annotations": {
                "kubectl.kubernetes.io/default-container": trainer_container(spec.pod_spec),
                **(template_meta.get("annotations") or {}),
            },
            "ownerReferences": marks["ownerReferences"],
        },
        "spec": _pod_spec(job, spec, worker, platform, rendezvous_ip),
    }


def _pod_spec(job: Job, spec: JobSpec, worker: Worker, platform: Installation, rendezvous_ip: str) -> Manifest:
    result: Manifest = dict(spec.pod_spec)  # additions go into new lists, because all pods share the template
    trainer = trainer_container(result)
    env = environment.of_trainer(job, spec, worker, rendezvous_ip)
    result["containers"] = [
        _trainer(container, job, spec, env) if container.get("name") == trainer else container
        for container in result["containers"]
    ]
    result["initContainers"] = [*(result.get("initContainers") or []), _sidecar(spec, platform)]
    result["volumes"] = [*(result.get("volumes") or []), *_volumes(job, spec, result)]
    result["restartPolicy"] = "Never"
    result["subdomain"] = job.name
    least = spec.checkpoint_deadline_seconds + 5
    result["terminationGracePeriodSeconds"] = max(int(result.get("terminationGracePeriodSeconds") or 30), least)
    result["tolerations"] = [*(result.get("tolerations") or []), *_tolerations(result)]
    if in_host_network(result) and result.get("dnsPolicy") in (None, "", "ClusterFirst"):
        # With ClusterFirst, the kubelet gives such a pod its node's DNS, which cannot resolve the operator's Service.
        result["dnsPolicy"] = "ClusterFirstWithHostNet"
    if platform.image_pull_secrets:
        own = [{"name": name} for name in platform.image_pull_secrets]
        result["imagePullSecrets"] = [*(result.get("imagePullSecrets") or []), *own]
    gates = [c.GANG_GATE] if worker.gated else []
    if spec.scheduling.queue:  # set here too: without Kueue, or before it acts, the pod must not bypass a quota
        gates.append(c.QUEUE_GATE)
    if gates:
        result["schedulingGates"] = [{"name": gate} for gate in gates]
    return placed(
        result,
        spec.scheduling,
        namespace=job.namespace,
        job=job.name,
        on_demand=worker.on_demand,
        spare=worker.spare,
        domain=worker.domain,
        avoid=worker.avoid,
        last_resort=worker.last_resort,
    )


def _trainer(container: Manifest, job: Job, spec: JobSpec, env: list[Manifest]) -> Manifest:
    mounts = list(container.get("volumeMounts") or [])
    mounts.append({"name": c.VOLUME_RUN, "mountPath": c.RUN_DIR})
    if not _mounts_shm(container):
        mounts.append({"name": c.VOLUME_SHM, "mountPath": c.SHM_DIR})
    if spec.checkpoint.claim_name:
        mounts.append(
            {
                "name": c.VOLUME_CHECKPOINTS,
                "mountPath": c.CHECKPOINT_DIR,
                "subPath": f"{job.namespace}/{job.name}",
            }
        )
    if spec.checkpoint.memory:
        mounts.append({"name": c.VOLUME_MEMORY, "mountPath": c.MEMORY_DIR})
    if spec.checkpoint.local:
        mounts.append({"name": c.VOLUME_LOCAL, "mountPath": c.LOCAL_DIR})
    # First, so that the user's own variables can refer to them as $(HOLDFAST_…).
    made = {**container, "env": [*env, *(container.get("env") or [])], "volumeMounts": mounts}
    if not spec.launched:  # no launcher writes a termination message, so the end of the log is used
        made.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    store = spec.checkpoint.object_store
    if store is not None and store.secret_name:
        # Before the user's own variables, which take precedence.
        made["envFrom"] = [{"secretRef": {"name": store.secret_name}}, *(container.get("envFrom") or [])]
    return made


def _sidecar(spec: JobSpec, platform: Installation) -> Manifest:
    return {
        "name": c.SIDECAR_CONTAINER,
        "image": platform.sidecar_image,
        "imagePullPolicy": platform.sidecar_pull_policy,
        "restartPolicy": "Always",
        "env": environment.of_sidecar(spec, platform),
        "ports": [{"name": "holdfast", "containerPort": c.PORT_SIDECAR, "protocol": "TCP"}],
        "resources": json.loads(platform.sidecar_resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            # A runAsUser of 0 at pod level would prevent the sidecar from starting.
            **({} if platform.sidecar_user is None else {"runAsUser": platform.sidecar_user}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": c.VOLUME_RUN, "mountPath": c.RUN_DIR},
            {"name": c.VOLUME_AGENT, "mountPath": c.AGENT_DIR, "readOnly": True},
        ],
    }


def _volumes(job: Job, spec: JobSpec, pod_spec: Manifest) -> list[Manifest]:
    trainer = trainer_container(pod_spec)
    container = next(item for item in pod_spec["containers"] if item.get("name") == trainer)
    volumes: list[Manifest] = [
        {"name": c.VOLUME_RUN, "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": c.VOLUME_AGENT, "projected": {"sources": _agent_sources(job)}},
    ]
    if any(mount.get("name") == c.VOLUME_SHM for mount in container["volumeMounts"]):
        volumes.append({"name": c.VOLUME_SHM, "emptyDir": {"medium": "Memory"}})
    if spec.checkpoint.memory:
        limit = {"medium": "Memory", "sizeLimit": spec.checkpoint.memory.size}
        volumes.append({"name": c.VOLUME_MEMORY, "emptyDir": limit})
    if spec.checkpoint.local:
        volumes.append({"name": c.VOLUME_LOCAL, "emptyDir": {"sizeLimit": spec.checkpoint.local.size}})
    if spec.checkpoint.claim_name:
        claim = {"claimName": spec.checkpoint.claim_name}
        volumes.append({"name": c.VOLUME_CHECKPOINTS, "persistentVolumeClaim": claim})
    return volumes


def _agent_sources(job: Job) -> list[Manifest]:
    token = {"audience": c.TOKEN_AUDIENCE, "expirationSeconds": c.TOKEN_SECONDS, "path": "token"}
    bundle = {"name": ca_config_map(job.name), "items": [{"key": c.CA_KEY, "path": c.CA_KEY}]}
    return [{"serviceAccountToken": token}, {"configMap": bundle}]


def _tolerations(pod_spec: Manifest) -> list[Manifest]:
    """Return tolerations.

    The default of 300 s would keep a dead node's pods for minutes. The user's own take precedence.
    """
    given = {toleration.get("key") for toleration in pod_spec.get("tolerations") or []}
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": c.TOLERATION_SECONDS}
        for key in (c.TAINT_NOT_READY, c.TAINT_UNREACHABLE)
        if key not in given and None not in given
    ]


def _mounts_shm(container: Manifest) -> bool:
    return any(
        (mount.get("mountPath") or "").rstrip("/") == c.SHM_DIR for mount in container.get("volumeMounts") or []
    )
