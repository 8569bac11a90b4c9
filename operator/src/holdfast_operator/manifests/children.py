"""A job's children other than its pods."""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import ca_config_map, rendezvous_service
from holdfast_operator.api.job import Job
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.manifests.common import Manifest, child_metadata, digest
from holdfast_operator.manifests.installation import Installation


def service(job: Job) -> Manifest:
    """Return the headless Service, which gives each pod a DNS name, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(job, job.name, component="network"),
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
    """Return the NetworkPolicy: workers reach each other at any port, and others only the metrics.

    TCPStore and gloo have no authentication, and the kernel chooses their ports.
    """
    workers = {"matchLabels": {c.LABEL_JOB: job.name, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(job, job.name, component="network"),
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
    """Return the PodDisruptionBudget: as many workers may be evicted at once as an elastic job may lack.

    One always may, or no node could ever be drained. Pods that are not ready are not protected.
    """
    may_lack = spec.replicas - spec.min_replicas if spec.on_failure == c.SHRINK else 0
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(job, job.name, component="disruption"),
        "spec": {
            "minAvailable": spec.replicas - max(1, may_lack),
            "selector": {"matchLabels": {c.LABEL_JOB: job.name, c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def config_map(job: Job, platform: Installation) -> Manifest:
    """Return the CA bundle with which sidecars verify the operator."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(job, ca_config_map(job.name), component="ca"),
        "data": {c.CA_KEY: platform.ca_bundle},
    }


def host_service(job: Job, host: int) -> Manifest:
    """Return the Service of the pod whose ``torchrun`` hosts the rendezvous store: one address for every host."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(job, rendezvous_service(job.name), component="network"),
        "spec": {
            "publishNotReadyAddresses": True,
            "selector": {c.LABEL_JOB: job.name, c.LABEL_INCARNATION: str(host)},
            "ports": [{"name": "store", "port": c.PORT_STORE, "protocol": "TCP", "targetPort": c.PORT_STORE}],
        },
    }


def children(job: Job, platform: Installation, host: int | None = None) -> tuple[Manifest, ...]:
    """Return a job's children other than its pods, in the order of need.

    ``host``: the worker that hosts its rendezvous.
    """
    closed = (network_policy(job),) if platform.network_policies else ()
    kept = (disruption_budget(job, job.spec),) if platform.disruption_budgets and job.spec is not None else ()
    meeting = (host_service(job, host),) if host is not None else ()
    return (*closed, service(job), *meeting, config_map(job, platform), *kept)


_MOST_DIGESTS = 1 << 14
_digests: dict[tuple[object, ...], str] = {}


def children_digest(job: Job, platform: Installation, host: int | None = None) -> str:
    """Return the digest of ``children``, cached for all inputs, because each pass needs it."""
    spec = job.spec
    asked = (spec.replicas, spec.min_replicas, spec.on_failure) if spec is not None else None
    key = (job.namespace, job.name, job.uid, asked, platform, host)
    found = _digests.get(key)
    if found is None:
        if len(_digests) >= _MOST_DIGESTS:
            _digests.clear()
        found = _digests[key] = digest(*children(job, platform, host))
    return found
