"""One rank's place in a world: from its environment at the start, from its launcher's word afterwards. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.attempt import AttemptId
from holdfast.core.environment import Environment
from holdfast.core.errors import DocumentError, UsageError


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Who this rank is in an attempt, and where the attempt's ranks meet. Without a pair: started by hand."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int | None
    pair: AttemptId | None = None
    publication: str = ""
    job_uid: str = ""
    run_id: str = ""
    torchrun: Mapping[str, str] = field(default_factory=dict)
    # Nobody else serves the store: rank 0 does (a script that was started by hand, without torchrun).
    serves_store: bool = False

    @property
    def name(self) -> str:
        """What keeps this attempt's keys apart from others in one store."""
        return "holdfast/by-hand" if self.pair is None else f"holdfast/{self.pair}"


def from_environment(environment: Environment) -> RankPlacement | None:
    """The place that the process was started for; None for one that stands by."""
    if environment.standby:
        return None
    if environment.world_size > 1 and not environment.master_addr:
        raise UsageError("WORLD_SIZE is above 1 and MASTER_ADDR is not set: start the script with 'holdfast run'")
    return RankPlacement(
        rank=environment.rank,
        local_rank=environment.local_rank,
        world_size=environment.world_size,
        local_world_size=environment.local_world_size,
        host=environment.master_addr,
        port=environment.master_port,
        pair=_pair(environment),
        publication=environment.publication,
        job_uid=environment.job_uid,
        run_id=environment.run_id,
        serves_store=environment.rank == 0 and not environment.agent_store,
    )


def _pair(environment: Environment) -> AttemptId | None:
    if environment.agent_socket is None:
        return None
    if environment.generation is None or environment.attempt is None:
        raise UsageError("HOLDFAST_AGENT_SOCKET is set without HOLDFAST_GENERATION and HOLDFAST_ATTEMPT: unset it")
    return AttemptId(environment.generation, environment.attempt)


def from_message(body: Mapping[str, Any]) -> RankPlacement:
    """The place that a launcher's `world` gives."""
    try:
        return RankPlacement(
            rank=int(body["rank"]),
            local_rank=int(body["localRank"]),
            world_size=int(body["worldSize"]),
            local_world_size=int(body["localWorldSize"]),
            host=str(body["masterHost"]),
            port=int(body["masterPort"]),
            pair=AttemptId.from_json(body),
            publication=str(body["publication"]),
            job_uid=str(body["jobUID"]),
            run_id=str(body["runID"]),
            torchrun={str(name): str(value) for name, value in body["torchrun"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"not a world: {error!r}") from error
