"""Constants that the processes of a job share: version, exit codes, causes. See `docs/reference/protocol.md`."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

PROTOCOL_VERSION: Final = 1
# Exit code of a rank process that reported the loss of its peers or its launcher. The script did not cause it.
EXIT_PEER_LOST: Final = 76


class ExitCode(IntEnum):
    """Exit codes of the launcher. Any other code is the application's own, and 128 + n is a signal."""

    COMPLETE = 0
    USAGE = 2
    LAUNCHER_FAULT = 70
    LEFT_ON_REQUEST = 75


class Cause(StrEnum):
    """Why a world ended. The cause is decided once, at detection."""

    APPLICATION = "Application"
    INFRASTRUCTURE = "Infrastructure"
    INTERRUPTION = "Interruption"
    OOM = "OOM"
    NON_FINITE = "NonFinite"


# The reason of a failure: the ranks skipped more samples than the guards allow.
BAD_SAMPLES: Final = "BadSamples"
# The reason of a failure: a rank was out of GPU memory, and all ranks repeat the step. It counts in no budget.
OUT_OF_MEMORY_RETRIED: Final = "OutOfMemoryRetried"


class RankPhase(StrEnum):
    """What a rank process is doing, as reported to its launcher."""

    STARTUP = "startup"
    RESTORE = "restore"
    STEP = "step"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    DONE = "done"


# Names of the places in which checkpoints are stored, in logs, status and messages.

# The tier that all pods of a job share.
SHARED_TIER: Final = "shared"
# The tier that outlives the cluster.
OBJECT_TIER: Final = "object"
# The memory of each node, for its own ranks and for those of another node.
MEMORY_TIER: Final = "memory"
# The memory tier of another node.
PEER_TIER: Final = "peer"
# The disk of each node, for its own ranks.
LOCAL_TIER: Final = "local"
# The source of a state that no tier supplied: a rank that still had it in memory.
SURVIVOR: Final = "survivor"
