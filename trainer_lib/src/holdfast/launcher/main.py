"""`holdfast run`: assembles the launcher for its environment, with or without the operator."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.environment import Environment, variable, variables
from holdfast.core.errors import UsageError
from holdfast.core.log_format import LogContext, configure
from holdfast.core.protocol import Cause, ExitCode
from holdfast.launcher import command_check
from holdfast.launcher.config import LauncherConfig
from holdfast.launcher.host import gpus, preflight, termination_log
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.launcher import Launcher
from holdfast.launcher.network.control_channel import CONTROL_PORT
from holdfast.launcher.network.tcp_store import STORE_PORT
from holdfast.launcher.options import RunOptions
from holdfast.launcher.ranks.supervisor import Command, resolve_command
from holdfast.launcher.rendezvous import folder_lock
from holdfast.launcher.rendezvous.roster import RunRequest
from holdfast.launcher.standalone import Standalone, find_address
from holdfast.launcher.status.status_document import Identity
from holdfast.launcher.tiers.options import TierOptions

if TYPE_CHECKING:
    from holdfast.checkpoint.tiers.uploader import UploadSettings

_log = logging.getLogger("holdfast.launcher")
_MEMORY_DIR = "/dev/shm"  # noqa: S108  (this launcher creates its own folder there)


async def launch(options: RunOptions, environment: Environment) -> int:
    """Run a launcher until the job is complete or this worker must leave. Return the exit code."""
    context = LogContext()
    logger = configure(context, background=True)
    try:
        ending = await _run(options, environment.with_options(options.given), context)
    except UsageError as error:
        # Not final: the error may affect only this pod, for example if its node did not mount the script's volume.
        refused = Ending(code=ExitCode.USAGE, cause=Cause.APPLICATION, reason="Usage", message=str(error))
        termination_log.write(environment.termination_log, refused)
        raise
    finally:
        for handler in logger.handlers:
            handler.close()
    sys.stderr.write(termination_log.final_message(ending))  # after the log, so that this is the last output
    return ending.code


async def _run(options: RunOptions, environment: Environment, context: LogContext) -> Ending:
    command_check.check(resolve_command(options.command), nested=options.nested_launcher)
    if environment.under_operator:
        return await _under_operator(options, environment, context)
    return await _run_standalone(options, environment, context)


def _command(options: RunOptions, environment: Environment, *, processes: int) -> Command:
    return Command(
        argv=resolve_command(options.command),
        processes=processes,
        # Ranks restore from the copies if the folder has lost its checkpoints.
        environ={**os.environ, **variables(object_url=environment.object_url)},
        prefix_output=options.prefix_output,
        warm=options.warm_processes,
    )


async def _under_operator(options: RunOptions, environment: Environment, context: LogContext) -> Ending:
    """Run with the membership from the file that the sidecar writes."""
    pod = environment.pod_name or environment.pod_uid
    context.update(pod=pod, job=environment.job_name)
    preflight.start(environment)
    if options.endpoint is not None or options.max_nodes > 1:
        _log.warning("--nnodes and --rdzv-endpoint are ignored: the operator sets the workers from the resource")
    config = LauncherConfig(
        run_dir=environment.run_dir or Path(),
        identity=Identity(pod_uid=environment.pod_uid, pod=pod, node=environment.node_name, gpus=gpus.visible()),
        host=environment.pod_ip,
        command=_command(options, environment, processes=options.processes),
        control_port=CONTROL_PORT if environment.control_port is None else environment.control_port,
        store_port=STORE_PORT,
        grace_seconds=environment.grace_seconds,
        termination_log=environment.termination_log,
        timeline=options.timeline,
        checkpoint_folder=environment.checkpoint_folder,
        upload=_upload(environment),
        memory=_memory(environment),
        local=_local(environment),
    )
    return await Launcher(config, context).run()


def _upload(environment: Environment) -> UploadSettings | None:
    from holdfast.checkpoint.policy.retention import Rules
    from holdfast.checkpoint.tiers.uploader import UploadSettings

    url = environment.object_url
    if not url:
        return None
    if environment.checkpoint_folder is None:
        raise UsageError(
            f"holdfast run: {url} is for copies of a checkpoint folder: set {variable('checkpoint_dir')} to one. To "
            f"save only in the object store, set {variable('checkpoint_dir')} to the URL, and no --object-url"
        )
    return UploadSettings(
        url=url,
        interval_seconds=environment.object_interval_seconds,
        keep_last=environment.object_keep or environment.checkpoint_keep,
        rules=Rules.parse(environment.object_retention or environment.checkpoint_retention),
        bytes_per_second=environment.object_bytes_per_second,
        in_flight=environment.object_in_flight,
    )


async def _run_standalone(options: RunOptions, environment: Environment, context: LogContext) -> Ending:
    """Run without an operator: the launcher that owns the endpoint takes its role, and the others join it."""
    made = environment.run_dir is None
    run_dir = environment.run_dir or _temporary_dir()
    release: Callable[[], None] | None = None
    try:
        place = await find_address(options, environment)
        name = f"{socket.gethostname()}-{os.getpid()}"
        if environment.checkpoint_folder is not None and place.elsewhere is None:
            release = await folder_lock.hold(environment.checkpoint_folder, f"the run of {name}")
        context.update(pod=name)
        config = LauncherConfig(
            run_dir=run_dir,
            identity=Identity(pod_uid=f"{name}-{secrets.token_hex(4)}", pod=name, node=socket.gethostname()),
            host=place.host,
            command=_command(options, environment, processes=options.processes or 1),
            control_port=environment.control_port or 0,
            grace_seconds=environment.grace_seconds,
            termination_log=environment.termination_log,
            membership_from_file=False,
            timeline=options.timeline,
            checkpoint_folder=environment.checkpoint_folder,
            upload=_upload(environment),
            memory=_memory(environment),
            local=_local(environment),
        )
        run_id = options.run_name or f"run-{secrets.token_hex(4)}"
        terms = RunRequest(run_id=run_id, options=options, environment=environment)
        return await Standalone(config, context, place, terms).run()
    finally:
        if release is not None:
            release()
        if made:
            shutil.rmtree(run_dir, ignore_errors=True)


def _memory(environment: Environment) -> TierOptions | None:
    tier, interval, copies = environment.memory_tier, environment.memory_interval, environment.peer_interval
    if tier is None:
        return None
    if copies is not None and copies % interval:
        raise UsageError(
            f"--peer-interval {copies} is not a multiple of --memory-interval {interval}: only checkpoints in memory "
            "are copied; use a multiple"
        )
    return TierOptions(
        root=tier.root,
        limit=tier.limit,
        interval=interval,
        peer_interval=copies,
        per_second=environment.peer_bytes_per_second,
        in_flight=environment.peer_in_flight,
    )


def _local(environment: Environment) -> TierOptions | None:
    tier = environment.local_tier
    if tier is None:
        return None
    return TierOptions(
        root=tier.root,
        limit=tier.limit,
        interval=environment.local_interval,
        per_second=environment.local_bytes_per_second,
        in_flight=environment.local_in_flight,
    )


def _temporary_dir() -> Path:
    """Return a folder in memory, as in a pod, unless TMPDIR is set: files of ranks there must not wait for a disk."""
    named = tempfile.gettempdir() != "/tmp"  # noqa: S108  (compared, not used)
    memory = not named and os.access(_MEMORY_DIR, os.W_OK | os.X_OK)
    return Path(tempfile.mkdtemp(prefix="holdfast-", dir=_MEMORY_DIR if memory else None))
