"""Environment variables of a worker's containers: a table for each subject. A variable without a value is not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import run_id
from holdfast_operator.api.job import Job
from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import quantity, whole
from holdfast_operator.api.reasons import Cause
from holdfast_operator.api.spec.checkpoint import ObjectTier
from holdfast_operator.api.spec.preflight import OBJECT_STORE, STORAGE
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests.common import Manifest
from holdfast_operator.manifests.installation import Installation

Values = Mapping[str, Any]


def of_trainer(job: Job, spec: JobSpec, worker: Worker, rendezvous_ip: str) -> list[Manifest]:
    """Return the variables of the supervised container."""
    return [
        *_identity(),
        _field("HOLDFAST_POD_IP", "status.podIP"),
        *_variables(
            {
                "HOLDFAST_JOB_NAME": job.name,
                "HOLDFAST_CHECKPOINT_DIR": _shared_tier(job, spec),
                **_copies(job, spec),
                **_memory_tier(spec),
                **_local_tier(spec),
                **_launcher_preflight(spec),
                **_torchrun(job, spec, worker, rendezvous_ip),
            }
        ),
    ]


def of_sidecar(spec: JobSpec, platform: Installation) -> list[Manifest]:
    """Return the variables of the sidecar."""
    dcgm = platform.dcgm_url if _uses_gpus(spec.pod_spec) else ""
    return [
        *_identity(),
        # This comes before the address of DCGM, which may refer to it.
        *([_field("HOLDFAST_HOST_IP", "status.hostIP")] if dcgm else []),
        *_variables(
            {
                "HOLDFAST_OPERATOR_URL": platform.agents_url,
                "HOLDFAST_TOKEN_FILE": c.TOKEN_FILE,
                "HOLDFAST_CA_FILE": c.CA_FILE,
                "HOLDFAST_NOTICE_PROVIDERS": ",".join(spec.providers),
                "HOLDFAST_CHECKPOINT_DEADLINE_SECONDS": spec.checkpoint_deadline_seconds,
                "HOLDFAST_SIDECAR_PORT": c.PORT_SIDECAR,
                "HOLDFAST_LAUNCHER": None if spec.launched else "None",
                "HOLDFAST_METADATA_URL": platform.metadata_url or None,
                "HOLDFAST_DCGM_URL": dcgm or None,
                **_preflight(spec),
            }
        ),
    ]


def _identity() -> list[Manifest]:
    return [
        *_variables({"HOLDFAST_RUN_DIR": c.RUN_DIR}),
        _field("HOLDFAST_POD_UID", "metadata.uid"),
        _field("HOLDFAST_POD_NAME", "metadata.name"),
        _field("HOLDFAST_POD_NAMESPACE", "metadata.namespace"),
        _field("HOLDFAST_NODE_NAME", "spec.nodeName"),
    ]


def _shared_tier(job: Job, spec: JobSpec) -> str | None:
    """Return the folder of checkpoints; without a volume, its URL in the object store."""
    if spec.checkpoint.claim_name:
        return c.CHECKPOINT_DIR
    store = spec.checkpoint.shared_store
    return None if store is None else _folder(store, job)


def _folder(store: ObjectTier, job: Job) -> str:
    return f"{store.url}/{job.namespace}/{job.name}"


def _copies(job: Job, spec: JobSpec) -> Values:
    store = spec.checkpoint.copies
    if store is None:
        return {}
    return {
        "HOLDFAST_OBJECT_URL": _folder(store, job),
        "HOLDFAST_OBJECT_INTERVAL_SECONDS": store.interval_seconds,
        "HOLDFAST_OBJECT_KEEP": store.keep_last,
        "HOLDFAST_OBJECT_RETENTION": store.retention or None,
        "HOLDFAST_OBJECT_BYTES_PER_SECOND": store.bytes_per_second,
    }


def _memory_tier(spec: JobSpec) -> Values:
    memory, peer = spec.checkpoint.memory, spec.checkpoint.peer
    if memory is None:
        return {}
    return {
        "HOLDFAST_MEMORY_TIER": f"{c.MEMORY_DIR}:{whole(memory.size)}",
        "HOLDFAST_MEMORY_INTERVAL": memory.interval,
        "HOLDFAST_PEER_INTERVAL": peer.interval if peer else None,
    }


def _local_tier(spec: JobSpec) -> Values:
    local = spec.checkpoint.local
    if local is None:
        return {}
    return {
        "HOLDFAST_LOCAL_TIER": f"{c.LOCAL_DIR}:{whole(local.size)}",
        "HOLDFAST_LOCAL_INTERVAL": local.interval,
    }


def _launcher_preflight(spec: JobSpec) -> Values:
    """Return the variables of the launcher's checks. The launcher has the trainer's user, mounts and secret."""
    asked = spec.preflight
    if asked is None or not {STORAGE, OBJECT_STORE} & set(asked.checks):
        return {}
    storage = STORAGE in asked.checks
    return {
        "HOLDFAST_PREFLIGHT_FREE_BYTES": asked.free_bytes if storage else None,
        "HOLDFAST_PREFLIGHT_WRITE_BYTES": asked.write_bytes if storage else None,
        "HOLDFAST_PREFLIGHT_OBJECT": "1" if OBJECT_STORE in asked.checks else None,
        "HOLDFAST_PREFLIGHT_SECONDS": asked.timeout_seconds,
    }


def _preflight(spec: JobSpec) -> Values:
    asked = spec.preflight
    if asked is None:
        return {}
    return {
        "HOLDFAST_PREFLIGHT": ",".join(asked.checks),
        "HOLDFAST_PREFLIGHT_SECONDS": asked.timeout_seconds,
        "HOLDFAST_PREFLIGHT_GPUS": _gpus(spec.pod_spec),
        "HOLDFAST_PREFLIGHT_SKEW_SECONDS": asked.skew_seconds,
    }


def _torchrun(job: Job, spec: JobSpec, worker: Worker, rendezvous_ip: str) -> Values:
    """Return the variables that ``torchrun`` reads instead of options. Options of the command take precedence."""
    if spec.rendezvous != c.C10D:
        return {}
    # The host uses its own address, because not every network routes a pod to itself through a Service.
    host = "$(HOLDFAST_POD_IP)" if worker.hosts else rendezvous_ip
    least = spec.min_replicas if spec.shrinkable else spec.replicas
    budget = spec.budget(Cause.APPLICATION)
    return {
        "PET_NNODES": f"{least}:{max(spec.replicas, spec.max_replicas)}",
        "PET_NPROC_PER_NODE": spec.processes_per_worker,
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{host}:{c.PORT_STORE}",
        "PET_RDZV_CONF": f"is_host={int(worker.hosts)}",
        # Each host has a different ID, so that workers of an earlier world never join.
        "PET_RDZV_ID": f"{run_id(job)}-{worker.host}",
        "PET_LOCAL_ADDR": "$(HOLDFAST_POD_IP)",
        "PET_MAX_RESTARTS": budget.max_restarts if budget is not None else c.TORCHRUN_RESTARTS,
        # With a shared store, agents of torch 2.13 always send their ranks to the first rank 0, even a lost one.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _uses_gpus(pod_spec: Json) -> bool:
    """Return whether the kubelet gives this pod a GPU. Any other resource claim (DRA) may be one."""
    resources = [container.get("resources") or {} for container in pod_spec.get("containers") or []]
    asked = (name for part in resources for kind in ("limits", "requests") for name in part.get(kind) or {})
    return any(name.startswith(c.GPU_RESOURCES) for name in asked) or bool(pod_spec.get("resourceClaims"))


def _gpus(pod_spec: Json) -> int:
    """Return the number of complete GPUs that the pod requests; 1 if it requests parts of a GPU."""
    resources = [container.get("resources") or {} for container in pod_spec.get("containers") or []]
    limits = [part.get("limits") or {} for part in resources]
    whole = [limit[c.GPU_RESOURCE] for limit in limits if c.GPU_RESOURCE in limit]
    if whole:
        return sum(int(quantity(number)) for number in whole)
    return int(any(name.startswith(c.GPU_RESOURCES) for limit in limits for name in limit))


def _variables(values: Values) -> list[Manifest]:
    return [{"name": name, "value": str(value)} for name, value in values.items() if value is not None]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
