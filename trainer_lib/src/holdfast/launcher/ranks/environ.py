"""The environment of a rank process: what torchrun sets, and the address of its launcher. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.io.memcpy import BLOCK_BYTES
from holdfast.core.environment import PLACE_VARIABLES, SETTINGS, variables
from holdfast.core.protocol import Cause
from holdfast.launcher.host.run_dir import AGENT_SOCKET_FILE
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.messages import Master, World

_RANK_VARIABLES: Final = PLACE_VARIABLES | {
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
    *("HOLDFAST_GENERATION", "HOLDFAST_ATTEMPT", "HOLDFAST_PUBLICATION"),
}
_TUNABLES: Final = "GLIBC_TUNABLES"
_PAST_THE_CACHE: Final = "glibc.cpu.x86_non_temporal_threshold"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of one rank in a world."""

    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int

    @property
    def rank(self) -> int:
        """The global rank, by order of workers."""
        return self.group_rank * self.local_world_size + self.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the world."""
        return self.group_world_size * self.local_world_size


def places(world: World, me: str, processes: int) -> list[RankPlace]:
    """Return the places of this launcher's ranks in a world."""
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
    slot: int,
) -> dict[str, str]:
    """Return the environment of one rank process. Variables of the user are kept where torchrun keeps them."""
    environ = {**base, **torchrun_variables(place, world, master, membership, error_file)}
    _defaults(environ, place.local_world_size)
    environ.update(_own(membership, run_dir, slot))
    attempt_id = world.attempt_id
    return environ | variables(
        generation=attempt_id.generation, attempt=attempt_id.attempt, publication=world.publication
    )


def standby_environ(
    base: Mapping[str, str], membership: Membership, run_dir: Path, *, slot: int, processes: int
) -> dict[str, str]:
    """Return the environment of a process without a world. It contains no variables of a place."""
    environ = {name: value for name, value in base.items() if name not in _RANK_VARIABLES}
    _defaults(environ, processes)
    environ.update(_own(membership, run_dir, slot))
    return environ | variables(standby=1)


def world_message(
    place: RankPlace, world: World, master: Master, membership: Membership, error_file: Path
) -> dict[str, Any]:
    """Return the message that gives a running process its place in a world."""
    return {
        "type": "world",
        **world.attempt_id.to_json(),
        "publication": world.publication,
        "rank": place.rank,
        "localRank": place.local_rank,
        "worldSize": place.world_size,
        "localWorldSize": place.local_world_size,
        "groupRank": place.group_rank,
        "groupWorldSize": place.group_world_size,
        "masterHost": master.host,
        "masterPort": master.port,
        "jobUID": membership.job_uid,
        "runID": _run_id(membership),
        "torchrun": torchrun_variables(place, world, master, membership, error_file),
    }


def tunables(base: Mapping[str, str]) -> dict[str, str]:
    """Return the glibc tunable by which large copies of a checkpoint bypass the cache. It is read at process start.

    Otherwise each cache line is read before it is written, which is a third of the memory traffic. A value that the
    user sets has priority. Other C libraries and processors ignore the name.
    """
    options = [one for one in base.get(_TUNABLES, "").split(":") if one]
    if any(one.startswith(f"{_PAST_THE_CACHE}=") for one in options):
        return {}
    return {_TUNABLES: ":".join([*options, f"{_PAST_THE_CACHE}={BLOCK_BYTES:#x}"])}


def _defaults(environ: dict[str, str], processes: int) -> None:
    environ.update(tunables(environ))
    if processes > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environ.setdefault("PYTHONUNBUFFERED", "1")


def torchrun_variables(
    place: RankPlace, world: World, master: Master, membership: Membership, error_file: Path
) -> dict[str, str]:
    """Return the variables that torchrun sets for one rank."""
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
        "TORCHELASTIC_RESTART_COUNT": str(world.attempt_id.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(_max_restarts(membership)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def _own(membership: Membership, run_dir: Path, slot: int) -> dict[str, str]:
    checkpoint = membership.document.get("settings", {}).get("checkpoint", {})
    settings = {one.name: checkpoint.get(one.key) for one in SETTINGS if one.key}
    return variables(
        agent_socket=run_dir / AGENT_SOCKET_FILE,
        slot=slot,
        job_uid=membership.job_uid,
        run_id=_run_id(membership),
        **settings,
    )


def _run_id(membership: Membership) -> str:
    return str(membership.document.get("job", {}).get("runId") or membership.job_uid)


def _max_restarts(membership: Membership) -> int:
    return next((b.max_restarts for b in membership.rules.budgets if b.cause is Cause.APPLICATION), 0)
