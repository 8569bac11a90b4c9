"""Changes of workers and of the membership."""

from __future__ import annotations

from enum import StrEnum


class WorkerReason(StrEnum):
    """Why the operator adds, moves, removes or restores workers."""

    GANG_TIMEOUT = "GangTimeout"
    """Not all workers were scheduled in time, so the gang is cancelled or starts with fewer workers.

    Check the capacity of the cluster.
    """
    QUEUE_TIMEOUT = "QueueTimeout"
    """A queue admitted only some of the workers in time, so the gang returns its quota and retries later.

    Check the quota of the queue.
    """
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    """The cluster has no capacity for this worker; the gang starts without it."""
    STARTED_WITH_FEWER_WORKERS = "StartedWithFewerWorkers"
    """An elastic job started with as many workers as the cluster has capacity for; the others join later."""
    SCALING_UP = "ScalingUp"
    """An elastic job adds workers above `workers.replicas`."""
    YIELDED_CAPACITY = "YieldedCapacity"
    """An elastic job removes workers above `workers.replicas` because another job waits for capacity."""
    TOPOLOGY_DOMAIN_EMPTY = "TopologyDomainEmpty"
    """No worker of a packed job is left in its topology domain, so this one moves with the next gang."""
    RESCHEDULED_AFTER_NODE_RECOVERY = "RescheduledAfterNodeRecovery"
    """An unscheduled pod avoids nodes that are healthy again, so a new pod replaces it."""
    RENDEZVOUS_HOST_LOST = "RendezvousHostLost"
    """The worker that hosts the C10d store left, so all workers start again around another host."""
    SPARE_LOST = "SpareLost"
    """A warm standby failed; training is not affected."""
    REPEAT_OFFENDER = "RepeatOffender"
    """A node failed this job repeatedly, so the job avoids it for a while.

    Check the node.
    """
    REPEAT_OFFENDER_STILL_USED = "RepeatOffenderStillUsed"
    """A node failed this job repeatedly, and the job still uses it because no other node has capacity.

    Check the node, or add another one.
    """
    REPEATED_DIVERGENCE = "RepeatedDivergence"
    """Ranks on a node held a wrong state repeatedly, so the job places no new worker there for a day.

    Test the memory and the GPUs of the node.
    """
    POD_RELABELLED = "PodRelabelled"
    """Another client changed a label or the owner of a worker's pod; the operator restores it.

    Exclude pods with the label `app.kubernetes.io/managed-by=holdfast` from what changed them.
    """


class MembershipReason(StrEnum):
    """Why the operator publishes a new generation of workers, or waits before it does."""

    FIRST_GANG = "FirstGang"
    """The first workers are ready."""
    WORKER_JOINED = "WorkerJoined"
    """A new worker is ready."""
    SURVIVORS_CONTINUE = "SurvivorsContinue"
    """The remaining workers continue without the lost ones."""
    WORKERS_RETURNED = "WorkersReturned"
    """Workers that had stopped reporting report again."""
    FOREIGN_CLAIMS = "ForeignClaims"
    """Another job has trained in the same checkpoint folder.

    Give each job its own folder.
    """
    GENERATION_CONFLICT = "GenerationConflict"
    """The workers know a newer generation than the status, for example after a restored backup."""
    SCALED_DOWN = "ScaledDown"
    """More workers exist than requested, so some leave."""
    UP_TO_DATE = "UpToDate"
    """The generation lists the workers that exist."""
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    """Not enough workers are ready."""
    AWAITING_FENCE = "AwaitingFence"
    """Lost workers may still be training, so no new world may start without them.

    If their machines are certainly off, delete their Node objects, or taint them with
    `node.kubernetes.io/out-of-service=nodeshutdown:NoExecute`.
    """
    GENERATION_PUBLISHED = "GenerationPublished"
    """A new generation of workers was published; the message says why and which workers it lists."""
