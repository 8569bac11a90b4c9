"""`holdfast.init()`: join the world."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.io.staging_buffer import Arena, anonymous
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.core.attempt import Claim
from holdfast.core.environment import Environment, read_environment
from holdfast.core.errors import LaunchError
from holdfast.core.log_format import LogContext, configure
from holdfast.core.paths import checkpoint_place
from holdfast.core.protocol import RankPhase
from holdfast.fault_injection.injector import listener as chaos_listener
from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.activity_page import open_board
from holdfast.telemetry.rank_time import Ledger
from holdfast.training import determinism, torch_version
from holdfast.training.checkpointing.pinned_memory import PinnedMemory
from holdfast.training.guards.settings import Guards
from holdfast.training.job import Job
from holdfast.training.launcher_client import exception_reporter, placement
from holdfast.training.launcher_client.agent_client import LauncherClient
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.launcher_client.exit_watch import exit_now, watch_exit
from holdfast.training.launcher_client.no_launcher import NoLauncher
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.options.config import JobConfig, effective

_log = logging.getLogger("holdfast.job")


def init(
    *,
    checkpoint_dir: str | Path | None = None,
    checkpoint_interval: str | int | None = None,
    keep_last: int | None = None,
    full_every: int | None = None,
    delta_threshold: float | None = None,
    retention: str | None = None,
    max_in_flight: int | None = None,
    resume: str | None = None,
    guards: Guards | None = None,
    deterministic: bool = False,
) -> Job:
    """Join the job of the launcher. Without a launcher, the script is a world of one.

    The call returns at once. The world may still be forming, and `job.manage` waits for it. Under the operator, every
    setting is in the environment. Arguments take precedence. The effective values are logged once with their sources.
    `checkpoint_dir` is a folder that all ranks see, or the URL of an object store. With `deterministic`, PyTorch uses
    only deterministic algorithms.
    """
    torch_version.require()
    if deterministic:
        determinism.enable()
    environment = read_environment()
    config = effective(
        environment,
        checkpoint_dir=checkpoint_place(checkpoint_dir) if checkpoint_dir else None,
        checkpoint_interval=checkpoint_interval,
        keep_last=keep_last,
        full_every=full_every,
        delta_threshold=delta_threshold,
        retention=retention,
        max_in_flight=max_in_flight,
        resume=resume,
    )
    context = _configure_log(environment)
    agent = _connect(environment)
    ledger = Ledger(time.monotonic, lambda report: agent.send("account", **report))
    job = Job(
        agent=agent,
        config=config,
        engine=_engine(config, agent, environment),
        meter=_meter(agent, ledger, environment),
        ledger=ledger,
        device=_device,
        interface=environment.socket_interface,
        guards=guards,
    )
    _close_at_exit(job, agent, environment)
    job.on_membership(lambda lined_up: _label(context, lined_up, config))
    return job


def _meter(agent: LauncherConnection, ledger: Ledger, environment: Environment) -> Meter:
    listeners = (PhaseTeller(agent), ledger, open_board(environment), chaos_listener(environment))
    return Meter(*(listener for listener in listeners if listener is not None))


def _close_at_exit(job: Job, agent: LauncherConnection, environment: Environment) -> None:
    """Report the exception that ends the script, and close the job at the script's end."""
    reporter = exception_reporter.Reporter(agent, lambda: job.committed_step, job.with_less_memory)
    reporter.install()
    close = _once(partial(_close, job, reporter, os.getpid()))
    atexit.register(close)
    if agent.connected:
        watch_exit(close, limit=environment.exit_seconds, failed=lambda: reporter.failed)


def _close(job: Job, reporter: exception_reporter.Reporter, owner: int) -> None:
    """Close the job at the script's end, but not in forked processes, because this process owns the connections."""
    if os.getpid() != owner:
        return
    try:
        job.close(failed=lambda: reporter.failed, trace=lambda: reporter.trace)
    except Exception as error:  # noqa: BLE001 - no code is left to catch it, and the script must not appear successful
        reporter(type(error), error, error.__traceback__)
        exit_now(1)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `call` once, and waits if it is running."""
    lock, begun = threading.Lock(), False

    def only() -> None:
        nonlocal begun
        with lock:
            if not begun:
                begun = True
                call()

    return only


def _label(context: LogContext, job: Job, config: JobConfig) -> None:
    context.update(rank=job.rank, generation=job.generation, attempt=job.attempt)
    if job.is_coordinator:
        if config.checkpoint_dir is None:
            _log.warning("checkpoint_dir is not set: if all ranks are lost, training starts from the beginning")
        elif config.folder and config.folder.exists() and (wrong := catalog.what_is_wrong(config.folder)):
            _log.warning("training starts from the beginning unless a copy is found: %s", wrong)
        _log.info("configuration", extra={"fields": {"world_size": job.world_size, **config.described()}})


def _configure_log(environment: Environment) -> LogContext:
    fields = {"pod": environment.pod_name, "generation": environment.generation, "attempt": environment.attempt}
    context = LogContext(fields={name: value for name, value in fields.items() if value})
    if not environment.standby:
        context.update(rank=environment.rank)
    configure(context)
    return context


def _connect(environment: Environment) -> LauncherConnection:
    first = placement.from_environment(environment)
    if environment.agent_socket is not None:
        return LauncherClient(environment.agent_socket, slot=environment.slot, place=first)
    if first is None:
        raise LaunchError("HOLDFAST_STANDBY is set without HOLDFAST_AGENT_SOCKET: unset it")
    return NoLauncher(first)


def _engine(config: JobConfig, agent: LauncherConnection, environment: Environment) -> CheckpointManager | None:
    if config.checkpoint_dir is None:
        return None
    if config.folder is not None:
        catalog.check_place(config.folder)

    def report(claims: tuple[Claim, ...]) -> None:
        agent.send("foreignClaims", claims=[claim.to_json() for claim in claims])

    return CheckpointManager(
        config.checkpoint_dir,
        keep_last=config.keep_last,
        full_every=config.full_every,
        delta_threshold=config.delta_threshold,
        bytes_per_second=config.bytes_per_second,
        max_in_flight=config.max_in_flight,
        rules=config.retention,
        resume=config.resume,
        on_foreign=report,
        arena=Arena(PinnedMemory() if torch.cuda.is_available() else anonymous),
        copies=environment.object_url if environment.agent_socket else "",
        copies_in_flight=environment.object_in_flight,
    )


def _device(here: RankPlacement) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", here.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class PhaseTeller:
    """Reports lasting changes of a rank's activity to the launcher, but not the parts of a step."""

    def __init__(self, agent: LauncherConnection) -> None:
        self._agent = agent
        self._reported = RankPhase.STARTUP

    def entered(self, activity: Activity, step: int) -> None:
        """`activity.Listener`."""
        phase = _PHASES.get(activity, RankPhase.STEP)
        if phase is not self._reported:
            self._reported = phase
            self._agent.send("phase", phase=str(phase), step=step)


_PHASES = {
    Activity.STARTUP: RankPhase.STARTUP,
    Activity.PARKED: RankPhase.RESTORE,
    Activity.SYNC: RankPhase.RESTORE,
    Activity.RESTORE: RankPhase.RESTORE,
    Activity.CHECKPOINT: RankPhase.CHECKPOINT,
    Activity.EVALUATION: RankPhase.EVALUATION,
    Activity.DONE: RankPhase.DONE,
}
