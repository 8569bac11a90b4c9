"""The state of the job, and what a job that does not train waits for."""

from __future__ import annotations

from enum import StrEnum

from holdfast_operator.api.reasons.decisions import Cause


class JobReason(StrEnum):
    """The state of the job as a whole."""

    NEW = "New"
    """The operator has not set a condition yet."""
    STARTING = "Starting"
    """The workers are starting."""
    TRAINING = "Training"
    """Workers are training. With a rendezvous backend other than Holdfast: workers are running."""
    ALL_WORKERS_TRAINING = "AllWorkersTraining"
    """The job is not degraded: all requested workers are training, or it is still starting."""
    RUNNING_WITH_FEWER_WORKERS = "RunningWithFewerWorkers"
    """Fewer workers than requested are training; replacements are starting.

    If it lasts, check the events of the job for why no replacement starts.
    """
    NOT_RECOVERING = "NotRecovering"
    """No recovery is in progress."""
    RECOVERING = "Recovering"
    """No worker is training, and the workers are forming the next world."""
    TRAINING_RESUMED = "TrainingResumed"
    """Training resumed after an incident; the message says after how long and with how many lost steps."""
    RESUMES_FROM_CHECKPOINT = "ResumesFromCheckpoint"
    """Training started from a checkpoint in the job's folder."""
    STARTED_FROM_STEP_ZERO = "StartedFromStepZero"
    """Training started at step 0.

    If you expected a checkpoint, check `checkpoint.volume`, `checkpoint.object` and `checkpoint.resume`.
    """
    CHECKPOINTS_FAILING = "CheckpointsFailing"
    """No checkpoint could be written since the time in the message; training continues.

    Make the checkpoint volume or the object store writable, or do what the message says.
    """
    CHECKPOINT_QUARANTINED = "CheckpointQuarantined"
    """A corrupt checkpoint was found and renamed, so that no job loads it.

    Check the storage; delete the renamed folder when you no longer need it.
    """
    REPLICA_REPAIRED = "ReplicaRepaired"
    """The state of a rank differed from that of most replicas, so the rank received theirs; training continues.

    If this repeats, test the memory and the GPUs of the node in the message.
    """
    NO_MAJORITY_OF_REPLICAS = "NoMajorityOfReplicas"
    """The replicas differed, and no state had a majority. If they were equal before, training restarts;
    otherwise it continues.

    If this repeats, test the nodes, and make sure that the script changes the weights alike on all ranks.
    """
    NO_RECENT_DIVERGENCE = "NoRecentDivergence"
    """All comparisons of the replicas in the last day found the same state."""
    SLOW_RANKS = "SlowRanks"
    """The other ranks wait for the ranks that the message names; training continues.

    Compare the nodes and the data loading of these ranks with the others; if a node is slow, drain it.
    """
    SUSPENDING = "Suspending"
    """The job is suspended, and its workers write a checkpoint and leave."""
    SUSPENDED = "Suspended"
    """The job is suspended and has no workers.

    Set `spec.suspend` to false to resume it.
    """
    JOB_UNSUSPENDED = "JobUnsuspended"
    """The job is no longer suspended."""
    COMPLETED = "Completed"
    """Training is complete; of a worker: its script ended with exit code 0."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """The job was active for longer than `spec.activeDeadlineSeconds`.

    Raise the deadline and create the job again: it resumes from its last checkpoint with `checkpoint.resume: Always`.
    """
    APPLICATION_BUDGET_EXCEEDED = "ApplicationBudgetExceeded"
    """The job had more Application incidents than its budget allows.

    Fix the script, or raise the budget in `spec.recovery.budgets`.
    """
    INFRASTRUCTURE_BUDGET_EXCEEDED = "InfrastructureBudgetExceeded"
    """The job had more Infrastructure incidents than its budget allows.

    Check the nodes that the incidents name, or raise the budget.
    """
    INTERRUPTION_BUDGET_EXCEEDED = "InterruptionBudgetExceeded"
    """The job had more Interruption incidents than its budget allows.

    Use more stable capacity, or raise the budget.
    """
    OOM_BUDGET_EXCEEDED = "OOMBudgetExceeded"
    """The job had more OOM incidents than its budget allows.

    Raise the memory limit, or raise the budget.
    """
    NON_FINITE_BUDGET_EXCEEDED = "NonFiniteBudgetExceeded"
    """The job had more NonFinite incidents than its budget allows.

    Find the cause of the numbers that are not finite or spikes, or raise the budget.
    """
    INVALID_SPEC = "InvalidSpec"
    """This version of the operator cannot read the resource; running workers are left alone.

    Correct the field that the message names, or upgrade the operator.
    """


BUDGET_EXCEEDED = {
    Cause.APPLICATION: JobReason.APPLICATION_BUDGET_EXCEEDED,
    Cause.INFRASTRUCTURE: JobReason.INFRASTRUCTURE_BUDGET_EXCEEDED,
    Cause.INTERRUPTION: JobReason.INTERRUPTION_BUDGET_EXCEEDED,
    Cause.OOM: JobReason.OOM_BUDGET_EXCEEDED,
    Cause.NON_FINITE: JobReason.NON_FINITE_BUDGET_EXCEEDED,
}


class WaitReason(StrEnum):
    """What a job that does not train is waiting for."""

    WAITING_FOR_PODS = "WaitingForPods"
    """The pods of the gang are being created."""
    WAITING_FOR_GANG = "WaitingForGang"
    """The workers could not be scheduled together; the next attempt is due soon."""
    WAITING_FOR_QUEUE = "WaitingForQueue"
    """A queue, such as Kueue's, has not admitted the pods yet.

    Check the quota of the queue, and that Kueue's pod integration is enabled.
    """
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    """The cluster has no capacity for the gang.

    Add nodes, reduce `workers.replicas`, or set `elasticity.minReplicas`.
    """
    SCHEDULING = "Scheduling"
    """The pods are released to the scheduler, and some have no node yet."""
    IMAGE_PULLING = "ImagePulling"
    """A node is pulling the image."""
    WAITING_FOR_SERVICE = "WaitingForService"
    """The Service of the rendezvous is being created."""
    WAITING_FOR_LOST_WORKER = "WaitingForLostWorker"
    """With `onFailure: Wait`, a lost worker keeps its place until it returns or is fenced.

    If its machine is certainly off, delete its Node object.
    """
