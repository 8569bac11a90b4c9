"""Gangs and capacity."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.api import names as c
from holdfast_operator.decision.reporting.messages.common import count


def gang_timeout(missing: int, workers: int, seconds: int, retry_seconds: int) -> str:
    return (
        f"{missing} of {workers} workers were not scheduled within {seconds} s; gang cancelled, retrying in"
        f" {retry_seconds} s"
    )


def gang_shrunk(missing: int, workers: int, seconds: int) -> str:
    return (
        f"{missing} of {workers} workers were not scheduled within {seconds} s; replacing them, the others continue"
    )


def queue_timeout(missing: int, workers: int, queue: str, seconds: int, retry_seconds: int) -> str:
    return (
        f"{missing} of {workers} workers were not admitted by {queue} within {seconds} s; gang cancelled, retrying in"
        f" {retry_seconds} s"
    )


def waiting_for_retry() -> str:
    return "Gang could not be scheduled; waiting to retry"


def waiting_for_pods() -> str:
    return "The pods of the gang are being created"


def waiting_for_capacity(placed: int, workers: int, domain: str = "", on_demand: int = 0, others: int = 0) -> str:
    where = f" with one {domain}" if domain else ""
    steady = f", of which {on_demand} must not be on spot capacity (onDemandReplicas)" if on_demand else ""
    beside = f" in addition to {count(others, 'worker')} of jobs that go first" if others else ""
    return f"Cluster has capacity for {placed} of {workers} workers{where}{steady}{beside}; they start together"


def not_admitted(admitted: int, workers: int, queue: str, *, hint: bool) -> str:
    more = f" (Kueue, with its integration of pods, removes {c.QUEUE_GATE} from admitted pods)" if hint else ""
    return f"{admitted} of {workers} workers are admitted by {queue}; they start together{more}"


def waiting_for_gates(pod: str, gates: Sequence[str]) -> str:
    return f"Pod {pod} is waiting for {', '.join(gates)} to be removed"


def scheduling(waiting: int, workers: int, preempting: int = 0) -> str:
    until = f", {preempting} of them until pods of lower priority have left" if preempting else ""
    return f"{waiting} of {workers} workers are waiting for a node{until}"


def started_with_fewer(size: int, workers: int) -> str:
    return f"Cluster has capacity for {size} of {workers} workers; starting with {size}, the rest join later"


def domain_empty(domain: str) -> str:
    return f"No worker of the job is left in {domain}"


def avoided_nodes_healthy() -> str:
    return "Previously avoided nodes are healthy again"


def scaling_up(workers: int, most: int) -> str:
    return f"Scaling up to {workers} workers (elasticity.maxReplicas: {most})"


def capacity_yielded(workers: int) -> str:
    return f"Removing {count(workers, 'worker')} above workers.replicas: another job is waiting for capacity"
