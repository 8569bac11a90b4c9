"""Workers that failed or leave."""

from __future__ import annotations

from enum import StrEnum


class FailureReason(StrEnum):
    """Why a worker failed or leaves, as the operator sees it. Launchers and Kubernetes add reasons of their own."""

    EXIT_CODE = "ExitCode"
    """The trainer exited with a code other than 0.

    Read its log.
    """
    OOM_KILLED = "OOMKilled"
    """The trainer container exceeded its memory limit.

    Raise the limit or reduce the memory that the script uses.
    """
    EVICTED = "Evicted"
    """The kubelet evicted the pod because it exceeded a limit of its own, such as ephemeral storage.

    Raise the limit that the message names.
    """
    KILLED = "Killed"
    """The container ended by SIGKILL or SIGTERM from outside."""
    LAUNCHER_FAILED = "LauncherFailed"
    """The Holdfast launcher failed.

    Read its log; report a bug if the reason is not in the environment.
    """
    LAUNCHER_UNRESPONSIVE = "LauncherUnresponsive"
    """The launcher has written no status for 60 seconds, so its pod is replaced.

    Check the node for a lack of CPU or a hung file system.
    """
    EXIT_STATUS_UNKNOWN = "ExitStatusUnknown"
    """The container exited while its node or container runtime was down."""
    DRAINED_ON_REQUEST = "DrainedOnRequest"
    """The worker drained after a coordinated checkpoint."""
    NODE_LOST = "NodeLost"
    """The node stopped reporting, or its Node object was deleted.

    Check the machine. If it is certainly off, delete its Node object.
    """
    POD_UNREACHABLE = "PodUnreachable"
    """The pod's network failed: its node is Ready, but neither peers nor operator have heard from the pod.

    Check the pod network of the node.
    """
    POD_DELETED = "PodDeleted"
    """Another client deleted the pod."""
    NODE_LEAVING = "NodeLeaving"
    """A taint announces that the node will be removed."""
    NODE_CORDONED = "NodeCordoned"
    """The node is cordoned, and another node has capacity."""
    NODE_REMEDIATION = "NodeRemediation"
    """Node remediation drains the node.

    See [node remediation](../how-to/node-remediation.md).
    """
    AWS_NOTICE = "AWSNotice"
    """AWS announced that the machine will be interrupted."""
    GCP_NOTICE = "GCPNotice"
    """Google Cloud announced that the machine will be interrupted."""
    AZURE_NOTICE = "AzureNotice"
    """Azure announced that the machine will be interrupted."""
    REBALANCE_RECOMMENDED = "RebalanceRecommended"
    """AWS advises to leave the node; new workers use it only if no other node has capacity."""
    GPU_ERROR = "GpuError"
    """A GPU of the worker reports an error.

    Check or reset the GPU; the sidecar's page lists the errors.
    """
    POD_CONDITION = "PodCondition"
    """The pod has a condition that a rule asks about."""
    UNKNOWN = "Unknown"
    """The reason is not known."""


SYMPTOMS = frozenset({FailureReason.GPU_ERROR, FailureReason.POD_CONDITION})
"""Reasons for symptoms of a worker that has not failed."""


class LauncherReason(StrEnum):
    """Why a worker failed, as its launcher reports it."""

    EXCEPTION = "Exception"
    """The script raised an exception.

    Fix the script; the message has the traceback.
    """
    SIGNAL = "Signal"
    """A signal ended a process of the script, for example SIGSEGV."""
    RANK_KILLED = "RankKilled"
    """SIGKILL from outside ended a process of the script."""
    OUT_OF_MEMORY = "OutOfMemory"
    """A process of the script ran out of memory.

    Raise the memory limit or reduce the memory that the script uses.
    """
    OUT_OF_MEMORY_RETRIED = "OutOfMemoryRetried"
    """A process was out of GPU memory, and all processes repeat the step with empty caches or smaller micro-batches.

    Pass a smaller `micro_batch_size` to `job.batches`.
    """
    ROLLED_BACK = "RolledBack"
    """Numbers were not finite, or a spike, and all processes restore an earlier checkpoint.

    Look at the samples and modules that the log names.
    """
    NON_FINITE = "NonFinite"
    """A `NonFiniteError` ended the script: numbers were not finite, or a spike, and the job could not roll back.

    Lower the learning rate, or look for the cause in the samples that the log names.
    """
    BAD_SAMPLES = "BadSamples"
    """The script skipped more samples of its dataset than `max_bad_samples` of its guards allows.

    Repair the samples that the message names, or raise `max_bad_samples`.
    """
    HUNG = "Hung"
    """A process made no progress, and the launcher ended it.

    Read the stack dump in the log; see [hang detection](../how-to/hang-detection.md).
    """
    CANNOT_START = "CannotStart"
    """The launcher could not start a process of the script.

    Correct the command.
    """
    ENDED_EARLY = "EndedEarly"
    """A process exited with code 0 before the others were done."""
    ENTRY_DEADLINE = "EntryDeadline"
    """A process did not enter the new world in time."""
    PEER_LOST = "PeerLost"
    """A process lost its connection to another one; that one's failure is the reason."""
    MEMBER_LOST = "MemberLost"
    """The launcher of another worker stopped responding."""
    STORE_LOST = "StoreLost"
    """The rendezvous store of the world stopped responding."""
    LAUNCHER_ENDED = "LauncherEnded"
    """The launcher was restarted; the last one ended without a record."""
    LAUNCHER_FAULT = "LauncherFault"
    """The launcher failed by an error of its own.

    Report a bug with its log.
    """
    DRAINED = "Drained"
    """The worker left after SIGTERM or SIGINT; the operator replaces this reason once it knows why."""
    INTERRUPTED = "Interrupted"
    """A second SIGINT stopped the launcher."""
    USAGE = "Usage"
    """The options of `holdfast run` are not valid.

    Correct the command.
    """


COLLATERAL = frozenset({LauncherReason.PEER_LOST, LauncherReason.MEMBER_LOST})
"""Of a process that lost its peers: its exit code says nothing about the script."""

UNREPEATABLE = frozenset({LauncherReason.NON_FINITE, LauncherReason.BAD_SAMPLES})
"""Of errors with which every attempt from the same checkpoint ends."""
