"""Children of a job as plain dictionaries. Pure.

The user's pod spec goes through untouched except for what docs/reference/protocol.md lists; above all, the command is
never rewritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import ca_config_map, pod_name, rendezvous_service, run_id
from holdfast_operator.api.job import Job
from holdfast_operator.api.quantities import quantity
from holdfast_operator.api.spec.hang import HangSpec
from holdfast_operator.api.spec.pod_template import trainer_container
from holdfast_operator.api.spec.preflight import OBJECT_STORE, STORAGE
from holdfast_operator.api.spec.recovery import Rule
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import Membership, Worker
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.placement import in_host_network, placed

Manifest = dict[str, Any]


def owner_reference(job: Job) -> Manifest:
    """Children go with their job."""
    return {
        "apiVersion": f"{c.GROUP}/{c.API_VERSION}",
        "kind": c.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def labels(job: Job) -> dict[str, str]:
    """On every child."""
    return {
        c.LABEL_JOB: job.name,
        c.LABEL_APP_NAME: "holdfast-job",
        c.LABEL_APP_INSTANCE: job.name,
        c.LABEL_APP_MANAGED_BY: c.MANAGED_BY,
    }


def worker_marks(job: Job, incarnation: int) -> Manifest:
    """The metadata by which a worker's pod is listed."""
    return {
        "labels": {
            **labels(job),
            c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER,
            c.LABEL_INCARNATION: str(incarnation),
        },
        "ownerReferences": [owner_reference(job)],
    }


def service(job: Job) -> Manifest:
    """Headless: gives each pod a name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name, component="network"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {c.LABEL_JOB: job.name, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER},
            "ports": [
                {"name": "store", "port": c.PORT_STORE, "protocol": "TCP", "targetPort": c.PORT_STORE},
                {"name": "control", "port": c.PORT_CONTROL, "protocol": "TCP", "targetPort": c.PORT_CONTROL},
                {"name": "metrics", "port": c.PORT_SIDECAR, "protocol": "TCP", "targetPort": c.PORT_SIDECAR},
            ],
        },
    }


def network_policy(job: Job) -> Manifest:
    """Who reaches the workers: each other at any port, everybody else the metrics only.

    TCPStore and gloo ask nobody who he is, at ports that the kernel chooses.
    """
    workers = {"matchLabels": {c.LABEL_JOB: job.name, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.name, component="network"),
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"ports": [{"port": c.PORT_SIDECAR, "protocol": "TCP"}]},
            ],
        },
    }


def disruption_budget(job: Job, spec: JobSpec) -> Manifest:
    """How many workers may be evicted at once: as many as an elastic job may lack, and always one, or no node could
    ever be drained. What is not ready is protected by nothing.
    """
    may_lack = spec.replicas - spec.min_replicas if spec.on_failure == c.SHRINK else 0
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, job.name, component="disruption"),
        "spec": {
            "minAvailable": spec.replicas - max(1, may_lack),
            "selector": {"matchLabels": {c.LABEL_JOB: job.name, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def config_map(job: Job, platform: Installation) -> Manifest:
    """The CA bundle by which sidecars know the operator."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, ca_config_map(job.name), component="ca"),
        "data": {c.CA_KEY: platform.ca_bundle},
    }


