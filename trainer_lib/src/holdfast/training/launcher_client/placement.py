"""One rank's place in a world: first from its environment, later from its launcher's messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.attempt import AttemptId
from holdfast.core.environment import Environment
from holdfast.core.errors import DocumentError, UsageError


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """A rank's identity in an attempt, and the rendezvous of its ranks. The attempt ID is None without a launcher."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int | None
    attempt_id: AttemptId | None = None
    publication: str = ""
    job_uid: str = ""
    run_id: str = ""
    torchrun: Mapping[str, str] = field(default_factory=dict)
    # Rank 0 serves the store, because no launcher or torchrun does.
    serves_store: bool = False

    @property
    def name(self) -> str:
        """The prefix of this attempt's keys in a shared store."""
        return "holdfast/by-hand" if self.attempt_id is None else f"holdfast/{self.attempt_id}"


def from_environment(environment: Environment) -> RankPlacement | None:
    """Return the place for which the process was started; None for a standby."""
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
        attempt_id=_attempt_id(environment),
        publication=environment.publication,
        job_uid=environment.job_uid,
        run_id=environment.run_id,
        serves_store=environment.rank == 0 and not environment.agent_store,
    )


def _attempt_id(environment: Environment) -> AttemptId | None:
    if environment.agent_socket is None:
        return None
    if environment.generation is None or environment.attempt is None:
        raise UsageError("HOLDFAST_AGENT_SOCKET is set without HOLDFAST_GENERATION and HOLDFAST_ATTEMPT: unset it")
    return AttemptId(environment.generation, environment.attempt)


def from_message(body: Mapping[str, Any]) -> RankPlacement:
    """Return the place in a launcher's `world` message."""
    try:
        return RankPlacement(
            rank=int(body["rank"]),
            local_rank=int(body["localRank"]),
            world_size=int(body["worldSize"]),
            local_world_size=int(body["localWorldSize"]),
            host=str(body["masterHost"]),
            port=int(body["masterPort"]),
            attempt_id=AttemptId.from_json(body),
            publication=str(body["publication"]),
            job_uid=str(body["jobUID"]),
            run_id=str(body["runID"]),
            torchrun={str(name): str(value) for name, value in body["torchrun"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"not a world: {error!r}") from error
