"""Every name, path and number that other programs can see, in one place. See `docs/reference/protocol.md`."""

from __future__ import annotations

import signal
from enum import IntEnum, StrEnum
from typing import Final

PROTOCOL_VERSION: Final = 1

# Files in the run directory.
MEMBERSHIP_FILE: Final = "membership.json"
STATUS_FILE: Final = "status.json"
PREFLIGHT_FILE: Final = "preflight.json"  # what the launcher found of volume and object store, for the sidecar
TOUCH_FILE: Final = "emergency_checkpoint"
TOUCH_ACK_FILE: Final = "emergency_checkpoint.ack"
AGENT_SOCKET_FILE: Final = "agent.sock"
TIMELINE_FILE: Final = "timeline.jsonl"
BOARD_DIR: Final = "board"  # a page for each rank process, by its slot
STACKS_SUFFIX: Final = ".stacks"
STACKS_DIR: Final = "stacks"  # what hung ranks and their mates were doing

TERMINATION_LOG: Final = "/dev/termination-log"

# Ports of a launcher in a pod; the membership carries the real ones.
STORE_PORT: Final = 29400
CONTROL_PORT: Final = 29401

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
DEFAULT_LOCAL_INTERVAL: Final = 10  # steps

# Environment of a rank process, beside what torchrun sets.
ENV_AGENT_SOCKET: Final = "HOLDFAST_AGENT_SOCKET"
ENV_SLOT: Final = "HOLDFAST_SLOT"  # names the process in its launcher, before and between its ranks
# Different for each process that the launcher starts: it finds what that process has started, wherever it went.
ENV_PROCESS_MARK: Final = "HOLDFAST_PROCESS_MARK"
ENV_STANDBY: Final = "HOLDFAST_STANDBY"  # 1: the world is told later, over the socket
# How long a rank process may outlive its script, which has ended: its threads may not.
ENV_EXIT_SECONDS: Final = "HOLDFAST_EXIT_SECONDS"
DEFAULT_EXIT_SECONDS: Final = 300.0
ENV_GENERATION: Final = "HOLDFAST_GENERATION"
ENV_ATTEMPT: Final = "HOLDFAST_ATTEMPT"
ENV_PUBLICATION: Final = "HOLDFAST_PUBLICATION"
ENV_JOB_UID: Final = "HOLDFAST_JOB_UID"
ENV_RUN_ID: Final = "HOLDFAST_RUN_ID"
ENV_CHECKPOINT_INTERVAL: Final = "HOLDFAST_CHECKPOINT_INTERVAL"
ENV_CHECKPOINT_KEEP: Final = "HOLDFAST_CHECKPOINT_KEEP"
ENV_CHECKPOINT_FULL_EVERY: Final = "HOLDFAST_CHECKPOINT_FULL_EVERY"
# Commits that may stand on each other: what one of them lacks, all above it lack.
MOST_FULL_EVERY: Final = 100
ENV_CHECKPOINT_DELTA_THRESHOLD: Final = "HOLDFAST_CHECKPOINT_DELTA_THRESHOLD"
# By how much a restored weight may differ from the saved one. More is a slip of the pen, such as 1e4 for 1e-4.
LARGEST_THRESHOLD: Final = 1.0
ENV_CHECKPOINT_RETENTION: Final = "HOLDFAST_CHECKPOINT_RETENTION"  # rules beside the last ones: hours=6,daily=7
ENV_CHECKPOINT_BANDWIDTH: Final = "HOLDFAST_CHECKPOINT_BYTES_PER_SECOND"  # of all ranks together
ENV_CHECKPOINT_IN_FLIGHT: Final = "HOLDFAST_CHECKPOINT_IN_FLIGHT"  # of each rank
# Writes, parts or connections at once, of any tier. Each takes a thread, and up to 16 MiB of memory.
MOST_IN_FLIGHT: Final = 64
ENV_RESUME: Final = "HOLDFAST_RESUME"
ENV_CHAOS: Final = "HOLDFAST_CHAOS"  # the folder of a `holdfast chaos` that is at work

# What torch's NCCL reads when a communicator is made: no thread of its own may end the process.
NCCL_ENVIRONMENT: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

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

# Exit code of a rank process that lost its peers or its launcher, after it said so. Nobody's script is to blame.
EXIT_PEER_LOST: Final = 76

# Makes a rank process write the stacks of all its threads. Users' programs take SIGUSR1 and SIGUSR2, libraries the
# first real-time signals; it is sent only to who said on its board that it takes it.
STACKS_SIGNAL: Final = int(getattr(signal, "SIGRTMIN", 0)) + 11  # only Linux has them

# The tier that all pods of a job see.
SHARED_TIER: Final = "shared"
# The tier that outlives the cluster.
OBJECT_TIER: Final = "object"
# In the memory of each node, for its own ranks and for those of another.
MEMORY_TIER: Final = "memory"
# The same as another node's rank sees it.
PEER_TIER: Final = "peer"
# On the disk of each node, for its own ranks.
LOCAL_TIER: Final = "local"
# Where a state that goes on comes from without any tier: a rank that still had it.
SURVIVOR: Final = "survivor"

# Bounds on what one side may send the other.
MAX_LINE_BYTES: Final = 1 << 20
MAX_DOCUMENT_BYTES: Final = 1 << 20
# A text of a script (an exception's message, a line of a traceback) in characters: a message with many fits a line.
MAX_TEXT: Final = 2000


class ExitCode(IntEnum):
    """Exit codes of the launcher; anything else is the application's own, and a signal is 128 + n."""

    COMPLETE = 0
    USAGE = 2
    LAUNCHER_FAULT = 70
    LEFT_ON_REQUEST = 75


class Cause(StrEnum):
    """Why a world ended; decided once, at detection."""

    APPLICATION = "Application"
    INFRASTRUCTURE = "Infrastructure"
    INTERRUPTION = "Interruption"
    OOM = "OOM"


class Phase(StrEnum):
    """What the launcher is doing, as its status says it."""

    STARTING = "Starting"
    WAITING = "Waiting"
    AWAITING_FENCE = "AwaitingFence"
    FORMING = "Forming"
    RUNNING = "Running"
    DRAINING = "Draining"
    COMPLETE = "Complete"
    FAILED = "Failed"


class RankPhase(StrEnum):
    """What a rank process is doing, as it tells its launcher."""

    STARTUP = "startup"
    RESTORE = "restore"
    STEP = "step"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    DONE = "done"
