"""What the processes of a job agree on: version, exit codes, causes. See `docs/reference/protocol.md`."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

PROTOCOL_VERSION: Final = 1
# Exit code of a rank process that lost its peers or its launcher, after it said so. Nobody's script is to blame.
EXIT_PEER_LOST: Final = 76


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


class RankPhase(StrEnum):
    """What a rank process is doing, as it tells its launcher."""

    STARTUP = "startup"
    RESTORE = "restore"
    STEP = "step"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    DONE = "done"


# Names of the places in which checkpoints are stored, in logs, status and messages.

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
