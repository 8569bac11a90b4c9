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
"""The `result` of a published checkpoint."""
NOTICES_FILE: Final = "sidecar-notices.json"
"""The notices that the sidecar has forwarded."""
PREFLIGHT_FILE: Final = "preflight.json"
"""The launcher's results for the checkpoint volume."""
PREFLIGHT_OWN_FILE: Final = "sidecar-preflight.json"
"""Whether all checks passed, for a restarted sidecar."""
GPU_FILE: Final = "sidecar-gpus.json"
"""GPU errors and the last GPU counters, for a restarted sidecar."""

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
"""A launcher updates its status every second. A launcher that is silent for this long is reported at once."""
STATUS_POLL_SECONDS: Final = 0.1
REPORT_MOVING_SECONDS: Final = 1.0
"""Between two reports while only steps move."""
REPORT_IDLE_SECONDS: Final = 5.0
"""The longest time between two reports."""
REPORT_TIMEOUT_SECONDS: Final = 10.0
FINAL_REPORT_SECONDS: Final = 5.0
"""The time limit of the last report, after SIGTERM."""
BACKOFF_FIRST_SECONDS: Final = 0.2
BACKOFF_MAX_SECONDS: Final = 3.0
# The longest that an operator may put us off.
RETRY_AFTER_MAX_SECONDS: Final = 30

# Long poll.
HOLD_SECONDS: Final = 30.0
MEMBERSHIP_TIMEOUT_SECONDS: Final = HOLD_SECONDS + 10.0
REVISION_MISMATCH_SECONDS: Final = 1.0
"""After this time with a report's answer that names another revision than the stored one, the long poll restarts."""
CONNECT_SECONDS: Final = 2.0
"""Time to open a connection.

A standby may name a leader on a lost machine, and a Service may select it until Kubernetes detects the loss. The next
attempt may reach another replica. Long enough for one lost SYN.
"""
KEEPALIVE_IDLE_SECONDS: Final = 5
KEEPALIVE_INTERVAL_SECONDS: Final = 2
KEEPALIVE_COUNT: Final = 3
"""A vanished peer is detected after 5 + 2 × 3 s, not after the long poll's time."""

# Sources of notices.
SOURCE_POLL_SECONDS: Final = 2.0
"""The longest time between two polls of a source that answers; the shortest is half of it."""
SOURCE_BACKOFF_KNOWN_SECONDS: Final = 5.0
"""The longest back-off of a source that is known to be present: notices are too short for a longer one."""
SOURCE_BACKOFF_ABSENT_SECONDS: Final = 60.0
"""The same for a source that never answered like its cloud: it is probably absent."""
METADATA_TIMEOUT_SECONDS: Final = 1.0
METADATA_TOKEN_TTL_SECONDS: Final = 21600
MAINTENANCE_POLL_SECONDS: Final = 30.0
"""The interval of requests for AWS's scheduled maintenance, which is announced days ahead."""
INTERRUPTION_LEAD_SECONDS: Final = 900.0
"""The sidecar does not yet act on an interruption that is further away than this."""
CLOCK_TOLERANCE_SECONDS: Final = 3.0
"""A cloud's clock that differs by less counts as equal, because its times are whole seconds."""
GCP_PREEMPTION_SECONDS: Final = 30.0
GCP_MAINTENANCE_SECONDS: Final = 60.0
GCP_GPU_MAINTENANCE_SECONDS: Final = 3600.0
"""Compute Engine names no times, but documents a minimum: one hour for a machine with GPUs."""
AZURE_FIRST_ANSWER_SECONDS: Final = 130.0
"""By Azure's documentation, the first request enables Scheduled Events and may take two minutes."""

# GPUs.
GPU_SOURCE: Final = "DCGM"
GPU_POLL_SECONDS: Final = 10.0
"""By default, exporters read the GPUs every 30 s."""
GPU_STALE_SECONDS: Final = 300.0
"""Readings that did not change for this long are stale."""
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
"""A peer with a listening launcher that is not reached for this long counts as unreachable."""
MAX_UNREACHED: Final = 64

# Limits.
MAX_FILE_BYTES: Final = 1 << 20
MAX_RESPONSE_BYTES: Final = 8 << 20
"""A membership of thousands of members with their claims is far smaller."""
MAX_METADATA_BYTES: Final = 64 << 10
MAX_NOTICES: Final = 16
MAX_SCRAPES: Final = 4
"""Connections that the metrics endpoint serves at once."""
SCRAPE_TIMEOUT_SECONDS: Final = 5.0

EXIT_SETTINGS: Final = 78
EXIT_FAULT: Final = 70
