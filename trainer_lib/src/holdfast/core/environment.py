"""The one place where this package reads, and writes, the process environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.core import environment_variables as v
from holdfast.core.errors import UsageError
from holdfast.core.limits import MOST_IN_FLIGHT
from holdfast.core.paths import local_path

TERMINATION_LOG: Final = "/dev/termination-log"
DEFAULT_EXIT_SECONDS: Final = 300.0
# What torch's NCCL reads when a communicator is made: no thread of its own may end the process.
NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says, to a launcher or to a rank process; empty or None where it says nothing."""

    # Both sides.
    checkpoint_dir: Path | None
    # The launcher.
    run_dir: Path | None
    pod_uid: str
    pod_name: str
    pod_namespace: str
    pod_ip: str
    node_name: str
    job_name: str
    job_key_file: Path | None
    grace_seconds: float
    control_port: int | None
    termination_log: Path
    omp_threads_set: bool
    object_url: str
    object_interval_seconds: float
    object_keep: int | None
    object_retention: str
    object_bytes_per_second: float | None
    object_in_flight: int | None
    preflight_free_bytes: int | None
    preflight_write_bytes: int | None
    preflight_object: bool
    preflight_seconds: float
    local_tier: str
    local_interval: int | None
    local_bytes: int | None
    local_in_flight: int | None
    memory_tier: str
    memory_interval: int | None
    peer_interval: int | None
    peer_bytes: int | None
    peer_in_flight: int | None
    # A rank process.
    agent_socket: Path | None
    slot: int | None
    standby: bool
    exit_seconds: float
    generation: int | None
    attempt: int | None
    publication: str
    job_uid: str
    run_id: str
    checkpoint_interval: str
    checkpoint_keep: int | None
    checkpoint_full_every: int | None
    checkpoint_delta_threshold: float | None
    checkpoint_retention: str
    checkpoint_bytes_per_second: int | None
    checkpoint_in_flight: int | None
    resume: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int | None
    agent_store: bool
    chaos_dir: Path | None
    socket_interface: str

    @property
    def under_operator(self) -> bool:
        """Whether the membership comes from a file that a sidecar writes."""
        return self.run_dir is not None and bool(self.pod_uid)


def process_environment() -> dict[str, str]:
    """All of it, to be handed on to a child process."""
    return dict(os.environ)


