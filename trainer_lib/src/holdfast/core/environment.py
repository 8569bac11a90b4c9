"""Access to the process environment, which no other module of this package reads or writes. Declares every variable.

The variables are part of the interface: see `docs/reference/protocol.md`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.core.errors import UsageError
from holdfast.core.limits import MOST_FULL_EVERY, MOST_IN_FLIGHT
from holdfast.core.paths import checkpoint_place
from holdfast.core.settings import (
    Owner,
    Volume,
    interval,
    number,
    one_of,
    setting,
    settings_of,
    switch,
    volume,
    whole,
)

# Unique per process that the launcher starts, so that the launcher finds all descendants of the process.
ENV_PROCESS_MARK: Final = "HOLDFAST_PROCESS_MARK"
# The variables of torchrun for a process's place in the world, in addition to TORCHELASTIC_* and Holdfast's own.
PLACE_VARIABLES: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    }
)
PLACE_PREFIXES: Final = ("HOLDFAST_", "TORCHELASTIC_")
# Variables that torch's NCCL reads when it creates a communicator, so that none of its threads ends the process.
NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
BOTH, RANK = Owner.BOTH, Owner.RANK
NO_LIMIT: Final = "no limit"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The settings that have a variable: HOLDFAST_ and the setting's name, unless another one is declared."""

    given: frozenset[str] = frozenset()
    """Names of the settings that a variable or an option sets."""

    # Checkpoints
    checkpoint_dir: Path | str | None = setting(
        None,
        checkpoint_place,
        "checkpoint folder, or `s3://BUCKET/PREFIX` or another URL. Without an operator, one run at a time: the "
        "launcher at the endpoint locks `run.lock` in the folder, and a second run is refused after 15 s. An object "
        "store has no lock",
        owner=BOTH,
    )
    checkpoint_interval: str = setting(
        "5m",
        interval,
        "steps (`50`), a duration (`30s`, `5m`), or `Auto`: "
        "[the interval with the least cost](../how-to/checkpoints.md#how-often)",
        flag="--checkpoint-interval N",
        owner=BOTH,
        key="interval",
        shown="50; 5m without a launcher",
    )
    checkpoint_keep: int = setting(
        3, whole(1), "number of newest checkpoints to keep", flag="--checkpoint-keep N", owner=BOTH, key="keepLast"
    )
    checkpoint_full_every: int = setting(
        1,
        whole(1, MOST_FULL_EVERY),
        "one of this many checkpoints is full; the others hold [the changes](../how-to/checkpoints.md#deltas)",
        flag="--checkpoint-full-every N",
        owner=BOTH,
        key="fullEvery",
    )
    checkpoint_delta_threshold: float = setting(
        0.0,
        number,
        "maximum difference between a restored and a saved weight, for "
        "[smaller deltas](../how-to/checkpoints.md#leaving-out-what-hardly-moved); 0 means exact",
        flag="--checkpoint-delta-threshold X",
        owner=BOTH,
        key="deltaThreshold",
    )
    checkpoint_retention: str = setting(
        "",
        str,
        "which other checkpoints to keep: [rules](../how-to/checkpoints.md#what-is-kept), such as "
        "`hours=6,daily=7,every=10000`",
        flag="--checkpoint-retention RULES",
        owner=BOTH,
        key="retention",
    )
    resume: str = setting(
        "Always",
        one_of("Always", "Never"),
        "`Never` starts at step 0 in a folder that has checkpoints of another run",
        flag="--resume WHEN",
        owner=BOTH,
        key="resume",
    )
    checkpoint_override: bool = setting(
        False,
        switch,
        "`1`: the checkpoint settings of the environment override the arguments of `holdfast.init`",
        owner=RANK,
    )
    checkpoint_bytes_per_second: int | None = setting(
        None, whole(1), "maximum that all ranks write to the folder", owner=RANK, key="bytesPerSecond", shown=NO_LIMIT
    )
    checkpoint_in_flight: int | None = setting(
        None, whole(1, MOST_IN_FLIGHT), "concurrent writes of each rank to the folder, 1 to 64", owner=RANK, shown="2"
    )
    object_url: str = setting(
        "",
        str,
        "`s3://BUCKET/PREFIX` or another URL to which checkpoints are also copied "
        "([how-to](../how-to/object-store.md)); the operator's `checkpoint.object` has priority",
        flag="--object-url URL",
        owner=BOTH,
        variable_wins=True,
    )
    object_interval_seconds: float = setting(0.0, number, "least time between copies to the object store, in seconds")
    object_keep: int | None = setting(
        None, whole(), "number of newest copies to keep in the object store", shown="as `--checkpoint-keep`"
    )
    object_retention: str = setting(
        "", str, "rules for the copies in the object store", shown="as `--checkpoint-retention`"
    )
    object_bytes_per_second: int | None = setting(
        None, whole(1), "maximum that a launcher sends to the object store", shown=NO_LIMIT
    )
    object_in_flight: int | None = setting(
        None, whole(1, MOST_IN_FLIGHT), "concurrent requests to the object store, 1 to 64", owner=BOTH, shown="8"
    )
    memory_tier: Volume | None = setting(
        None,
        volume,
        "a memory volume for checkpoints that outlive the rank processes ([how-to](../how-to/memory-tier.md)); "
        "needs a checkpoint folder",
        flag="--memory-tier PATH[:SIZE]",
    )
    memory_interval: int = setting(1, whole(1), "steps between checkpoints in memory", flag="--memory-interval N")
    peer_interval: int | None = setting(
        None,
        whole(1),
        "steps between copies on another node; without it there are no copies",
        flag="--peer-interval N",
    )
    peer_bytes_per_second: int | None = setting(
        None, whole(1), "maximum that each rank sends to another node's memory", shown=NO_LIMIT
    )
    peer_in_flight: int | None = setting(
        None, whole(1, MOST_IN_FLIGHT), "concurrent reads from another node's memory, 1 to 64", shown="4"
    )
    local_tier: Volume | None = setting(
        None,
        volume,
        "a folder on a disk of this host for checkpoints that outlive ranks and launcher "
        "([how-to](../how-to/local-tier.md)); needs a checkpoint folder",
        flag="--local-tier PATH[:SIZE]",
    )
    local_interval: int = setting(10, whole(1), "steps between checkpoints on the disk", flag="--local-interval N")
    local_bytes_per_second: int | None = setting(
        None, whole(1), "maximum that each rank writes to its node's disk", shown=NO_LIMIT
    )
    local_in_flight: int | None = setting(
        None, whole(1, MOST_IN_FLIGHT), "concurrent writes of each rank to its node's disk, 1 to 64", shown="2"
    )
    # The launcher and its pod
    run_dir: Path | None = setting(None, Path, "run directory", shown="a new folder in `TMPDIR`, or in memory")
    pod_uid: str = setting("", str, "UID of the pod")
    pod_name: str = setting("", str, "name of the pod", owner=BOTH)
    pod_ip: str = setting("", str, "address of the pod")
    node_name: str = setting("", str, "name of the pod's node")
    job_name: str = setting("", str, "name of the job")
    job_key_file: Path | None = setting(None, Path, "file with the key of several hosts")
    grace_seconds: float = setting(30.0, number, "time from SIGTERM to SIGKILL that the environment allows")
    control_port: int | None = setting(
        None,
        whole(),
        "port of the launcher; 0 for any. A port in use is replaced by a free one, which the status names",
        shown="29401 under the operator, otherwise any",
    )
    termination_log: Path = setting(
        Path("/dev/termination-log"), Path, "file for the reason of the end; written only if it exists"
    )
    preflight_free_bytes: int | None = setting(
        None, whole(), "free bytes that the checkpoint volume needs before the job starts"
    )
    preflight_write_bytes: int | None = setting(
        None, whole(), "bytes per second that the checkpoint volume must write before the job starts"
    )
    preflight_object: bool = setting(False, switch, "`1`: check the object store before the job starts")
    preflight_seconds: float = setting(60.0, number, "time limit of these checks")
    # A rank process
    exit_seconds: float = setting(
        300.0,
        number,
        "how long a rank process may outlive its script. Threads and `multiprocessing` children that do not end are "
        "logged after 10 s. After the limit the process is killed and the job completes",
        owner=RANK,
    )
    agent_socket: Path | None = setting(None, Path, "socket of the launcher", owner=RANK)
    slot: int | None = setting(None, whole(), "number of the process in its launcher", owner=RANK)
    standby: bool = setting(False, switch, "`1`: the launcher sends the world later, over the socket", owner=RANK)
    generation: int | None = setting(None, whole(), "generation of the world", owner=RANK)
    attempt: int | None = setting(None, whole(), "attempt of the world", owner=RANK)
    publication: str = setting("", str, "publication of the membership", owner=RANK)
    job_uid: str = setting("", str, "UID of the job", owner=RANK)
    run_id: str = setting("", str, "name of the run", owner=RANK)
    chaos: Path | None = setting(None, Path, "folder of `holdfast chaos`", owner=RANK)
    rank: int = setting(0, whole(), "rank", variable="RANK", owner=RANK)
    local_rank: int = setting(0, whole(), "rank on this host", variable="LOCAL_RANK", owner=RANK)
    world_size: int = setting(1, whole(1), "number of ranks", variable="WORLD_SIZE", owner=RANK)
    local_world_size: int = setting(
        1, whole(1), "number of ranks on this host", variable="LOCAL_WORLD_SIZE", owner=RANK
    )
    master_addr: str = setting("", str, "host of the TCP store", variable="MASTER_ADDR", owner=RANK)
    master_port: int | None = setting(None, whole(), "port of the TCP store", variable="MASTER_PORT", owner=RANK)
    agent_store: bool = setting(
        False,
        "True".__eq__,
        "`True`: the launcher serves the TCP store",
        variable="TORCHELASTIC_USE_AGENT_STORE",
        owner=RANK,
    )
    socket_interface: str = setting(
        "", str, "network interface of the process groups", variable="GLOO_SOCKET_IFNAME", owner=RANK
    )

    @property
    def checkpoint_folder(self) -> Path | None:
        """The checkpoint directory, if it is a folder."""
        return self.checkpoint_dir if isinstance(self.checkpoint_dir, Path) else None

    @property
    def checkpoint_url(self) -> str:
        """The checkpoint directory, if it is in an object store; otherwise ""."""
        return self.checkpoint_dir if isinstance(self.checkpoint_dir, str) else ""

    @property
    def under_operator(self) -> bool:
        """Whether the membership comes from a file that a sidecar writes."""
        return self.run_dir is not None and bool(self.pod_uid)

    def with_options(self, given: Mapping[str, Any]) -> Environment:
        """Apply the options of the command line.

        An option overrides its variable, unless its setting reverses this.
        """
        variables = {one.name for one in SETTINGS if one.variable_wins} & self.given
        values = {name: value for name, value in given.items() if name not in variables}
        return replace(self, **values, given=self.given | values.keys())


