"""Names in the protocol with users, pods and the API server (docs/reference/protocol.md)."""

from __future__ import annotations

from datetime import timedelta

GROUP = "holdfast.dev"
API_VERSION = "v1alpha1"
PLURAL = "faulttolerantjobs"
KIND = "FaultTolerantJob"
PROTOCOL_VERSION = 1

FIELD_MANAGER = "holdfast-operator"
FIELD_MANAGER_NODES = "holdfast-remediation"
MANAGED_BY = "holdfast"
REPORTING_CONTROLLER = "holdfast.dev/operator"

LABEL_JOB = "holdfast.dev/job-name"
LABEL_INCARNATION = "holdfast.dev/incarnation"
LABEL_INDEX = "holdfast.dev/worker-index"
LABEL_APP_NAME = "app.kubernetes.io/name"
LABEL_APP_INSTANCE = "app.kubernetes.io/instance"
LABEL_APP_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_APP_COMPONENT = "app.kubernetes.io/component"
COMPONENT_WORKER = "worker"
POD_SELECTOR = f"{LABEL_APP_MANAGED_BY}={MANAGED_BY},{LABEL_APP_COMPONENT}={COMPONENT_WORKER}"

# The mark of remediation on a node (docs/how-to/node-remediation.md), and the ConfigMap with its recent history.
ANNOTATION_REMEDIATION = "holdfast.dev/remediation"
REMEDIATION_HISTORY = "holdfast-remediation"

# The leader among the operator's replicas, and its address for agents (docs/decisions/0062-hold-lease.md).
LEASE_NAME = "holdfast-operator"
LEASE_SECONDS = 15
ANNOTATION_AGENTS_URL = "holdfast.dev/agents-url"

GANG_GATE = "holdfast.dev/gang"
# A value of a pod's preemptionPolicy.
NEVER_PREEMPTS = "Never"
# Of Kueue: the label names the queue of a pod, and Kueue removes the gate when it admits the pod.
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
QUEUE_GATE = "kueue.x-k8s.io/admission"

TRAINER_CONTAINER = "trainer"
SIDECAR_CONTAINER = "holdfast-sidecar"
VOLUME_RUN = "holdfast-run"
VOLUME_AGENT = "holdfast-agent"
VOLUME_SHM = "holdfast-shm"
VOLUME_CHECKPOINTS = "holdfast-checkpoints"
VOLUME_MEMORY = "holdfast-memory"
VOLUME_LOCAL = "holdfast-local"

RUN_DIR = "/var/run/holdfast"
AGENT_DIR = "/var/run/secrets/holdfast"
TOKEN_FILE = f"{AGENT_DIR}/token"
CA_KEY = "ca.crt"
CA_FILE = f"{AGENT_DIR}/{CA_KEY}"
CHECKPOINT_DIR = "/var/lib/holdfast/checkpoints"
MEMORY_DIR = "/var/run/holdfast-memory"
LOCAL_DIR = "/var/run/holdfast-local"
SHM_DIR = "/dev/shm"  # noqa: S108 - a mount point inside pods
TOKEN_AUDIENCE = "holdfast"  # noqa: S105 - an audience
TOKEN_SECONDS = 3600
SIDECAR_UID = 65532
SIDECAR_RESOURCES = '{"limits":{"memory":"96Mi"},"requests":{"cpu":"10m","memory":"48Mi"}}'

PORT_STORE = 29400
PORT_CONTROL = 29401
PORT_SIDECAR = 9464
# The endpoint that sidecars ask for their GPUs: dcgm-exporter on the pod's node. The kubelet inserts the address.
DCGM_URL = "http://$(HOLDFAST_HOST_IP):9400/metrics"
# A pod with GPUs requests at least one of these resources.
GPU_RESOURCES = "nvidia.com/"
GPU_RESOURCE = f"{GPU_RESOURCES}gpu"
# Each unit of these is one complete GPU, and therefore one device in torch.
WHOLE_GPUS = (GPU_RESOURCE, "amd.com/gpu")
# The highest number of processes per worker.
MAX_PROCESSES = 64
PORT_AGENTS = 8443
PORT_HTTP = 8080

EXIT_COMPLETE = 0
EXIT_LAUNCHER = 70
EXIT_LEFT = 75
EXIT_NOT_FOUND = 127
EXIT_START_ERROR = 128
EXIT_SIGKILL = 137
EXIT_UNSEEN = 255

