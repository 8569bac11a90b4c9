"""Causes, actions and reasons: the words that programs read in conditions, events, status and metrics.

A member's docstring is its entry in ``docs/reference/reasons.md``: the first paragraph is the meaning, the second
what to do. ``make generate`` writes the page.
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The cause under which an incident counts. Each cause can have a budget in `spec.recovery.budgets`."""

    APPLICATION = "Application"
    """The training script, its image or its configuration failed.

    Read the traceback in the incident's message and fix the script.
    """
    INFRASTRUCTURE = "Infrastructure"
    """A node, its GPUs, its network or its container runtime failed.

    Check the node that the incident names.
    """
    INTERRUPTION = "Interruption"
    """The worker was evicted, preempted, drained or deleted, or its node is being removed."""
    OOM = "OOM"
    """A process or container exceeded its memory limit.

    Raise the memory limit of the trainer container or reduce the memory that the script uses.
    """


CAUSES = tuple(Cause)
WITH_BACKOFF = frozenset({Cause.APPLICATION, Cause.OOM})
"""Causes that recur at once when tried again: their replacements wait."""


class RecoveryAction(StrEnum):
    """What the operator does about a failure."""

    IN_PLACE = "InPlace"
    """The launchers restart the processes; pods and nodes stay."""
    RECREATE_POD = "RecreatePod"
    """A new pod replaces the worker's pod."""
    REPLACE_NODE = "ReplaceNode"
    """All workers of the node move to other nodes, and the job avoids the node for 24 hours."""
    RESTART_GANG = "RestartGang"
    """New pods replace the pods of all workers."""
    FAIL_JOB = "FailJob"
    """The job fails."""
    IGNORE = "Ignore"
    """As InPlace, and the incident counts towards no budget."""
    AVOID_NODE = "AvoidNode"
    """The job places no new worker on the node for a while."""


LADDER = (
    RecoveryAction.IN_PLACE,
    RecoveryAction.RECREATE_POD,
    RecoveryAction.REPLACE_NODE,
    RecoveryAction.RESTART_GANG,
    RecoveryAction.FAIL_JOB,
)
"""From the gentlest on: the actions that an escalation may climb."""
RULE_ACTIONS = (*LADDER, RecoveryAction.IGNORE)


class Basis(StrEnum):
    """Why the operator chose an action: the end of a decision's reason."""

    RULE = "ByRule"
    """A rule of `spec.recovery.rules` matches the failure."""
    DEFAULT = "ByDefault"
    """No rule matches the failure."""
    ESCALATED = "Escalated"
    """The gentler action was taken too often (`spec.recovery.escalation`)."""


class DecisionReason(StrEnum):
    """The operator's decision about an incident: an action and why it was chosen."""

    IN_PLACE_BY_RULE = "InPlaceByRule"
    """A rule of the job asks for InPlace."""
    RECREATE_POD_BY_RULE = "RecreatePodByRule"
    """A rule of the job asks for RecreatePod."""
    REPLACE_NODE_BY_RULE = "ReplaceNodeByRule"
    """A rule of the job asks for ReplaceNode."""
    RESTART_GANG_BY_RULE = "RestartGangByRule"
    """A rule of the job asks for RestartGang."""
    FAIL_JOB_BY_RULE = "FailJobByRule"
    """A rule of the job asks for FailJob.

    Fix what the message names, then create the job again.
    """
    IGNORE_BY_RULE = "IgnoreByRule"
    """A rule of the job asks for Ignore."""
    IN_PLACE_BY_DEFAULT = "InPlaceByDefault"
    """No rule matches, and the launchers restart the processes in the same pods."""
    RECREATE_POD_BY_DEFAULT = "RecreatePodByDefault"
    """No rule matches, and the pod cannot continue."""
    REPLACE_NODE_BY_DEFAULT = "ReplaceNodeByDefault"
    """No rule matches, and the GPU error requires another node.

    Check or reset the GPU of the node.
    """
    RECREATE_POD_ESCALATED = "RecreatePodEscalated"
    """InPlace was taken too often."""
    REPLACE_NODE_ESCALATED = "ReplaceNodeEscalated"
    """The gentler actions were taken too often."""
    RESTART_GANG_ESCALATED = "RestartGangEscalated"
    """The gentler actions were taken too often."""
    FAIL_JOB_ESCALATED = "FailJobEscalated"
    """All gentler actions were taken too often.

    Fix what the message names, then create the job again.
    """

    @property
    def basis(self) -> Basis:
        """Why the action was chosen."""
        return next(basis for basis in Basis if self.endswith(basis))

    @property
    def action(self) -> RecoveryAction:
        """The action of the decision."""
        return RecoveryAction(self.removesuffix(self.basis))