def host_service(job: Job, host: int) -> Manifest:
    """Leads to the pod whose ``torchrun`` hosts the store of a rendezvous: one address, whoever it is."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, rendezvous_service(job.name), component="network"),
        "spec": {
            "publishNotReadyAddresses": True,
            "selector": {c.LABEL_JOB: job.name, c.LABEL_INCARNATION: str(host)},
            "ports": [{"name": "store", "port": c.PORT_STORE, "protocol": "TCP", "targetPort": c.PORT_STORE}],
        },
    }


def children(job: Job, platform: Installation, host: int | None = None) -> tuple[Manifest, ...]:
    """What a job has besides its pods, in the order of need. ``host``: the worker that hosts its rendezvous."""
    closed = (network_policy(job),) if platform.network_policies else ()
    kept = (disruption_budget(job, job.spec),) if platform.disruption_budgets and job.spec is not None else ()
    meeting = (host_service(job, host),) if host is not None else ()
    return (*closed, service(job), *meeting, config_map(job, platform), *kept)


_MOST_DIGESTS = 1 << 14
_digests: dict[tuple[object, ...], str] = {}


def children_digest(job: Job, platform: Installation, host: int | None = None) -> str:
    """The digest of ``children``, made once for all that they depend on: each pass asks for it."""
    spec = job.spec
    asked = (spec.replicas, spec.min_replicas, spec.on_failure) if spec is not None else None
    key = (job.namespace, job.name, job.uid, asked, platform, host)
    found = _digests.get(key)
    if found is None:
        if len(_digests) >= _MOST_DIGESTS:
            _digests.clear()
        found = _digests[key] = digest(*children(job, platform, host))
    return found


def digest(*values: Any) -> str:
    """A short name for a content."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pod(job: Job, spec: JobSpec, worker: Worker, platform: Installation, rendezvous_ip: str = "") -> Manifest:
    """One worker's pod."""
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
    result: Manifest = dict(spec.pod_spec)  # what is added goes into new lists: the template is shared by all pods
    trainer = trainer_container(result)
    meeting = _torchrun_env(job, spec, worker, rendezvous_ip)
    result["containers"] = [
        _trainer(container, job, spec, meeting) if container.get("name") == trainer else container
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
        # With ClusterFirst the kubelet gives such a pod its node's DNS, which does not know the operator's Service.
        result["dnsPolicy"] = "ClusterFirstWithHostNet"
    if platform.image_pull_secrets:
        own = [{"name": name} for name in platform.image_pull_secrets]
        result["imagePullSecrets"] = [*(result.get("imagePullSecrets") or []), *own]
    gates = [c.GANG_GATE] if worker.gated else []
    if spec.scheduling.queue:  # set here too: without Kueue, or before it looks, a quota is not passed by
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


def _trainer(container: Manifest, job: Job, spec: JobSpec, meeting: list[Manifest]) -> Manifest:
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
    env = [*_identity_env(), _field("HOLDFAST_POD_IP", "status.podIP"), _value("HOLDFAST_JOB_NAME", job.name)]
    if spec.checkpoint.claim_name:
        env.append(_value("HOLDFAST_CHECKPOINT_DIR", c.CHECKPOINT_DIR))
    if spec.checkpoint.memory:
        mounts.append({"name": c.VOLUME_MEMORY, "mountPath": c.MEMORY_DIR})
    if spec.checkpoint.local:
        mounts.append({"name": c.VOLUME_LOCAL, "mountPath": c.LOCAL_DIR})
    env += [*_object_env(job, spec), *_memory_env(spec), *_local_env(spec), *_launcher_preflight_env(spec), *meeting]
    # First, so that the user's own variables can refer to them as $(HOLDFAST_…).
    made = {**container, "env": [*env, *(container.get("env") or [])], "volumeMounts": mounts}
    if not spec.launched:  # nobody writes a last word for the operator: the end of the log is one
        made.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    store = spec.checkpoint.object_store
    if store is not None and store.secret_name:
        # Before the user's own, which win.
        made["envFrom"] = [{"secretRef": {"name": store.secret_name}}, *(container.get("envFrom") or [])]
    return made


def _torchrun_env(job: Job, spec: JobSpec, worker: Worker, rendezvous_ip: str) -> list[Manifest]:
    """What an unmodified ``torchrun`` reads in the place of its options; those that a command gives win."""
    if spec.rendezvous != c.C10D:
        return []
    # The host's own address: not every network leads a pod to itself by way of a Service.
    host = "$(HOLDFAST_POD_IP)" if worker.hosts else rendezvous_ip
    least = spec.min_replicas if spec.shrinkable else spec.replicas
    budget = spec.budget(c.CAUSE_APPLICATION)
    options = {
        "NNODES": f"{least}:{max(spec.replicas, spec.max_replicas)}",
        "NPROC_PER_NODE": str(spec.processes_per_worker),
        "RDZV_BACKEND": "c10d",
        "RDZV_ENDPOINT": f"{host}:{c.PORT_STORE}",
        "RDZV_CONF": f"is_host={int(worker.hosts)}",
        # Another one for each host: nobody of an earlier world is met.
        "RDZV_ID": f"{run_id(job)}-{worker.host}",
        "LOCAL_ADDR": "$(HOLDFAST_POD_IP)",
        "MAX_RESTARTS": str(budget.max_restarts if budget is not None else c.TORCHRUN_RESTARTS),
    }
    # With the store shared, agents of torch 2.13 send their ranks to the first rank 0 for ever, also when it is gone.
    shared = _value("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return [*(_value(f"PET_{name}", value) for name, value in options.items()), shared]


def _object_env(job: Job, spec: JobSpec) -> list[Manifest]:
    store = spec.checkpoint.object_store
    if store is None:
        return []
    env = [
        _value("HOLDFAST_OBJECT_URL", f"{store.url}/{job.namespace}/{job.name}"),
        _value("HOLDFAST_OBJECT_INTERVAL_SECONDS", str(store.interval_seconds)),
        _value("HOLDFAST_OBJECT_KEEP", str(store.keep_last)),
    ]
    if store.retention:
        env.append(_value("HOLDFAST_OBJECT_RETENTION", store.retention))
    if store.bytes_per_second is not None:
        env.append(_value("HOLDFAST_OBJECT_BYTES_PER_SECOND", str(store.bytes_per_second)))
    if store.max_in_flight is not None:
        env.append(_value("HOLDFAST_OBJECT_IN_FLIGHT", str(store.max_in_flight)))
    return env


def _sidecar(spec: JobSpec, platform: Installation) -> Manifest:
    env = [
        *_identity_env(),
        _value("HOLDFAST_OPERATOR_URL", platform.agents_url),
        _value("HOLDFAST_TOKEN_FILE", c.TOKEN_FILE),
        _value("HOLDFAST_CA_FILE", c.CA_FILE),
        _value("HOLDFAST_NOTICE_PROVIDERS", ",".join(spec.providers)),
        _value("HOLDFAST_CHECKPOINT_DEADLINE_SECONDS", str(spec.checkpoint_deadline_seconds)),
        _value("HOLDFAST_SIDECAR_PORT", str(c.PORT_SIDECAR)),
    ]
    if not spec.launched:
        env.append(_value("HOLDFAST_LAUNCHER", "None"))
    if platform.metadata_url:
        env.append(_value("HOLDFAST_METADATA_URL", platform.metadata_url))
    if platform.dcgm_url and _uses_gpus(spec.pod_spec):
        # Before the address, which may refer to it.
        env += [_field("HOLDFAST_HOST_IP", "status.hostIP"), _value("HOLDFAST_DCGM_URL", platform.dcgm_url)]
    env += _preflight_env(spec)
    return {
        "name": c.SIDECAR_CONTAINER,
        "image": platform.sidecar_image,
        "imagePullPolicy": platform.sidecar_pull_policy,
        "restartPolicy": "Always",
        "env": env,
        "ports": [{"name": "holdfast", "containerPort": c.PORT_SIDECAR, "protocol": "TCP"}],
        "resources": json.loads(platform.sidecar_resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            # A runAsUser of 0 at pod level would keep the sidecar from starting.
            **({} if platform.sidecar_user is None else {"runAsUser": platform.sidecar_user}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": c.VOLUME_RUN, "mountPath": c.RUN_DIR},
            {"name": c.VOLUME_AGENT, "mountPath": c.AGENT_DIR, "readOnly": True},
        ],
    }


def _uses_gpus(pod_spec: Mapping[str, Any]) -> bool:
    """Whether the kubelet gives this pod a GPU. What is claimed otherwise (DRA) may be one."""
    resources = [container.get("resources") or {} for container in pod_spec.get("containers") or []]
    asked = (name for part in resources for kind in ("limits", "requests") for name in part.get(kind) or {})
    return any(name.startswith(c.GPU_RESOURCES) for name in asked) or bool(pod_spec.get("resourceClaims"))


def _memory_env(spec: JobSpec) -> list[Manifest]:
    asked = spec.checkpoint
    if not asked.memory:
        return []
    env = [
        _value("HOLDFAST_MEMORY_TIER", f"{c.MEMORY_DIR}:{asked.memory}"),
        _value("HOLDFAST_MEMORY_INTERVAL", str(asked.memory_interval)),
    ]
    if asked.peer_interval is not None:
        env.append(_value("HOLDFAST_PEER_INTERVAL", str(asked.peer_interval)))
    if asked.peer_bytes_per_second is not None:
        env.append(_value("HOLDFAST_PEER_BYTES_PER_SECOND", str(asked.peer_bytes_per_second)))
    if asked.peer_in_flight is not None:
        env.append(_value("HOLDFAST_PEER_IN_FLIGHT", str(asked.peer_in_flight)))
    return env


def _local_env(spec: JobSpec) -> list[Manifest]:
    asked = spec.checkpoint
    if not asked.local:
        return []
    env = [
        _value("HOLDFAST_LOCAL_TIER", f"{c.LOCAL_DIR}:{asked.local}"),
        _value("HOLDFAST_LOCAL_INTERVAL", str(asked.local_interval)),
    ]
    if asked.local_bytes_per_second is not None:
        env.append(_value("HOLDFAST_LOCAL_BYTES_PER_SECOND", str(asked.local_bytes_per_second)))
    if asked.local_in_flight is not None:
        env.append(_value("HOLDFAST_LOCAL_IN_FLIGHT", str(asked.local_in_flight)))
    return env


def _launcher_preflight_env(spec: JobSpec) -> list[Manifest]:
    """The launcher tries the checkpoint volume and the object store: it has the trainer's user, mounts and secret."""
    asked = spec.preflight
    if asked is None:
        return []
    env = []
    if STORAGE in asked.checks:
        env = [
            _value("HOLDFAST_PREFLIGHT_FREE_BYTES", str(asked.free_bytes)),
            _value("HOLDFAST_PREFLIGHT_WRITE_BYTES", str(asked.write_bytes)),
        ]
    if OBJECT_STORE in asked.checks:
        env.append(_value("HOLDFAST_PREFLIGHT_OBJECT", "1"))
    return [*env, _value("HOLDFAST_PREFLIGHT_SECONDS", str(asked.timeout_seconds))] if env else []


def _preflight_env(spec: JobSpec) -> list[Manifest]:
    asked = spec.preflight
    if asked is None:
        return []
    return [
        _value("HOLDFAST_PREFLIGHT", ",".join(asked.checks)),
        _value("HOLDFAST_PREFLIGHT_SECONDS", str(asked.timeout_seconds)),
        _value("HOLDFAST_PREFLIGHT_GPUS", str(_gpus(spec.pod_spec))),
        _value("HOLDFAST_PREFLIGHT_SKEW_SECONDS", str(asked.skew_seconds)),
    ]


def _gpus(pod_spec: Mapping[str, Any]) -> int:
    """How many whole GPUs the pod asks for; 1 where it asks for parts of one, whose number says little."""
    resources = [container.get("resources") or {} for container in pod_spec.get("containers") or []]
    limits = [part.get("limits") or {} for part in resources]
    whole = [limit[c.GPU_RESOURCE] for limit in limits if c.GPU_RESOURCE in limit]
    if whole:
        return sum(int(quantity(number)) for number in whole)
    return int(any(name.startswith(c.GPU_RESOURCES) for limit in limits for name in limit))


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
        limit = {"medium": "Memory", "sizeLimit": spec.checkpoint.memory}
        volumes.append({"name": c.VOLUME_MEMORY, "emptyDir": limit})
    if spec.checkpoint.local:
        volumes.append({"name": c.VOLUME_LOCAL, "emptyDir": {"sizeLimit": spec.checkpoint.local}})
    if spec.checkpoint.claim_name:
        claim = {"claimName": spec.checkpoint.claim_name}
        volumes.append({"name": c.VOLUME_CHECKPOINTS, "persistentVolumeClaim": claim})
    return volumes


def _agent_sources(job: Job) -> list[Manifest]:
    token = {"audience": c.TOKEN_AUDIENCE, "expirationSeconds": c.TOKEN_SECONDS, "path": "token"}
    bundle = {"name": ca_config_map(job.name), "items": [{"key": c.CA_KEY, "path": c.CA_KEY}]}
    return [{"serviceAccountToken": token}, {"configMap": bundle}]


def _tolerations(pod_spec: Manifest) -> list[Manifest]:
    """The stock 300 s would keep a dead node's pods for minutes. The user's own win."""
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


def _identity_env() -> list[Manifest]:
    return [
        _value("HOLDFAST_RUN_DIR", c.RUN_DIR),
        _field("HOLDFAST_POD_UID", "metadata.uid"),
        _field("HOLDFAST_POD_NAME", "metadata.name"),
        _field("HOLDFAST_POD_NAMESPACE", "metadata.namespace"),
        _field("HOLDFAST_NODE_NAME", "spec.nodeName"),
    ]


def _value(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _metadata(job: Job, name: str, *, component: str) -> Manifest:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**labels(job), c.LABEL_APP_COMPONENT: component},
        "ownerReferences": [owner_reference(job)],
    }


def settings(spec: JobSpec) -> Manifest:
    """Effective settings, as launchers get them."""
    return {
        "minReplicas": spec.min_replicas,
        "replicaStep": spec.replica_step,
        "onFailure": spec.on_failure,
        "replicas": spec.replicas,
        "processesPerWorker": spec.processes_per_worker,
        "heartbeatSeconds": c.HEARTBEAT_SECONDS,
        "deadAfterSeconds": c.DEAD_AFTER_SECONDS,
        "firstAttemptWaitSeconds": c.FIRST_ATTEMPT_WAIT_SECONDS,
        "startupDeadlineSeconds": float(spec.startup_deadline_seconds),
        "checkpoint": {
            "interval": spec.checkpoint.interval,
            "keepLast": spec.checkpoint.keep_last,
            **({"fullEvery": spec.checkpoint.full_every} if spec.checkpoint.full_every > 1 else {}),
            **({"deltaThreshold": spec.checkpoint.delta_threshold} if spec.checkpoint.delta_threshold else {}),
            **({"retention": spec.checkpoint.retention} if spec.checkpoint.retention else {}),
            **({"bytesPerSecond": spec.checkpoint.bytes_per_second} if spec.checkpoint.bytes_per_second else {}),
            **({"maxInFlight": spec.checkpoint.max_in_flight} if spec.checkpoint.max_in_flight else {}),
            "resume": spec.checkpoint.resume,
            "deadlineSeconds": float(spec.drain_seconds),
        },
        "budgets": [
            {
                "cause": budget.cause,
                "maxRestarts": budget.max_restarts,
                "windowSeconds": float(budget.window_seconds),
            }
            for budget in spec.budgets
        ],
        "backoff": {
            "initialSeconds": float(spec.backoff.initial_seconds),
            "maxSeconds": float(spec.backoff.max_seconds),
        },
        **rules_for_launchers(spec.rules),
        **({} if spec.hang is None else {"hangDetection": _hang(spec.hang)}),
        **({"shrinkAfterSeconds": float(spec.shrink_after_seconds)} if spec.shrink_after_seconds else {}),
    }


def rules_for_launchers(rules: tuple[Rule, ...]) -> Manifest:
    """Those that launchers can judge, up to the first that they cannot: the first match wins there as well."""
    if not rules:
        return {}
    known = list(takewhile(lambda rule: rule.for_launchers, rules))
    return {"rules": [_rule(rule) for rule in known], "rulesElsewhere": len(known) < len(rules)}


def _rule(rule: Rule) -> Manifest:
    asked: Manifest = {"name": rule.name, "action": rule.action}
    if rule.cause:
        asked["cause"] = rule.cause
    if rule.exit_codes is not None:
        asked["exitCodes"] = {"operator": rule.exit_codes.operator, "values": list(rule.exit_codes.values)}
    if rule.signals:
        asked["signals"] = list(rule.signals)
    if rule.oom:
        asked["oom"] = rule.oom
    if rule.hang:
        asked["hang"] = True
    return asked


def _hang(hang: HangSpec) -> Manifest:
    return {
        "stepTimeout": hang.step,
        "dataTimeoutSeconds": float(hang.data),
        "checkpointTimeoutSeconds": float(hang.checkpoint),
        "evaluationTimeoutSeconds": float(hang.evaluation),
    }


def membership_document(
    job: Job,
    spec: JobSpec,
    membership: Membership,
    restarts: Mapping[str, int],
    job_key: str,
    *,
    durable_step: int | None,
) -> Manifest:
    """``membership.json``; ``durable_step`` is that of the newest checkpoint outside of the pods and their nodes."""
    published = membership.to_json()
    return {
        "version": c.PROTOCOL_VERSION,
        "job": {"namespace": job.namespace, "name": job.name, "uid": job.uid, "runId": run_id(job)},
        **published,
        "restarts": dict(restarts),
        "durableStep": durable_step,
        "settings": settings(spec),
        "jobKey": job_key,
    }
