"""Decides which workers of a job find capacity, under all placement constraints. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from holdfast_operator.api import names as c
from holdfast_operator.api.job import Job
from holdfast_operator.api.json import Json
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.placement import placed
from holdfast_operator.manifests.pod import pod
from holdfast_operator.scheduling.capacity import FreeCapacity, PodRequest, place_together
from holdfast_operator.scheduling.waiting_gang import WaitingGang


def place(
    job: Job, platform: Installation, room: FreeCapacity, workers: Iterable[Worker], avoid: Sequence[str] = ()
) -> tuple[tuple[Worker, ...], str]:
    """Return the workers that find capacity together, and the domain of a packed job without one.

    Subtracts the capacity.
    """
    spec = job.spec
    if spec is None:
        return (), ""
    groups: dict[tuple[bool, str, tuple[str, ...]], list[Worker]] = defaultdict(list)
    for worker in workers:
        groups[not worker.on_demand, worker.domain, worker.avoid].append(worker)
    # Workers with fewer possible nodes come first.
    ordered = [groups[key] for key in sorted(groups)]
    settled = all(worker.domain for group in ordered for worker in group)
    asks = [_ask(pod(job, spec, group[0], platform), len(group), avoid) for group in ordered]
    found, domain = place_together(room, asks, "" if settled else spec.scheduling.packed_by)
    return tuple(w for group, count in zip(ordered, found, strict=True) for w in group[:count]), domain


def _ask(manifest: Json, count: int, avoid: Sequence[str]) -> PodRequest:
    """Return the pods as the operator would create them."""
    meta = manifest["metadata"]
    return PodRequest(
        pod_spec=manifest["spec"],
        count=count,
        avoid=tuple(avoid),
        namespace=meta["namespace"],
        labels=meta["labels"],
    )


def place_rival(room: FreeCapacity, rival: WaitingGang) -> int:
    """Return how many pods of another job's gang find capacity. Subtracts that capacity."""
    parts = ((True, rival.on_demand), (False, rival.pods - rival.on_demand))
    asks = [_ask_of_rival(rival, on_demand, count) for on_demand, count in parts if count > 0]
    return sum(place_together(room, asks, "" if rival.domain else rival.scheduling.packed_by)[0])


def _ask_of_rival(rival: WaitingGang, on_demand: bool, count: int) -> PodRequest:
    namespace, _, name = rival.key.partition("/")
    return PodRequest(
        pod_spec=placed(
            rival.pod_spec,
            rival.scheduling,
            namespace=namespace,
            job=name,
            on_demand=on_demand,
            domain=rival.domain,
        ),
        count=count,
        namespace=namespace,
        labels={
            c.LABEL_JOB: name,
            c.LABEL_APP_MANAGED_BY: c.MANAGED_BY,
            c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER,
        },
    )