def place() -> tuple[int, int]:
    """Rank and size of the world, which change in a process that goes from one to the next."""
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def aws_region() -> str | None:
    """As every client of AWS but boto3 reads it, which knows `AWS_DEFAULT_REGION` only."""
    return os.environ.get("AWS_REGION") or None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check every variable that this package knows."""
    source = os.environ if environ is None else environ
    return Environment(
        checkpoint_dir=_folder(source, v.ENV_CHECKPOINT_DIR),
        run_dir=_path(source, v.ENV_RUN_DIR),
        pod_uid=source.get(v.ENV_POD_UID, ""),
        pod_name=source.get(v.ENV_POD_NAME, ""),
        pod_namespace=source.get(v.ENV_POD_NAMESPACE, ""),
        pod_ip=source.get(v.ENV_POD_IP, ""),
        node_name=source.get(v.ENV_NODE_NAME, ""),
        job_name=source.get(v.ENV_JOB_NAME, ""),
        job_key_file=_path(source, v.ENV_JOB_KEY_FILE),
        grace_seconds=_float(source, v.ENV_GRACE_SECONDS, 30.0),
        control_port=_optional_int(source, v.ENV_CONTROL_PORT),
        termination_log=Path(source.get(v.ENV_TERMINATION_LOG) or TERMINATION_LOG),
        omp_threads_set=bool(source.get("OMP_NUM_THREADS")),
        object_url=source.get(v.ENV_OBJECT_URL, ""),
        object_interval_seconds=_float(source, v.ENV_OBJECT_INTERVAL, 0.0),
        object_keep=_optional_int(source, v.ENV_OBJECT_KEEP),
        object_retention=source.get(v.ENV_OBJECT_RETENTION, ""),
        object_bytes_per_second=_float(source, v.ENV_OBJECT_BANDWIDTH, 0.0) or None,
        object_in_flight=_in_flight(source, v.ENV_OBJECT_IN_FLIGHT),
        preflight_free_bytes=_optional_int(source, v.ENV_PREFLIGHT_FREE_BYTES),
        preflight_write_bytes=_optional_int(source, v.ENV_PREFLIGHT_WRITE_BYTES),
        preflight_object=bool(source.get(v.ENV_PREFLIGHT_OBJECT)),
        preflight_seconds=_float(source, v.ENV_PREFLIGHT_SECONDS, 60.0),
        local_tier=source.get(v.ENV_LOCAL_TIER, ""),
        local_interval=_optional_int(source, v.ENV_LOCAL_INTERVAL),
        local_bytes=_positive(source, v.ENV_LOCAL_BYTES),
        local_in_flight=_in_flight(source, v.ENV_LOCAL_IN_FLIGHT),
        memory_tier=source.get(v.ENV_MEMORY_TIER, ""),
        memory_interval=_optional_int(source, v.ENV_MEMORY_INTERVAL),
        peer_interval=_optional_int(source, v.ENV_PEER_INTERVAL),
        peer_bytes=_positive(source, v.ENV_PEER_BYTES),
        peer_in_flight=_in_flight(source, v.ENV_PEER_IN_FLIGHT),
        agent_socket=_path(source, v.ENV_AGENT_SOCKET),
        slot=_optional_int(source, v.ENV_SLOT),
        standby=bool(source.get(v.ENV_STANDBY)),
        exit_seconds=_float(source, v.ENV_EXIT_SECONDS, DEFAULT_EXIT_SECONDS),
        generation=_optional_int(source, v.ENV_GENERATION),
        attempt=_optional_int(source, v.ENV_ATTEMPT),
        publication=source.get(v.ENV_PUBLICATION, ""),
        job_uid=source.get(v.ENV_JOB_UID, ""),
        run_id=source.get(v.ENV_RUN_ID, ""),
        checkpoint_interval=source.get(v.ENV_CHECKPOINT_INTERVAL, ""),
        checkpoint_keep=_optional_int(source, v.ENV_CHECKPOINT_KEEP),
        checkpoint_full_every=_optional_int(source, v.ENV_CHECKPOINT_FULL_EVERY),
        checkpoint_delta_threshold=_optional_float(source, v.ENV_CHECKPOINT_DELTA_THRESHOLD),
        checkpoint_retention=source.get(v.ENV_CHECKPOINT_RETENTION, ""),
        checkpoint_bytes_per_second=_positive(source, v.ENV_CHECKPOINT_BANDWIDTH),
        checkpoint_in_flight=_in_flight(source, v.ENV_CHECKPOINT_IN_FLIGHT),
        resume=source.get(v.ENV_RESUME, ""),
        rank=_optional_int(source, "RANK") or 0,
        local_rank=_optional_int(source, "LOCAL_RANK") or 0,
        world_size=_optional_int(source, "WORLD_SIZE") or 1,
        local_world_size=_optional_int(source, "LOCAL_WORLD_SIZE") or 1,
        master_addr=source.get("MASTER_ADDR", ""),
        master_port=_optional_int(source, "MASTER_PORT"),
        agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        chaos_dir=_path(source, v.ENV_CHAOS),
        socket_interface=source.get("GLOO_SOCKET_IFNAME", ""),
    )


@contextmanager
def nccl_leaves_errors_to_us() -> Iterator[None]:
    """While this lasts, a communicator that torch makes does not end the process when a peer is lost."""
    before = {name: os.environ.get(name) for name in NCCL_ENVIRONMENT}
    os.environ.update(NCCL_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def publish(variables: Mapping[str, str]) -> None:
    """Let the script and its libraries see the world that this process was given after its start."""
    os.environ.update(variables)


def _path(source: Mapping[str, str], name: str) -> Path | None:
    value = source.get(name)
    return Path(value) if value else None


def _folder(source: Mapping[str, str], name: str) -> Path | None:
    value = source.get(name)
    try:
        return local_path(value) if value else None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _optional_int(source: Mapping[str, str], name: str) -> int | None:
    value = source.get(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name} is {value!r}, which is not a whole number: correct or unset it") from None


def _positive(source: Mapping[str, str], name: str) -> int | None:
    value = _optional_int(source, name)
    if value is not None and value < 1:
        raise UsageError(f"{name} is {value}: give bytes a second, 1 or more, or unset it for no limit")
    return value


def checked_in_flight(value: int | None, name: str) -> int | None:
    """How many at once; UsageError says what can be given."""
    if value is not None and not 1 <= value <= MOST_IN_FLIGHT:
        raise UsageError(f"{name} is {value}: give 1 to {MOST_IN_FLIGHT}, or leave it out for the default")
    return value


def _in_flight(source: Mapping[str, str], name: str) -> int | None:
    return checked_in_flight(_optional_int(source, name), name)


def _optional_float(source: Mapping[str, str], name: str) -> float | None:
    return _float(source, name, 0.0) if source.get(name) else None


def _float(source: Mapping[str, str], name: str, default: float) -> float:
    value = source.get(name)
    if not value:
        return default
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{name} is {value!r}, which is not a number: correct or unset it") from None
