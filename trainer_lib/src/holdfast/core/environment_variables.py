"""Environment variables of this package, part of its interface. See `docs/reference/protocol.md`."""

from __future__ import annotations

from typing import Final

# Environment of the launcher.
ENV_RUN_DIR: Final = "HOLDFAST_RUN_DIR"
ENV_POD_UID: Final = "HOLDFAST_POD_UID"
ENV_POD_NAME: Final = "HOLDFAST_POD_NAME"
ENV_POD_NAMESPACE: Final = "HOLDFAST_POD_NAMESPACE"
ENV_POD_IP: Final = "HOLDFAST_POD_IP"
ENV_NODE_NAME: Final = "HOLDFAST_NODE_NAME"
ENV_JOB_NAME: Final = "HOLDFAST_JOB_NAME"
ENV_CHECKPOINT_DIR: Final = "HOLDFAST_CHECKPOINT_DIR"
# Set where commits are copied to a store of objects.
ENV_OBJECT_URL: Final = "HOLDFAST_OBJECT_URL"
ENV_OBJECT_INTERVAL: Final = "HOLDFAST_OBJECT_INTERVAL_SECONDS"
ENV_OBJECT_KEEP: Final = "HOLDFAST_OBJECT_KEEP"
ENV_OBJECT_RETENTION: Final = "HOLDFAST_OBJECT_RETENTION"
ENV_OBJECT_BANDWIDTH: Final = "HOLDFAST_OBJECT_BYTES_PER_SECOND"
ENV_OBJECT_IN_FLIGHT: Final = "HOLDFAST_OBJECT_IN_FLIGHT"
ENV_JOB_KEY_FILE: Final = "HOLDFAST_JOB_KEY_FILE"
ENV_GRACE_SECONDS: Final = "HOLDFAST_GRACE_SECONDS"
ENV_CONTROL_PORT: Final = "HOLDFAST_CONTROL_PORT"
ENV_TERMINATION_LOG: Final = "HOLDFAST_TERMINATION_LOG"
# Set where the checkpoint volume is to be tried before the job starts.
ENV_PREFLIGHT_FREE_BYTES: Final = "HOLDFAST_PREFLIGHT_FREE_BYTES"
ENV_PREFLIGHT_WRITE_BYTES: Final = "HOLDFAST_PREFLIGHT_WRITE_BYTES"  # a second
ENV_PREFLIGHT_OBJECT: Final = "HOLDFAST_PREFLIGHT_OBJECT"  # whether the object store is tried
ENV_PREFLIGHT_SECONDS: Final = "HOLDFAST_PREFLIGHT_SECONDS"

# Commits in memory: PATH[:SIZE] of the volume; steps between commits there, and between copies on another node.
ENV_MEMORY_TIER: Final = "HOLDFAST_MEMORY_TIER"
ENV_MEMORY_INTERVAL: Final = "HOLDFAST_MEMORY_INTERVAL"
ENV_PEER_INTERVAL: Final = "HOLDFAST_PEER_INTERVAL"
ENV_PEER_BYTES: Final = "HOLDFAST_PEER_BYTES_PER_SECOND"
ENV_PEER_IN_FLIGHT: Final = "HOLDFAST_PEER_IN_FLIGHT"
# Commits on a disk of the node: PATH[:SIZE] of the volume, and steps between them.
ENV_LOCAL_BYTES: Final = "HOLDFAST_LOCAL_BYTES_PER_SECOND"  # of each rank
ENV_LOCAL_IN_FLIGHT: Final = "HOLDFAST_LOCAL_IN_FLIGHT"  # of each rank
ENV_LOCAL_TIER: Final = "HOLDFAST_LOCAL_TIER"
ENV_LOCAL_INTERVAL: Final = "HOLDFAST_LOCAL_INTERVAL"

# Environment of a rank process, beside what torchrun sets.
ENV_AGENT_SOCKET: Final = "HOLDFAST_AGENT_SOCKET"
ENV_SLOT: Final = "HOLDFAST_SLOT"  # names the process in its launcher, before and between its ranks
# Different for each process that the launcher starts: it finds what that process has started, wherever it went.
ENV_PROCESS_MARK: Final = "HOLDFAST_PROCESS_MARK"
ENV_STANDBY: Final = "HOLDFAST_STANDBY"  # 1: the world is told later, over the socket
# How long a rank process may outlive its script, which has ended: its threads may not.
ENV_EXIT_SECONDS: Final = "HOLDFAST_EXIT_SECONDS"
ENV_GENERATION: Final = "HOLDFAST_GENERATION"
ENV_ATTEMPT: Final = "HOLDFAST_ATTEMPT"
ENV_PUBLICATION: Final = "HOLDFAST_PUBLICATION"
ENV_JOB_UID: Final = "HOLDFAST_JOB_UID"
ENV_RUN_ID: Final = "HOLDFAST_RUN_ID"
ENV_CHECKPOINT_INTERVAL: Final = "HOLDFAST_CHECKPOINT_INTERVAL"
ENV_CHECKPOINT_KEEP: Final = "HOLDFAST_CHECKPOINT_KEEP"
ENV_CHECKPOINT_FULL_EVERY: Final = "HOLDFAST_CHECKPOINT_FULL_EVERY"
ENV_CHECKPOINT_DELTA_THRESHOLD: Final = "HOLDFAST_CHECKPOINT_DELTA_THRESHOLD"
ENV_CHECKPOINT_RETENTION: Final = "HOLDFAST_CHECKPOINT_RETENTION"  # rules beside the last ones: hours=6,daily=7
ENV_CHECKPOINT_BANDWIDTH: Final = "HOLDFAST_CHECKPOINT_BYTES_PER_SECOND"  # of all ranks together
ENV_CHECKPOINT_IN_FLIGHT: Final = "HOLDFAST_CHECKPOINT_IN_FLIGHT"  # of each rank
ENV_RESUME: Final = "HOLDFAST_RESUME"
ENV_CHAOS: Final = "HOLDFAST_CHAOS"  # the folder of a `holdfast chaos` that is at work

# What torchrun tells a process of its place in the world, beside TORCHELASTIC_* and the names of our own.
PLACE_VARIABLES: Final = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
PLACE_PREFIXES: Final = ("HOLDFAST_", "TORCHELASTIC_")
