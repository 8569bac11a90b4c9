"""Names, paths, times and limits of the sidecar. The reader's side of each is in `docs/reference/sidecar.md`."""

from typing import Final

VERSION: Final = 1
"""The version of every JSON object in `docs/reference/protocol.md`."""

# Files in the run directory.
MEMBERSHIP_FILE: Final = "membership.json"
STATUS_FILE: Final = "status.json"
TOUCH_FILE: Final = "emergency_checkpoint"
ACK_FILE: Final = "emergency_checkpoint.ack"
ACK_COMMITTED: Final = "Committed"
"""Its `result` when the commit is made."""
NOTICES_FILE: Final = "sidecar-notices.json"
"""The sidecar's own memory of the notices that it has passed on."""
PREFLIGHT_FILE: Final = "preflight.json"
"""What the launcher found of the checkpoint volume."""
PREFLIGHT_OWN_FILE: Final = "sidecar-preflight.json"
"""That all checks passed, for a restarted sidecar."""
GPU_FILE: Final = "sidecar-gpus.json"
"""The same for what went wrong with the GPUs, and what their counters showed."""

# Environment.
ENV_RUN_DIR: Final = "HOLDFAST_RUN_DIR"
ENV_POD_UID: Final = "HOLDFAST_POD_UID"
ENV_POD_NAME: Final = "HOLDFAST_POD_NAME"
ENV_POD_NAMESPACE: Final = "HOLDFAST_POD_NAMESPACE"
ENV_NODE_NAME: Final = "HOLDFAST_NODE_NAME"
ENV_OPERATOR_URL: Final = "HOLDFAST_OPERATOR_URL"
ENV_TOKEN_FILE: Final = "HOLDFAST_TOKEN_FILE"  # noqa: S105 - a name
ENV_CA_FILE: Final = "HOLDFAST_CA_FILE"
ENV_NOTICE_PROVIDERS: Final = "HOLDFAST_NOTICE_PROVIDERS"
ENV_CHECKPOINT_DEADLINE: Final = "HOLDFAST_CHECKPOINT_DEADLINE_SECONDS"
ENV_METADATA_URL: Final = "HOLDFAST_METADATA_URL"
ENV_DCGM_URL: Final = "HOLDFAST_DCGM_URL"
ENV_HOST_IP: Final = "HOLDFAST_HOST_IP"
ENV_PREFLIGHT: Final = "HOLDFAST_PREFLIGHT"
ENV_PREFLIGHT_SECONDS: Final = "HOLDFAST_PREFLIGHT_SECONDS"
ENV_PREFLIGHT_GPUS: Final = "HOLDFAST_PREFLIGHT_GPUS"
ENV_PREFLIGHT_SKEW: Final = "HOLDFAST_PREFLIGHT_SKEW_SECONDS"
ENV_SIDECAR_PORT: Final = "HOLDFAST_SIDECAR_PORT"
ENV_LAUNCHER: Final = "HOLDFAST_LAUNCHER"
ENV_SIDECAR_ADDRESS: Final = "HOLDFAST_SIDECAR_ADDRESS"

DEFAULT_RUN_DIR: Final = "/var/run/holdfast"
DEFAULT_TOKEN_FILE: Final = "/var/run/secrets/holdfast/token"  # noqa: S105 - a path
DEFAULT_CA_FILE: Final = "/var/run/secrets/holdfast/ca.crt"
DEFAULT_METADATA_URL: Final = "http://169.254.169.254"
DEFAULT_CHECKPOINT_DEADLINE_SECONDS: Final = 25.0
DEFAULT_PORT: Final = 9464
DEFAULT_PREFLIGHT_SECONDS: Final = 60.0
DEFAULT_PREFLIGHT_SKEW_SECONDS: Final = 5.0

PROVIDER_AWS: Final = "AWS"
PROVIDER_GCP: Final = "GCP"
PROVIDER_AZURE: Final = "Azure"

# The operator's API for agents.
REPORT_PATH: Final = "/v1/report"
MEMBERSHIP_PATH: Final = "/v1/membership"