def decision_reason(word: str) -> DecisionReason | None:
    """The decision of this name, if it is one."""
    return DecisionReason(word) if word in DecisionReason.__members__.values() else None


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

    If you expected a checkpoint, check `checkpoint.volume` and `checkpoint.resume`.
    """
    CHECKPOINTS_FAILING = "CheckpointsFailing"
    """No checkpoint could be written since the time in the message; training continues.

    Make the checkpoint volume writable, or do what the message says.
    """
    CHECKPOINT_QUARANTINED = "CheckpointQuarantined"
    """A corrupt checkpoint was found and renamed, so that no job loads it.

    Check the storage; delete the renamed folder when you no longer need it.
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
    INVALID_SPEC = "InvalidSpec"
    """This version of the operator cannot read the resource; running workers are left alone.

    Correct the field that the message names, or upgrade the operator.
    """


BUDGET_EXCEEDED = {
    Cause.APPLICATION: JobReason.APPLICATION_BUDGET_EXCEEDED,
    Cause.INFRASTRUCTURE: JobReason.INFRASTRUCTURE_BUDGET_EXCEEDED,
    Cause.INTERRUPTION: JobReason.INTERRUPTION_BUDGET_EXCEEDED,
    Cause.OOM: JobReason.OOM_BUDGET_EXCEEDED,
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
    RECORDED = "Recorded"
    """The operator recorded what the workers report; the generation stays the same."""
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


class StartupReason(StrEnum):
    """Why workers cannot start. The job fails with this reason after `spec.startupDeadlineSeconds`."""

    UNSCHEDULABLE = "Unschedulable"
    """No node can take a worker.

    Compare the requests, node selectors and tolerations of the template with the nodes.
    """
    NO_SCHEDULER_RESPONSE = "NoSchedulerResponse"
    """A pod has no node, and no scheduler has reported why.

    Check that the scheduler of `schedulerName` is running.
    """
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """An image cannot be pulled.

    Check its name, its registry and `imagePullSecrets`.
    """
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    """A container cannot be created.

    Create the ConfigMap or Secret that the message names, or correct the template.
    """
    CONTAINER_CRASHES = "ContainerCrashes"
    """A container exits repeatedly before the trainer starts.

    Read its log.
    """
    CONTAINER_FAILED = "ContainerFailed"
    """The trainer container cannot be started.

    Correct the command or the container settings of the template.
    """
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    """An init container failed.

    Read its log.
    """
    HOLDFAST_MISSING = "HoldfastMissing"
    """The command of the trainer does not exist in the image.

    Install the holdfast package in the image, or correct the command.
    """
    NO_LAUNCHER_DETECTED = "NoLauncherDetected"
    """The trainer is running, but no Holdfast launcher reports.

    Begin the command with `holdfast run --`, or set `rendezvous.backend`.
    """
    POD_START_FAILED = "PodStartFailed"
    """The kubelet cannot start the pod, for example its sandbox or network.

    Check the node that the message names.
    """
    POD_REFUSED = "PodRefused"
    """The kubelet refused the pod.

    Do what the message says; the job avoids the node for 10 minutes where it can.
    """
    VOLUME_FAILED = "VolumeFailed"
    """A volume cannot be attached or mounted.

    Check the volume and its driver.
    """
    VOLUME_MISSING = "VolumeMissing"
    """A pod waits for a PersistentVolumeClaim.

    Create the claim, or check why it is not bound.
    """
    PREFLIGHT_FAILED = "PreflightFailed"
    """A preflight check failed on a node.

    Repair what the message names, or set `preflight.onFailure`.
    """
    PREFLIGHT_IGNORED = "PreflightIgnored"
    """A preflight check failed, and the worker joins anyway (`preflight.onFailure: Ignore`)."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota of the namespace does not allow the pod.

    Raise the quota or reduce the requests.
    """
    POD_SECURITY_VIOLATION = "PodSecurityViolation"
    """The Pod Security level of the namespace does not allow the pod.

    Correct the security context of the template.
    """
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    """The namespace is being deleted."""
    ADMISSION_DENIED = "AdmissionDenied"
    """An admission webhook or policy rejected the object.

    Change the template as the message says.
    """
    TEMPLATE_INVALID = "TemplateInvalid"
    """The API server rejected the pod as invalid.

    Correct the field of the template that the message names.
    """
    REJECTED = "Rejected"
    """The API server refused to create an object.

    Check the operator's permissions and the message.
    """
    NAME_TAKEN = "NameTaken"
    """An object with this name exists and does not belong to the job.

    Delete or rename it.
    """
    CREATION_FAILED = "CreationFailed"
    """An object could not be created; the operator tries again."""


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
"""What shows of a worker that has not failed."""


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
    """The worker left after SIGTERM; the operator replaces this reason once it knows why."""
    INTERRUPTED = "Interrupted"
    """SIGINT stopped the launcher."""
    USAGE = "Usage"
    """The options of `holdfast run` are not valid.

    Correct the command.
    """


COLLATERAL = frozenset({LauncherReason.PEER_LOST, LauncherReason.MEMBER_LOST})
"""Of a process that lost its peers: its exit code says nothing about the script."""


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
    POD_RELABELLED = "PodRelabelled"
    """Another client changed a label or the owner of a worker's pod; the operator restores it.

    Exclude pods with the label `app.kubernetes.io/managed-by=holdfast` from what changed them.
    """


class NodeReason(StrEnum):
    """Node remediation: events on Node objects."""

    NODE_ALERTED = "NodeAlerted"
    """An alert fires for the node, and the mode for it is Observe."""
    DRY_RUN = "DryRun"
    """What would be done with the node if `nodeRemediation.dryRun` were false."""
    NODE_CORDONED = "NodeCordoned"
    """The node is cordoned because of an alert."""
    NODE_DRAINING = "NodeDraining"
    """The node is being drained."""
    DRAIN_WAITS = "DrainWaits"
    """The drain waits for pods that remediation does not evict.

    Delete or move the pods that the message names.
    """
    DRAIN_INCOMPLETE = "DrainIncomplete"
    """Pods are still on the node after the deadline.

    Delete or move the pods that the message names, or set `nodeRemediation.force`.
    """
    NODE_DRAINED = "NodeDrained"
    """The node is drained and stays cordoned.

    Repair it, then uncordon it.
    """
    NODE_REPLACED = "NodeReplaced"
    """The cloud provider is replacing the machine."""
    REPLACE_FAILED = "ReplaceFailed"
    """The cloud provider refused to replace the machine.

    Check the operator's cloud permissions.
    """
    NODE_RELEASED = "NodeReleased"
    """The node is healthy again and takes pods."""
    ALERTS_RESOLVED = "AlertsResolved"
    """The alerts are resolved; the message says when the node is uncordoned."""
    ALERT_UNHEARD = "AlertUnheard"
    """Alertmanager has reported nothing about the alert for 12 hours.

    If the node is healthy, uncordon it.
    """
    STALE_ALERT = "StaleAlert"
    """The alert began before the node was created, so it is about an earlier machine of this name."""
    STALE_REMEDIATION_MARK = "StaleRemediationMark"
    """The node has a mark of an earlier setting.

    Uncordon the node when it is healthy, and remove the annotation.
    """
    UNCORDONED_EXTERNALLY = "UncordonedExternally"
    """Another client uncordoned the node, so remediation leaves it alone until the alert ends."""
    MARK_UNREADABLE = "MarkUnreadable"
    """The node's remediation annotation cannot be read.

    Remove the annotation `holdfast.dev/remediation`.
    """
    CONTROL_PLANE = "ControlPlane"
    """Nodes of the control plane are never acted on."""
    NOT_SELECTED = "NotSelected"
    """`nodeRemediation.nodeSelector` excludes the node."""
    CORDONED_BY_OTHERS = "CordonedByOthers"
    """Another client cordoned the node."""
    COOLING_DOWN = "CoolingDown"
    """The node was acted on recently (`nodeRemediation.cooldownSeconds`)."""
    BREAKER_OPEN = "BreakerOpen"
    """Too many nodes are unavailable (`nodeRemediation.maxUnavailable`).

    Check whether the alert is wrong.
    """
    RATE_LIMITED = "RateLimited"
    """Too many nodes were acted on within the last hour (`nodeRemediation.maxPerHour`)."""