TAINT_NOT_READY = "node.kubernetes.io/not-ready"
TAINT_UNREACHABLE = "node.kubernetes.io/unreachable"
TAINT_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
# Taints by which a cloud, an autoscaler or a notice handler announces that the node will leave.
TAINTS_LEAVING = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "cloud.google.com/impending-node-termination",
        "node.cloudprovider.kubernetes.io/shutdown",
    }
)
PROVIDERS = ("AWS", "GCP", "Azure")
NOTICE_ACTIONS_LEAVING = frozenset({"terminate", "stop", "hibernate", "shutdown", "preempt", "redeploy", "reboot"})
# The machine is interrupted for a moment and stays: a checkpoint is enough, and new workers may be placed there. The
# last two are values of a touch file, which say nothing about the machine.
NOTICE_ACTIONS_PASSING = frozenset({"migrate", "freeze", "maintenance", "checkpoint", "drain"})
# Longer than a kubelet takes to report again after the API server was away. Until then the node controller taints its
# node and deletes pods that train. Peers and reports detect lost workers sooner.
TOLERATION_SECONDS = 30

HEARTBEAT_SECONDS = 0.25
DEAD_AFTER_SECONDS = 1.0
FIRST_ATTEMPT_WAIT_SECONDS = 30.0

# An elastic job waits at least this long for capacity for all workers before it starts with fewer.
FIRST_GANG_WAIT = timedelta(seconds=FIRST_ATTEMPT_WAIT_SECONDS)
# The additional time for a gang to be bound while the scheduler preempts pods for the unbound ones. A preempted pod
# may write a checkpoint for as long as a job may allow, and then ends within its grace period.
GANG_PREEMPT = timedelta(seconds=3600)
# How long part of a gang keeps its quota while a queue does not admit the others.
QUEUE_PATIENCE = timedelta(minutes=5)
GANG_BACKOFF_INITIAL = timedelta(seconds=10)
GANG_BACKOFF_MAX = timedelta(minutes=5)
# The longest time between two tries of a start that fails.
TEMPLATE_RETRY_MAX = timedelta(minutes=5)
# Children are applied again after this time, or up to twice as long.
APPLY_AGAIN = timedelta(minutes=3)
APPLY_FOR_EACH_JOB = timedelta(seconds=1.5)
# Older reports do not describe the present state.
REPORT_FRESH = timedelta(seconds=20)
# The kubelet has ended an absent pod if its node was alive until this long after the pod's grace period.
GONE_MARGIN = timedelta(seconds=30)
# A kubelet renews its Lease every 10 s. After a longer gap it may not have received deletions yet: its watch
# reconnects after a backoff of up to 30 s, and each try may take as long.
LEASE_GAP = timedelta(seconds=40)
AFTER_GAP = timedelta(seconds=60)
# For a pod that outlived the deadline of its deletion: a kubelet detects a hung container runtime only after 3
# minutes.
AFTER_HANG = timedelta(seconds=200)
# The interval between reads of a Lease while a proof depends on it.
LEASE_READ = timedelta(seconds=10)
# An agent reports at least every 5 s, so a pod that reported within this time runs.
REPORTS_NOW = timedelta(seconds=10)
AVOID_DEAD = timedelta(minutes=10)
AVOID_NOTICED = timedelta(hours=1)
# For this time, or until its reboot, the job does not use a node that a rule replaced.
AVOID_REPLACED = timedelta(hours=24)
# A node whose ranks differed from other replicas twice within this time is avoided as long.
DIVERGENCE_WINDOW = timedelta(hours=24)
DIVERGENCES_TO_AVOID = 2
# A node that failed a preflight may be repaired at any time.
AVOID_UNFIT = timedelta(hours=1)
# A worker whose checks are this long overdue does not count for the checks of others.
PREFLIGHT_MARGIN = timedelta(seconds=30)
# If workers still do not reach each other after this many nodes were avoided, avoiding more would not help.
UNREACHED_NODES = 3
# A kubelet may have refused a pod because, for example, a device plugin was not there yet.
AVOID_REFUSED = timedelta(minutes=10)
# If this many nodes were avoided and no kubelet accepts a pod of the job, the nodes are not the reason.
REFUSING_NODES = 3
# The weight of a failure of a node halves after this time.
OFFENCE_HALVES = timedelta(hours=6)
OFFENCES_KEPT = 16
OFFENDERS_KEPT = 64
# For a launcher lost to its peers: the exit of its container has more information and is detected a moment later.
END_SEEN = timedelta(seconds=3)
# A container that ends this soon after the kernel killed one of its processes for memory ended for the same reason.
SAME_EXHAUSTION = timedelta(seconds=10)
# A GPU's error and the exit of the process that it affected are one failure, in either order of detection.
SAME_FAILURE = timedelta(seconds=60)
TALLIES_KEPT = 32
TALLIED_TIMES = 20
# The extra time for a drained launcher beyond the deadline of its checkpoint.
DRAIN_MARGIN = timedelta(seconds=30)
# Launchers exit by themselves once the job is complete.
COMPLETE_GRACE = timedelta(seconds=60)
# The kubelet ends the sidecar after the trainer. Another container of the template may never end.
SIDE_CONTAINER_GRACE = timedelta(seconds=60)
DEFAULT_WINDOW_SECONDS = 21600
# The increase, per job, of the interval between passes without an event.
LOOK_FOR_EACH_JOB = timedelta(milliseconds=20)
# The interval at which the status sums the launchers' accounts, usually with a write that is due anyway.
GOODPUT_EVERY = timedelta(seconds=60)
POLL_OPEN = timedelta(seconds=1)
# A planned change of world is not shown as a failure before this.
STALL = timedelta(seconds=5)

