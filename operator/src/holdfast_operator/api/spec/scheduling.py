"""``spec.scheduling``, and the workers that stay off spot capacity."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.spec.fields import choice, integer, mapping


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Constraints on the workers' nodes in addition to those of their template."""

    on_demand: int = 0  # number of workers that stay off spot capacity
    topology_key: str = ""
    topology_policy: str = ""
    exclusive_nodes: bool = False
    queue: str = ""  # a queue of Kueue, which admits each worker
    gang: bool = True  # the first workers wait behind gates until there is capacity for all

    @property
    def packed_by(self) -> str:
        """The label whose value all workers must share; empty if they need not."""
        return self.topology_key if self.topology_policy == c.PACKED else ""

    @property
    def spread_by(self) -> str:
        """The label over whose values the workers are spread; empty if they are not."""
        return self.topology_key if self.topology_policy == c.SPREAD else ""


def parse_scheduling(spec: Json) -> Scheduling:
    """Return the placement of a job's workers. Raises ``UnreadableError``."""
    path = "spec.scheduling"
    value = mapping(spec.get("scheduling", {}), path)
    workers = mapping(spec.get("workers"), "spec.workers")
    return Scheduling(
        on_demand=integer(workers, "onDemandReplicas", "spec.workers", 0, minimum=0),
        topology_key=str(value.get("topologyKey") or ""),
        topology_policy=choice(value, "topologyPolicy", path, ("", c.SPREAD, c.PACKED), ""),
        exclusive_nodes=choice(value, "nodeSharing", path, (c.ALLOW, c.EXCLUSIVE), c.ALLOW) == c.EXCLUSIVE,
        queue=str(value.get("queue") or ""),
        gang=choice(value, "gang", path, (c.GATES, c.NO_GANG), c.GATES) == c.GATES,
    )
