"""What one pass sees: a frozen snapshot, parsed once from the API's and the agents' JSON.

Nothing here reads a cluster or a clock; ``observe.py`` does, and fills ``Observed``.
"""

from holdfast_operator.decision.snapshot import Observed, Platform, Refusal, Rival, Standing, Tenant, Usage
from holdfast_operator.views.nodes import NodeView, parse_node
from holdfast_operator.views.pods import Exit, PodView, parse_pod, priority_of
from holdfast_operator.views.renewals import Renewals, read_renewal
from holdfast_operator.views.reports import (
    Check,
    GpuError,
    Notice,
    Preflight,
    Quarantined,
    Report,
    Restored,
    Told,
    World,
    parse_report,
)

__all__ = [
    "Check",
    "Exit",
    "GpuError",
    "NodeView",
    "Notice",
    "Observed",
    "Platform",
    "PodView",
    "Preflight",
    "Quarantined",
    "Refusal",
    "Renewals",
    "Report",
    "Restored",
    "Rival",
    "Standing",
    "Tenant",
    "Told",
    "Usage",
    "World",
    "parse_node",
    "parse_pod",
    "parse_report",
    "priority_of",
    "read_renewal",
]