MAX_INCIDENTS = 10
# The number of times that are kept per cause; more if its budget needs them.
COUNTED_TIMES = 1000
KEEP_ENDED_PODS = 3
MAX_MESSAGE = 1024
MAX_ORIGIN = 200
# There may be many avoided nodes.
MAX_AVOIDED_MESSAGE = 400
# The length of a name that an agent sends, such as a GPU's UUID or a kind of error.
MAX_NAME = 64
# In one pod's report; the sidecar keeps as many.
MAX_GPU_ERRORS = 64
# Of one job; the trainer library reports no more.
MAX_SLOW_RANKS = 16
# The number of entries that are read from each list of a report. A launcher repeats incidents until they are
# acknowledged, so the rest follows later. Of foreign claims, the highest are sufficient.
MAX_INCIDENTS_TOLD = 32
MAX_CLAIMS_TOLD = 64
MAX_NOTICES_TOLD = 32
MAX_TIERS = 16
MAX_CHECKS = 16
MAX_UNREACHED = 64
# The status lists the nodes that a worker avoids once per worker, and etcd limits an object to 1.5 MB.
AVOIDED_BY_A_WORKER = 16
QUARANTINED_KEPT = 20
# The number of workers that the resource allows, and thus the largest world.
MAX_WORKERS = 1024
# The API server rejects numbers above an int64, and JSON represents integers exactly only up to this one.
MAX_NUMBER = 2**53

# The categories under which launchers account for the seconds of their ranks. The last one is for unknown categories.
# The status depends on this order: append new ones.
PRODUCTIVE = "productive"
UNATTRIBUTED = "unattributed"
SPENT = (
    PRODUCTIVE,
    "startup",
    "data",
    "checkpoint",
    "evaluation",
    "detection",
    "restart",
    "recompute",
    "idle",
    UNATTRIBUTED,
)

OOM_PROCESS = "Process"
OOM_CONTAINER = "Container"
OOM_SCOPES = (OOM_PROCESS, OOM_CONTAINER, "Any")
IN = "In"
NOT_IN = "NotIn"

# Labels by which clouds and autoscalers mark a node as spot capacity, with their values.
SPOT_LABELS = (
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
)
LABEL_HOSTNAME = "kubernetes.io/hostname"
LABEL_NAMESPACE = "kubernetes.io/metadata.name"
SPREAD = "Spread"
PACKED = "Packed"
GATES, NO_GANG = "Gates", "None"
ALLOW, EXCLUSIVE, IGNORE = "Allow", "Exclusive", "Ignore"

# The values of spec.rendezvous.backend.
HOLDFAST, C10D, NO_RENDEZVOUS = "Holdfast", "C10d", "None"
# The restarts that a torchrun makes by itself if no budget sets a number. The loss of each peer counts as one.
TORCHRUN_RESTARTS = 100
# The time in which the other torchruns detect that one has given up.
TORCHRUNS_END = timedelta(seconds=30)

SHRINK = "Shrink"
REPLACE = "Replace"
WAIT = "Wait"
RESUME_ALWAYS = "Always"
# Retention rules as launchers name them, with the fields of the resource.
RETENTION_RULES = {"hours": "keepHours", "daily": "keepDaily", "weekly": "keepWeekly", "every": "keepEvery"}
BEST_MIN, BEST_MAX = "Min", "Max"
SHARED_TIER = "shared"
MEMORY_TIER = "memory"
LOCAL_TIER = "local"
FAIL = "Fail"
# An incident that is reported for this long without its end is acknowledged as it is.
ACKNOWLEDGE_AFTER = timedelta(minutes=5)
