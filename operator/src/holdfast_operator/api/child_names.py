"""Names of the objects that belong to a job."""

from __future__ import annotations

from holdfast_operator.api.job import Job


def pod_name(job: str, incarnation: int) -> str:
    """Return the name of a worker's pod, which is never used twice."""
    return f"{job}-w{incarnation}"


def ca_config_map(job: str) -> str:
    """Return the name of the ConfigMap with the operator's CA bundle."""
    return f"{job}-holdfast-ca"


def rendezvous_service(job: str) -> str:
    """Return the name of the Service of the pod that hosts a ``c10d`` store."""
    return f"{job}-rendezvous"


def run_id(job: Job) -> str:
    """Return the run ID that torch's rendezvous and logs show."""
    return f"{job.name}-{job.uid[:8]}"