SETTINGS: Final = settings_of(Environment, prefix="HOLDFAST_")
_VARIABLES: Final = {one.name: one.variable for one in SETTINGS}


def variable(name: str) -> str:
    return _VARIABLES[name]


def variables(**values: object) -> dict[str, str]:
    """Return the variables that set these settings. Settings without a value are omitted."""
    return {_VARIABLES[name]: str(value) for name, value in values.items() if value not in (None, "")}


def process_environment() -> dict[str, str]:
    """Return a copy of the environment for a child process."""
    return dict(os.environ)


def helper_environment() -> dict[str, str]:
    """Return the environment of a child that needs no thread pool and no GPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def place() -> tuple[int, int]:
    """Return the rank and size of the world, which change when the process enters another world."""
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def aws_region() -> str | None:
    """Return AWS_REGION, which all AWS clients except boto3 read; boto3 reads only `AWS_DEFAULT_REGION`."""
    return os.environ.get("AWS_REGION") or None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and validate every variable that this package declares."""
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for one in SETTINGS:
        if text := source.get(one.variable):
            try:
                values[one.name] = one.read(text)
            except ValueError as error:
                raise UsageError(f"{one.variable}: invalid value {text!r}: {error}") from None
            except UsageError as error:
                raise UsageError(f"{one.variable}: {error}") from None
    return Environment(given=frozenset(values), **values)


@contextmanager
def nccl_error_handling_off() -> Iterator[None]:
    """Set the variables with which a new torch communicator does not end the process when a peer is lost."""
    before = {name: os.environ.get(name) for name in NCCL_ENVIRONMENT}
    os.environ.update(NCCL_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def publish(variables: Mapping[str, str]) -> None:
    """Set the variables of a world that this process received after its start, for the script and its libraries."""
    os.environ.update(variables)
