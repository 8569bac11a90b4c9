"""Names that are part of the contract with users, pods and the API server (docs/reference/protocol.md)."""

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

# On a node that remediation acts on (docs/how-to/node-remediation.md); and a ConfigMap of what it did lately.
ANNOTATION_REMEDIATION = "holdfast.dev/remediation"
REMEDIATION_HISTORY = "holdfast-remediation"

# Who leads among the operator's replicas, and where agents reach it (docs/decisions/0062-hold-lease.md).
LEASE_NAME = "holdfast-operator"
LEASE_SECONDS = 15
ANNOTATION_AGENTS_URL = "holdfast.dev/agents-url"

GANG_GATE = "holdfast.dev/gang"
# A pod's preemptionPolicy.
NEVER_PREEMPTS = "Never"
# Kueue's: by the label it knows whose quota a pod asks for, and it takes the gate from what it admits.
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
# Where sidecars ask for their GPUs: dcgm-exporter on the pod's node. The kubelet puts in the address.
DCGM_URL = "http://$(HOLDFAST_HOST_IP):9400/metrics"
# Resources of which a pod with GPUs asks for some.
GPU_RESOURCES = "nvidia.com/"
GPU_RESOURCE = f"{GPU_RESOURCES}gpu"
# Those of which each is one whole GPU, and so one device to torch.
WHOLE_GPUS = (GPU_RESOURCE, "amd.com/gpu")
# One process for each of them: torchrun's word, and as other fields of the resource are written.
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
# Taints by which a cloud, an autoscaler or a notice handler says that the node will go.
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
# The machine is disturbed for a moment and stays: a checkpoint is enough, and new workers may come to it.
# The last two are a touch-file's words, which say nothing of the machine.
NOTICE_ACTIONS_PASSING = frozenset({"migrate", "freeze", "maintenance", "checkpoint", "drain"})
# Longer than a kubelet takes to be heard again after the API server was away: until then the node controller
# taints its node, and deletes pods that train. Who is lost is found sooner, by peers and reports.
TOLERATION_SECONDS = 30

HEARTBEAT_SECONDS = 0.25
DEAD_AFTER_SECONDS = 1.0
FIRST_ATTEMPT_WAIT_SECONDS = 30.0

# An elastic job waits at least this long for room for all of its workers before it begins with fewer.
FIRST_GANG_WAIT = timedelta(seconds=FIRST_ATTEMPT_WAIT_SECONDS)
# How long all pods of a gang have to be bound once their gates are lifted.
GANG_BIND = timedelta(seconds=60)
# The same where the scheduler makes room for those without a node: who has it may write a checkpoint for as long as a
# job may ask for, and ends within its grace period.
GANG_PREEMPT = timedelta(seconds=3600) + GANG_BIND
# How long some of a gang keep their quota while a queue does not admit the others.
QUEUE_PATIENCE = timedelta(minutes=5)
GANG_BACKOFF_INITIAL = timedelta(seconds=10)
GANG_BACKOFF_MAX = timedelta(minutes=5)
# Launchers that live on report a failure themselves; the operator counts it alone only after this.
INCIDENT_GRACE = timedelta(seconds=10)
# What cannot start is shown at once and tried again after this, then after as long as it has not started by then.
TEMPLATE_RETRY = timedelta(seconds=20)
TEMPLATE_RETRY_MAX = timedelta(minutes=5)
# Children are applied anew after this long, or up to twice as long.
APPLY_AGAIN = timedelta(minutes=3)
APPLY_FOR_EACH_JOB = timedelta(seconds=1.5)
# Reports older than this say nothing about now.
REPORT_FRESH = timedelta(seconds=20)
# A launcher that has spoken, and whose sidecar says that it has said nothing for so long, hangs.
LAUNCHER_HUNG = timedelta(seconds=60)
# A worker that its peers have lost, and that has not been heard of for so long, is cut off. Networks come back within
# this, as a rule, and a sidecar that was told to wait asks again.
CUT_OFF = timedelta(seconds=60)
# A trainer that runs for so long, and has no launcher that its sidecar hears, was started by another command.
LAUNCHER_HEARD = timedelta(seconds=15)
# A scheduler's first word of a pod; less than a gang has to be bound.
SCHEDULER_HEARD = timedelta(seconds=30)
# After a start of the operator: until then missing reports mean nothing.
START_GRACE = timedelta(seconds=30)
# An absent pod whose node was alive this long past its grace period was ended by its kubelet.
GONE_MARGIN = timedelta(seconds=30)
# A kubelet renews its Lease every 10 s. After a longer gap it may not know yet which pods were deleted: its watch
# comes back by a backoff of up to half a minute, and each try may take as long.
LEASE_GAP = timedelta(seconds=40)
AFTER_GAP = timedelta(seconds=60)
# A pod that outlived the deadline of its deletion: a kubelet notices a hung container runtime after 3 minutes only.
AFTER_HANG = timedelta(seconds=200)
# How often a Lease is read while a proof waits for it.
LEASE_READ = timedelta(seconds=10)
# An agent reports every 5 s at least, so a pod that reported within this time runs.
REPORTS_NOW = timedelta(seconds=10)
AVOID_DEAD = timedelta(minutes=10)
AVOID_NOTICED = timedelta(hours=1)
# A node that a rule calls bad is not used again by the job before this, or before it was booted anew.
AVOID_REPLACED = timedelta(hours=24)
# A node that failed a preflight: it may be mended at any time.
AVOID_UNFIT = timedelta(hours=1)
# A worker whose checks are not over so long after their time has nothing to say about those of others.
PREFLIGHT_MARGIN = timedelta(seconds=30)
# So many nodes left, and workers still do not reach each other: more would not help.
UNREACHED_NODES = 3
# A kubelet that refused a pod: a device plugin, say, may not have been there yet.
AVOID_REFUSED = timedelta(minutes=10)
# So many nodes avoided for it, and no kubelet takes a pod of the job: it is not the nodes' fault.
REFUSING_NODES = 3
# A failure weighs half as much against its node after this.
OFFENCE_HALVES = timedelta(hours=6)
OFFENCES_KEPT = 16
OFFENDERS_KEPT = 64
# A launcher that is lost to its peers: its container's end tells more, and is seen a moment later.
END_SEEN = timedelta(seconds=3)
# A container that ends so soon after a process of it was killed for memory ends of the same exhaustion.
SAME_EXHAUSTION = timedelta(seconds=10)
# A GPU's error and the end of the process that met it are one failure, whichever is heard of first.
SAME_FAILURE = timedelta(seconds=60)
TALLIES_KEPT = 32
TALLIED_TIMES = 20
# How long a drained launcher may take beyond the deadline of its checkpoint.
DRAIN_MARGIN = timedelta(seconds=30)
# Launchers end by themselves once the job is complete.
COMPLETE_GRACE = timedelta(seconds=60)
# The kubelet ends the sidecar after the trainer; a container of the template's own may never end.
SIDE_CONTAINER_GRACE = timedelta(seconds=60)
DEFAULT_WINDOW_SECONDS = 21600
# How often a job that may grow looks for room.
GROWTH_POLL = timedelta(seconds=30)
# How often a job is looked at, and its progress written, though nothing woke it; and by how much later for each job
# that there is.
LOOK_EVERY = timedelta(seconds=5)
LOOK_FOR_EACH_JOB = timedelta(milliseconds=20)
# How often the books of the launchers are added up in the status: with a write that is due anyhow, as a rule.
GOODPUT_EVERY = timedelta(seconds=60)
POLL_OPEN = timedelta(seconds=1)
# A world that changes on purpose is not shown as a failure before this.
STALL = timedelta(seconds=5)

