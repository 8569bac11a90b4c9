"""The one place where this package reads, and writes, the process environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import constants as c
from holdfast.core.errors import UsageError
from holdfast.core.paths import local_path


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
        checkpoint_dir=_folder(source, c.ENV_CHECKPOINT_DIR),
        run_dir=_path(source, c.ENV_RUN_DIR),
        pod_uid=source.get(c.ENV_POD_UID, ""),
        pod_name=source.get(c.ENV_POD_NAME, ""),
        pod_namespace=source.get(c.ENV_POD_NAMESPACE, ""),
        pod_ip=source.get(c.ENV_POD_IP, ""),
        node_name=source.get(c.ENV_NODE_NAME, ""),
        job_name=source.get(c.ENV_JOB_NAME, ""),
        job_key_file=_path(source, c.ENV_JOB_KEY_FILE),
        grace_seconds=_float(source, c.ENV_GRACE_SECONDS, 30.0),
        control_port=_optional_int(source, c.ENV_CONTROL_PORT),
        termination_log=Path(source.get(c.ENV_TERMINATION_LOG) or c.TERMINATION_LOG),
        omp_threads_set=bool(source.get("OMP_NUM_THREADS")),
        object_url=source.get(c.ENV_OBJECT_URL, ""),
        object_interval_seconds=_float(source, c.ENV_OBJECT_INTERVAL, 0.0),
        object_keep=_optional_int(source, c.ENV_OBJECT_KEEP),
        object_retention=source.get(c.ENV_OBJECT_RETENTION, ""),
        object_bytes_per_second=_float(source, c.ENV_OBJECT_BANDWIDTH, 0.0) or None,
        object_in_flight=_in_flight(source, c.ENV_OBJECT_IN_FLIGHT),
        preflight_free_bytes=_optional_int(source, c.ENV_PREFLIGHT_FREE_BYTES),
        preflight_write_bytes=_optional_int(source, c.ENV_PREFLIGHT_WRITE_BYTES),
        preflight_object=bool(source.get(c.ENV_PREFLIGHT_OBJECT)),
        preflight_seconds=_float(source, c.ENV_PREFLIGHT_SECONDS, 60.0),
        local_tier=source.get(c.ENV_LOCAL_TIER, ""),
        local_interval=_optional_int(source, c.ENV_LOCAL_INTERVAL),
        local_bytes=_positive(source, c.ENV_LOCAL_BYTES),
        local_in_flight=_in_flight(source, c.ENV_LOCAL_IN_FLIGHT),
        memory_tier=source.get(c.ENV_MEMORY_TIER, ""),
        memory_interval=_optional_int(source, c.ENV_MEMORY_INTERVAL),
        peer_interval=_optional_int(source, c.ENV_PEER_INTERVAL),
        peer_bytes=_positive(source, c.ENV_PEER_BYTES),
        peer_in_flight=_in_flight(source, c.ENV_PEER_IN_FLIGHT),
        agent_socket=_path(source, c.ENV_AGENT_SOCKET),
        slot=_optional_int(source, c.ENV_SLOT),
        standby=bool(source.get(c.ENV_STANDBY)),
        exit_seconds=_float(source, c.ENV_EXIT_SECONDS, c.DEFAULT_EXIT_SECONDS),
        generation=_optional_int(source, c.ENV_GENERATION),
        attempt=_optional_int(source, c.ENV_ATTEMPT),
        publication=source.get(c.ENV_PUBLICATION, ""),
        job_uid=source.get(c.ENV_JOB_UID, ""),
        run_id=source.get(c.ENV_RUN_ID, ""),
        checkpoint_interval=source.get(c.ENV_CHECKPOINT_INTERVAL, ""),
        checkpoint_keep=_optional_int(source, c.ENV_CHECKPOINT_KEEP),
        checkpoint_full_every=_optional_int(source, c.ENV_CHECKPOINT_FULL_EVERY),
        checkpoint_delta_threshold=_optional_float(source, c.ENV_CHECKPOINT_DELTA_THRESHOLD),
        checkpoint_retention=source.get(c.ENV_CHECKPOINT_RETENTION, ""),
        checkpoint_bytes_per_second=_positive(source, c.ENV_CHECKPOINT_BANDWIDTH),
        checkpoint_in_flight=_in_flight(source, c.ENV_CHECKPOINT_IN_FLIGHT),
        resume=source.get(c.ENV_RESUME, ""),
        rank=_optional_int(source, "RANK") or 0,
        local_rank=_optional_int(source, "LOCAL_RANK") or 0,
        world_size=_optional_int(source, "WORLD_SIZE") or 1,
        local_world_size=_optional_int(source, "LOCAL_WORLD_SIZE") or 1,
        master_addr=source.get("MASTER_ADDR", ""),
        master_port=_optional_int(source, "MASTER_PORT"),
        agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        chaos_dir=_path(source, c.ENV_CHAOS),
        socket_interface=source.get("GLOO_SOCKET_IFNAME", ""),
    )


@contextmanager
def nccl_leaves_errors_to_us() -> Iterator[None]:
    """While this lasts, a communicator that torch makes does not end the process when a peer is lost."""
    before = {name: os.environ.get(name) for name in c.NCCL_ENVIRONMENT}
    os.environ.update(c.NCCL_ENVIRONMENT)
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
    if value is not None and not 1 <= value <= c.MOST_IN_FLIGHT:
        raise UsageError(f"{name} is {value}: give 1 to {c.MOST_IN_FLIGHT}, or leave it out for the default")
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
