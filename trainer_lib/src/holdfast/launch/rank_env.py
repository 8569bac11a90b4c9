"""What a rank process finds in its environment: what torchrun sets, and where its launcher listens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast import constants as c
from holdfast.constants import Cause
from holdfast.launch.membership import Membership
from holdfast.launch.messages import Master, World


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One rank of a world, as its launcher counts it."""

    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int

    @property
    def rank(self) -> int:
        """The global rank: by order of workers."""
        return self.group_rank * self.local_world_size + self.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks the world has."""
        return self.group_world_size * self.local_world_size


def places(world: World, me: str, processes: int) -> list[RankPlace]:
    """This launcher's ranks in a world."""
    return [
        RankPlace(
            local_rank=local,
            local_world_size=processes,
            group_rank=world.position(me),
            group_world_size=len(world.members),
        )
        for local in range(processes)
    ]


def rank_environ(
    base: Mapping[str, str],
    *,
    place: RankPlace,
    world: World,
    master: Master,
    membership: Membership,
    run_dir: Path,
    error_file: Path,
) -> dict[str, str]:
    """The environment of one rank process; what the user set and torchrun would keep is kept."""
    environ = {**base, **_torchrun(place, world, master, membership, error_file)}
    if place.local_world_size > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.update(_own(world, membership, run_dir))
    return environ


def _torchrun(
    place: RankPlace, world: World, master: Master, membership: Membership, error_file: Path
) -> dict[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "TORCHELASTIC_RUN_ID": _run_id(membership),
        "TORCHELASTIC_RESTART_COUNT": str(world.pair.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(_max_restarts(membership)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def _own(world: World, membership: Membership, run_dir: Path) -> dict[str, str]:
    checkpoint = membership.document.get("settings", {}).get("checkpoint", {})
    values = {
        c.ENV_AGENT_SOCKET: str(run_dir / c.AGENT_SOCKET_FILE),
        c.ENV_GENERATION: str(world.pair.generation),
        c.ENV_ATTEMPT: str(world.pair.attempt),
        c.ENV_PUBLICATION: world.publication,
        c.ENV_JOB_UID: membership.job_uid,
        c.ENV_RUN_ID: _run_id(membership),
        c.ENV_CHECKPOINT_INTERVAL: str(checkpoint.get("interval", "")),
        c.ENV_CHECKPOINT_KEEP: str(checkpoint.get("keepLast", "")),
        c.ENV_RESUME: str(checkpoint.get("resume", "")),
    }
    return {name: value for name, value in values.items() if value}


def _run_id(membership: Membership) -> str:
    return str(membership.document.get("job", {}).get("runId") or membership.job_uid)


def _max_restarts(membership: Membership) -> int:
    return next((b.max_restarts for b in membership.rules.budgets if b.cause is Cause.APPLICATION), 0)