# Heartbeat and reports.
LAUNCHER_SILENT_SECONDS: Final = 5.0
"""A launcher touches its status every second; silent for so long, it is reported at once."""
STATUS_POLL_SECONDS: Final = 0.1
REPORT_MOVING_SECONDS: Final = 1.0
"""Between two reports while only steps move."""
REPORT_IDLE_SECONDS: Final = 5.0
"""The longest time between two reports."""
REPORT_TIMEOUT_SECONDS: Final = 10.0
FINAL_REPORT_SECONDS: Final = 5.0
"""What the last report may take, after SIGTERM."""
BACKOFF_FIRST_SECONDS: Final = 0.2
BACKOFF_MAX_SECONDS: Final = 3.0
# The longest that an operator may put us off.
RETRY_AFTER_MAX_SECONDS: Final = 30

# Long poll.
HOLD_SECONDS: Final = 30.0
MEMBERSHIP_TIMEOUT_SECONDS: Final = HOLD_SECONDS + 10.0
REVISION_MISMATCH_SECONDS: Final = 1.0
"""How long a report's answer may name another revision than the stored one before the long poll is begun again."""
CONNECT_SECONDS: Final = 2.0
"""A standby may name a leader whose machine is gone, and a Service leads there until Kubernetes has noticed: the next
attempt may find another one. Long enough for one SYN that was lost."""
KEEPALIVE_IDLE_SECONDS: Final = 5
KEEPALIVE_INTERVAL_SECONDS: Final = 2
KEEPALIVE_COUNT: Final = 3
"""A peer that vanished without a goodbye is noticed after 5 + 2 × 3 s, not after the long poll's time."""

# Sources of notices.
SOURCE_POLL_SECONDS: Final = 2.0
"""The longest time between two polls of a source that answers; the shortest is half of it."""
SOURCE_BACKOFF_KNOWN_SECONDS: Final = 5.0
"""Longest pause after errors of a source that is known to be here: a notice is too short to wait longer."""
SOURCE_BACKOFF_ABSENT_SECONDS: Final = 60.0
"""The same for a source that never answered as its cloud does: it probably does not exist here."""
METADATA_TIMEOUT_SECONDS: Final = 1.0
METADATA_TOKEN_TTL_SECONDS: Final = 21600
MAINTENANCE_POLL_SECONDS: Final = 30.0
"""Between two looks at AWS's scheduled maintenance, which is known days ahead."""
INTERRUPTION_LEAD_SECONDS: Final = 900.0
"""An interruption that is announced for later than this is not acted upon yet."""
CLOCK_TOLERANCE_SECONDS: Final = 3.0
"""A cloud's clock that differs by less is taken for the same: its times are whole seconds."""
GCP_PREEMPTION_SECONDS: Final = 30.0
GCP_MAINTENANCE_SECONDS: Final = 60.0
GCP_GPU_MAINTENANCE_SECONDS: Final = 3600.0
"""Compute Engine names no times, but says what it gives at least: a machine with GPUs an hour."""
AZURE_FIRST_ANSWER_SECONDS: Final = 130.0
"""The first request enables Scheduled Events and may be answered after two minutes, says Azure."""

# GPUs.
GPU_POLL_SECONDS: Final = 10.0
"""Exporters read the GPUs every 30 s unless told otherwise."""
GPU_STALE_SECONDS: Final = 300.0
"""Readings that have stood still for so long are not believed."""
GPU_VANISHED_SECONDS: Final = 60.0
EXPORTER_TIMEOUT_SECONDS: Final = 5.0
MAX_EXPORTER_BYTES: Final = 4 << 20
MAX_EXPORTER_LINE_BYTES: Final = 8 << 10
MAX_GPUS: Final = 64
MAX_GPU_NAME: Final = 64
MAX_GPU_ERRORS: Final = 64

# Preflight.
PREFLIGHT_POLL_SECONDS: Final = 0.5
PREFLIGHT_DONE_SECONDS: Final = 60.0
MAX_CHECKS: Final = 16
DIAL_SECONDS: Final = 2.0
DIALS_AT_ONCE: Final = 16
DIALS_A_ROUND: Final = 64
UNREACHED_SECONDS: Final = 15.0
"""A peer whose launcher listens and that is not reached for so long is out of reach."""
MAX_UNREACHED: Final = 64

# Limits.
MAX_FILE_BYTES: Final = 1 << 20
MAX_RESPONSE_BYTES: Final = 8 << 20
"""A membership of thousands of members with their claims stays far below it."""
MAX_METADATA_BYTES: Final = 64 << 10
MAX_NOTICES: Final = 16
MAX_SCRAPES: Final = 4
"""Connections that the metrics endpoint serves at once."""
SCRAPE_TIMEOUT_SECONDS: Final = 5.0

EXIT_SETTINGS: Final = 78
EXIT_FAULT: Final = 70