MAX_INCIDENTS = 10
# Times kept of each cause, and as many more as its budget needs.
COUNTED_TIMES = 1000
KEEP_ENDED_PODS = 3
MAX_MESSAGE = 1024
MAX_ORIGIN = 200
# There may be very many avoided nodes.
MAX_AVOIDED_MESSAGE = 400
# Of a name that an agent gives: a GPU's UUID, a kind of error.
MAX_NAME = 64
# Of one pod's report; the sidecar keeps as many.
MAX_GPU_ERRORS = 64
# So many entries of a list of one report are heard. A launcher tells incidents until they are acknowledged, so those
# beyond come next; of foreign claims the highest say all.
MAX_INCIDENTS_TOLD = 32
MAX_CLAIMS_TOLD = 64
MAX_NOTICES_TOLD = 32
MAX_TIERS = 16
MAX_CHECKS = 16
MAX_UNREACHED = 64
# Nodes that a worker is told to avoid stand in the status once for each worker, and etcd takes 1.5 MB in all.
AVOIDED_BY_A_WORKER = 16
QUARANTINED_KEPT = 20
# More workers than the resource allows are in no world.
MAX_WORKERS = 1024
# The API server refuses numbers above an int64, and JSON carries exact ones only up to here.
MAX_NUMBER = 2**53

# What launchers book their ranks' seconds under; the last is for causes that are not known here. The status counts by
# this order: add new ones at the end.
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

# Labels by which clouds and autoscalers say that a node is spot capacity, and the values that mean it.
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

# Who brings the workers together (spec.rendezvous.backend).
HOLDFAST, C10D, NO_RENDEZVOUS = "Holdfast", "C10d", "None"
# How often a torchrun begins anew by itself where no budget says so; each peer that it loses is one of them.
TORCHRUN_RESTARTS = 100
# After one has given up, so long do the others take to notice.
TORCHRUNS_END = timedelta(seconds=30)

SHRINK = "Shrink"
REPLACE = "Replace"
WAIT = "Wait"
RESUME_ALWAYS = "Always"
# Rules of retention, in launchers' words, and the fields that ask for them.
RETENTION_RULES = {"hours": "keepHours", "daily": "keepDaily", "weekly": "keepWeekly", "every": "keepEvery"}
BEST_MIN, BEST_MAX = "Min", "Max"
SHARED_TIER = "shared"
MEMORY_TIER = "memory"
LOCAL_TIER = "local"
FAIL = "Fail"
# An incident that is told for this long without its end is acknowledged as it is.
ACKNOWLEDGE_AFTER = timedelta(minutes=5)
